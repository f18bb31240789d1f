/* Graphs: nodes with their dependencies, and the executable form, which runs them one after the other in an order that
 * respects those. (A node that spins for what a node of a parallel branch does would hang here, not on a GPU.) */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

struct CUgraphExec_st {
    uint32_t magic;
    struct CUgraphExec_st *next_free;
    atomic_int refs;
    CUcontext context;
    size_t count;
    struct exec_node {
        CUgraphNode origin;
        bool enabled;
        struct work work;
    } *nodes;
    unsigned long long flags;
};
static struct pool graphs = POOL(struct CUgraph_st, 0x47524148), nodes = POOL(struct CUgraphNode_st, 0x474e4f44),
                   execs = POOL(struct CUgraphExec_st, 0x47455845);
static _Atomic uint64_t next_id = 1;

CUgraph graph_new(void) {
    CUgraph graph = pool_new(&graphs);
    if (graph)
        graph->id = atomic_fetch_add(&next_id, 1);
    return graph;
}

/* Add a node, which takes over what the work owns. */
CUgraphNode graph_add(CUgraph graph, CUgraphNodeType type, const struct work *work, const CUgraphNode *deps, size_t count) {
    CUgraphNode node = pool_new(&nodes);
    CUgraphNode *grown = realloc(graph->nodes, (graph->count + 1) * sizeof node);
    if (!node || !grown)
        return NULL;
    graph->nodes = grown;
    node->graph = graph;
    node->type = type;
    node->enabled = true;
    if (work)
        node->work = *work;
    node->deps = malloc((count + 1) * sizeof node);
    if (count)
        memcpy(node->deps, deps, count * sizeof node);
    node->dep_count = count;
    graph->nodes[graph->count++] = node;
    return node;
}

static void delete_node(CUgraphNode node) {
    work_dispose(&node->work);
    if (node->child)
        graph_delete(node->child);
    free(node->deps);
    pool_delete(&nodes, node);
}

void graph_delete(CUgraph graph) {
    for (size_t i = 0; i < graph->count; i++)
        delete_node(graph->nodes[i]);
    free(graph->nodes);
    pool_delete(&graphs, graph);
}

static size_t index_of(CUgraph graph, CUgraphNode node) {
    size_t i = 0;
    while (i < graph->count && graph->nodes[i] != node)
        i++;
    return i;
}

static bool deps_valid(CUgraph graph, const CUgraphNode *deps, size_t count) {
    if (count && !deps)
        return false;
    for (size_t i = 0; i < count; i++)
        if (index_of(graph, deps[i]) == graph->count)
            return false;
    return true;
}

/* Put the nodes into an order in which each comes after what it depends on; false when there is a circle. */
static bool sorted(CUgraph graph, CUgraphNode *out) {
    bool *done = calloc(graph->count + 1, sizeof *done);
    size_t count = 0, before = 1;
    while (done && count < graph->count && count != before) {
        before = count;
        for (size_t i = 0; i < graph->count; i++) {
            bool ready = !done[i];
            for (size_t d = 0; ready && d < graph->nodes[i]->dep_count; d++)
                ready = done[index_of(graph, graph->nodes[i]->deps[d])];
            if (ready) {
                done[i] = true;
                out[count++] = graph->nodes[i];
            }
        }
        if (count == before)
            break;
    }
    free(done);
    return count == graph->count;
}

static CUgraph clone_graph(CUgraph from) {
    CUgraph to = graph_new();
    for (size_t i = 0; to && i < from->count; i++) {
        struct work work;
        work_clone(&work, &from->nodes[i]->work);
        CUgraphNode node = graph_add(to, from->nodes[i]->type, &work, NULL, 0);
        node->enabled = from->nodes[i]->enabled;
        node->child = from->nodes[i]->child ? clone_graph(from->nodes[i]->child) : NULL;
    }
    for (size_t i = 0; to && i < from->count; i++) {
        CUgraphNode node = to->nodes[i];
        node->dep_count = from->nodes[i]->dep_count;
        node->deps = realloc(node->deps, (node->dep_count + 1) * sizeof node);
        for (size_t d = 0; d < node->dep_count; d++)
            node->deps[d] = to->nodes[index_of(from, from->nodes[i]->deps[d])];
    }
    return to;
}

/* ---- executable graphs ---- */

void graph_exec_get(CUgraphExec exec) { atomic_fetch_add(&exec->refs, 1); }

void graph_exec_put(CUgraphExec exec) {
    if (atomic_fetch_sub(&exec->refs, 1) != 1)
        return;
    for (size_t i = 0; i < exec->count; i++)
        work_dispose(&exec->nodes[i].work);
    free(exec->nodes);
    pool_delete(&execs, exec);
}

static size_t flat_count(CUgraph graph) {
    size_t count = 0;
    for (size_t i = 0; i < graph->count; i++)
        count += graph->nodes[i]->child ? flat_count(graph->nodes[i]->child) : 1;
    return count;
}

static bool flatten(CUgraphExec exec, CUgraph graph) {
    CUgraphNode *order = calloc(graph->count + 1, sizeof *order);
    bool ok = order && sorted(graph, order);
    for (size_t i = 0; ok && i < graph->count; i++) {
        if (order[i]->child) {
            ok = flatten(exec, order[i]->child);
            continue;
        }
        struct exec_node *node = &exec->nodes[exec->count++];
        node->origin = order[i];
        node->enabled = true;
        work_clone(&node->work, &order[i]->work);
        if (!node->work.context)
            node->work.context = exec->context;
    }
    free(order);
    return ok;
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
    if (!out || flags & ~15ull)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool_holds(&graphs, graph))
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphExec exec = pool_new(&execs);
    if (!exec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    atomic_store(&exec->refs, 1);
    exec->context = context_current();
    exec->flags = flags;
    exec->nodes = calloc(flat_count(graph) + 1, sizeof *exec->nodes);
    if (!exec->nodes || !flatten(exec, graph)) {
        graph_exec_put(exec);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = exec;
    return CUDA_SUCCESS;
}

CUresult graph_run(CUgraphExec exec) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < exec->count && result == CUDA_SUCCESS; i++)
        if (exec->nodes[i].enabled)
            result = work_run(&exec->nodes[i].work);
    return result;
}

API(CALL_CONTEXT, cuGraphInstantiateWithFlags, (CUgraphExec * out, CUgraph graph, unsigned long long flags), (out, graph, flags)) {
    return instantiate(out, graph, flags);
}
API_STREAM(CALL_CONTEXT, cuGraphInstantiateWithParams, _ptsz, (CUgraphExec * out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params), (out, graph, params)) {
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    params->hErrNode_out = NULL;
    CUresult result = instantiate(out, graph, params->flags);
    params->result_out = result != CUDA_SUCCESS;
    return result;
}
API_STREAM(CALL_CONTEXT, cuGraphLaunch, _ptsz, (CUgraphExec exec, CUstream stream), (exec, stream)) {
    if (!pool_holds(&execs, exec))
        return CUDA_ERROR_INVALID_VALUE;
    graph_exec_get(exec);
    return work_submit(stream, &(struct work){.kind = WORK_GRAPH, .exec = exec});
}
API_STREAM(CALL_CONTEXT, cuGraphUpload, _ptsz, (CUgraphExec exec, CUstream stream), (exec, stream)) {
    CUstream found;
    return pool_holds(&execs, exec) ? stream_find(stream, &found) : CUDA_ERROR_INVALID_VALUE;
}
API(CALL_INIT, cuGraphExecDestroy, (CUgraphExec exec), (exec)) {
    if (!pool_holds(&execs, exec))
        return CUDA_ERROR_INVALID_VALUE;
    graph_exec_put(exec);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuGraphExecGetFlags, (CUgraphExec exec, cuuint64_t *flags), (exec, flags)) {
    if (!flags || !pool_holds(&execs, exec))
        return CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
}
/* Take over the parameters of a graph of the same shape. */
API(CALL_CONTEXT, cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, int *result_info), (exec, graph, result_info)) {
    CUgraphExec fresh;
    if (!pool_holds(&execs, exec) || !result_info)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = instantiate(&fresh, graph, 0);
    bool same = result == CUDA_SUCCESS && fresh->count == exec->count;
    for (size_t i = 0; same && i < fresh->count; i++)
        same = fresh->nodes[i].work.kind == exec->nodes[i].work.kind;
    result_info[0] = !same; /* its first word is the result */
    if (result != CUDA_SUCCESS)
        return result;
    if (same) {
        struct exec_node *before = exec->nodes;
        exec->nodes = fresh->nodes;
        fresh->nodes = before;
    }
    graph_exec_put(fresh);
    return same ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

/* ---- graphs and their nodes ---- */

API(CALL_INIT, cuGraphCreate, (CUgraph * out, unsigned flags), (out, flags)) {
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *out = graph_new();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API(CALL_INIT, cuGraphDestroy, (CUgraph graph), (graph)) {
    if (!pool_holds(&graphs, graph))
        return CUDA_ERROR_INVALID_VALUE;
    graph_delete(graph);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuGraphClone, (CUgraph * out, CUgraph graph), (out, graph)) {
    if (!out || !pool_holds(&graphs, graph))
        return CUDA_ERROR_INVALID_VALUE;
    *out = clone_graph(graph);
    return CUDA_SUCCESS;
}

static CUresult add(CUgraphNode *out, CUgraph graph, CUgraphNodeType type, const struct work *work, const CUgraphNode *deps, size_t count) {
    if (!out || !pool_holds(&graphs, graph) || !deps_valid(graph, deps, count))
        return CUDA_ERROR_INVALID_VALUE;
    *out = graph_add(graph, type, work, deps, count);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult kernel_work(struct work *work, const CUDA_KERNEL_NODE_PARAMS_v1 *p, void *callee, CUcontext context) {
    *work = (struct work){.kind = WORK_KERNEL, .context = context};
    work->kernel.function = function_of(callee);
    if (!work->kernel.function)
        return CUDA_ERROR_INVALID_VALUE;
    work->kernel.grid[0] = p->gridDimX, work->kernel.grid[1] = p->gridDimY, work->kernel.grid[2] = p->gridDimZ;
    work->kernel.block[0] = p->blockDimX, work->kernel.block[1] = p->blockDimY, work->kernel.block[2] = p->blockDimZ;
    work->kernel.shared = p->sharedMemBytes;
    return kernel_pack(work->kernel.function, p->kernelParams, p->extra, work->kernel.params, &work->kernel.size);
}

API(CALL_CONTEXT, cuGraphAddKernelNode_v2,
    (CUgraphNode * out, CUgraph graph, const CUgraphNode *deps, size_t count, const CUDA_KERNEL_NODE_PARAMS_v2 *p), (out, graph, deps, count, p)) {
    struct work work;
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    void *callee = p->kern ? (void *)p->kern : (void *)p->func;
    CUresult result = kernel_work(&work, (const CUDA_KERNEL_NODE_PARAMS_v1 *)p, callee, p->ctx ? p->ctx : context_current());
    return result == CUDA_SUCCESS ? add(out, graph, CU_GRAPH_NODE_TYPE_KERNEL, &work, deps, count) : result;
}
API(CALL_CONTEXT, cuGraphAddKernelNode, (CUgraphNode * out, CUgraph graph, const CUgraphNode *deps, size_t count, const CUDA_KERNEL_NODE_PARAMS_v1 *p),
    (out, graph, deps, count, p)) {
    struct work work;
    CUresult result = p ? kernel_work(&work, p, p->func, context_current()) : CUDA_ERROR_INVALID_VALUE;
    return result == CUDA_SUCCESS ? add(out, graph, CU_GRAPH_NODE_TYPE_KERNEL, &work, deps, count) : result;
}

API(CALL_INIT, cuGraphAddMemcpyNode, (CUgraphNode * out, CUgraph graph, const CUgraphNode *deps, size_t count, const CUDA_MEMCPY3D *p, CUcontext context),
    (out, graph, deps, count, p, context)) {
    struct work work;
    if (!p || !context_valid(context))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = copy_work(&work, p, context);
    return result == CUDA_SUCCESS ? add(out, graph, CU_GRAPH_NODE_TYPE_MEMCPY, &work, deps, count) : result;
}

API(CALL_INIT, cuGraphAddMemsetNode,
    (CUgraphNode * out, CUgraph graph, const CUgraphNode *deps, size_t count, const CUDA_MEMSET_NODE_PARAMS *p, CUcontext context),
    (out, graph, deps, count, p, context)) {
    if (!p || !context_valid(context) || (p->elementSize != 1 && p->elementSize != 2 && p->elementSize != 4))
        return CUDA_ERROR_INVALID_VALUE;
    struct work work = {.kind = WORK_SET, .context = context, .set = {p->dst, p->pitch, p->width, p->height, p->value, p->elementSize}};
    return add(out, graph, CU_GRAPH_NODE_TYPE_MEMSET, &work, deps, count);
}

API(CALL_INIT, cuGraphAddHostNode, (CUgraphNode * out, CUgraph graph, const CUgraphNode *deps, size_t count, const CUDA_HOST_NODE_PARAMS *p),
    (out, graph, deps, count, p)) {
    if (!p || !p->fn)
        return CUDA_ERROR_INVALID_VALUE;
    return add(out, graph, CU_GRAPH_NODE_TYPE_HOST, &(struct work){.kind = WORK_HOST, .host = {.function = p->fn, .data = p->userData}}, deps, count);
}

API(CALL_INIT, cuGraphAddEmptyNode, (CUgraphNode * out, CUgraph graph, const CUgraphNode *deps, size_t count), (out, graph, deps, count)) {
    return add(out, graph, CU_GRAPH_NODE_TYPE_EMPTY, NULL, deps, count);
}

API(CALL_INIT, cuGraphAddChildGraphNode, (CUgraphNode * out, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraph child),
    (out, graph, deps, count, child)) {
    if (!pool_holds(&graphs, child))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = add(out, graph, CU_GRAPH_NODE_TYPE_GRAPH, NULL, deps, count);
    if (result == CUDA_SUCCESS)
        (*out)->child = clone_graph(child);
    return result;
}

API(CALL_INIT, cuGraphGetNodes, (CUgraph graph, CUgraphNode *out, size_t *count), (graph, out, count)) {
    if (!count || !pool_holds(&graphs, graph))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; out && i < *count; i++)
        out[i] = i < graph->count ? graph->nodes[i] : NULL;
    *count = !out || graph->count < *count ? graph->count : *count;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuGraphNodeGetType, (CUgraphNode node, CUgraphNodeType *out), (node, out)) {
    if (!out || !pool_holds(&nodes, node))
        return CUDA_ERROR_INVALID_VALUE;
    *out = node->type;
    return CUDA_SUCCESS;
}

API(CALL_INIT, cuGraphNodeSetEnabled, (CUgraphExec exec, CUgraphNode node, unsigned enabled), (exec, node, enabled)) {
    if (!pool_holds(&execs, exec) || enabled > 1)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < exec->count; i++)
        if (exec->nodes[i].origin == node) {
            exec->nodes[i].enabled = enabled;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

API(CALL_INIT, cuGraphDestroyNode, (CUgraphNode node), (node)) {
    if (!pool_holds(&nodes, node))
        return CUDA_ERROR_INVALID_VALUE;
    CUgraph graph = node->graph;
    for (size_t i = 0; i < graph->count; i++)
        for (size_t d = 0; d < graph->nodes[i]->dep_count; d++)
            if (graph->nodes[i]->deps[d] == node)
                graph->nodes[i]->deps[d--] = graph->nodes[i]->deps[--graph->nodes[i]->dep_count];
    size_t at = index_of(graph, node);
    memmove(&graph->nodes[at], &graph->nodes[at + 1], (graph->count - at - 1) * sizeof node);
    graph->count--;
    delete_node(node);
    return CUDA_SUCCESS;
}

static CUresult change_edges(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count, bool insert) {
    if (!pool_holds(&graphs, graph) || !deps_valid(graph, from, count) || !deps_valid(graph, to, count))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        size_t at = 0;
        while (at < to[i]->dep_count && to[i]->deps[at] != from[i])
            at++;
        if ((at < to[i]->dep_count) == insert)
            return CUDA_ERROR_INVALID_VALUE;
        if (insert) {
            to[i]->deps = realloc(to[i]->deps, (to[i]->dep_count + 1) * sizeof *to);
            to[i]->deps[to[i]->dep_count++] = from[i];
        } else {
            to[i]->deps[at] = to[i]->deps[--to[i]->dep_count];
        }
    }
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuGraphAddDependencies, (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count), (graph, from, to, count)) {
    return change_edges(graph, from, to, count, true);
}
API(CALL_INIT, cuGraphAddDependencies_v2, (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count),
    (graph, from, to, data, count)) {
    (void)data;
    return change_edges(graph, from, to, count, true);
}
API(CALL_INIT, cuGraphRemoveDependencies_v2, (CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count),
    (graph, from, to, data, count)) {
    (void)data;
    return change_edges(graph, from, to, count, false);
}
API(CALL_INIT, cuGraphNodeGetDependencies_v2, (CUgraphNode node, CUgraphNode *out, CUgraphEdgeData *data, size_t *count), (node, out, data, count)) {
    if (!count || !pool_holds(&nodes, node))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; out && i < *count && i < node->dep_count; i++) {
        out[i] = node->deps[i];
        if (data)
            data[i] = (CUgraphEdgeData){0};
    }
    *count = !out || node->dep_count < *count ? node->dep_count : *count;
    return CUDA_SUCCESS;
}
