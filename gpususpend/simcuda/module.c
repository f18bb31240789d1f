/* Modules, libraries, functions and kernels: the entries that a PTX text declares, by name.
 *
 * The text is not compiled. Names and parameter lists are read from it; what an entry does is kernel.c's table. Images
 * that are no PTX text (cubin, fatbin) are refused as images for another GPU. A library is a module that needs no
 * context, a kernel is a function. */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simcuda.h"

enum { MAX_VARIABLES = 8 };

/* A managed variable: the only kind that is known, since it is memory that a checkpoint refuses. */
struct variable {
    char name[64];
    size_t size;
    CUdeviceptr va; /* 0 before the first question */
};

struct CUmod_st {
    uint32_t magic;
    struct CUmod_st *next_free;
    CUfunction *functions;
    unsigned count;
    struct variable variables[MAX_VARIABLES];
    unsigned variable_count;
};
static struct pool modules = POOL(struct CUmod_st, 0x4d4f4455);
static struct pool functions = POOL(struct CUfunc_st, 0x46554e43);

bool function_valid(CUfunction function) { return pool_holds(&functions, function); }

/* A launch takes a function or a kernel; here both are one. */
CUfunction function_of(void *function_or_kernel) { return pool_holds(&functions, function_or_kernel) ? function_or_kernel : NULL; }

/* ---- reading PTX ---- */

static size_t param_size(const char *type) {
    static const struct {
        const char *name;
        size_t size;
    } types[] = {{".u64", 8}, {".s64", 8}, {".b64", 8}, {".f64", 8}, {".u32", 4}, {".s32", 4}, {".b32", 4}, {".f32", 4},
        {".u16", 2}, {".s16", 2}, {".b16", 2}, {".f16", 2}, {".u8", 1}, {".s8", 1}, {".b8", 1}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (!strncmp(type, types[i].name, strlen(types[i].name)))
            return types[i].size;
    return 0;
}

static void add_param(struct param_layout *layout, const char *declaration, size_t length) {
    char text[200], *type = text, *array;
    snprintf(text, sizeof text, "%.*s", (int)length, declaration);
    size_t align = 0;
    if (strstr(text, ".align"))
        align = strtoul(strstr(text, ".align") + 6, NULL, 10);
    size_t size = 0;
    while (!size && (type = strchr(type, '.')))
        size = param_size(type++);
    if (!size || layout->count == 32)
        return;
    align = align ? align : size;
    array = strchr(text, '[');
    if (array)
        size *= strtoul(array + 1, NULL, 10);
    layout->offset[layout->count] = (unsigned)round_up(layout->total, align);
    layout->size[layout->count] = (unsigned)size;
    layout->total = layout->offset[layout->count++] + (unsigned)size;
}

static void read_params(struct param_layout *layout, const char *at) {
    const char *end = strchr(at, ')');
    while (end && (at = strstr(at, ".param")) && at < end) {
        at += 6;
        size_t length = strcspn(at, ",)");
        add_param(layout, at, length);
        at += length;
    }
}

static CUfunction read_entry(CUmodule module, const char *at) {
    CUfunction function = pool_new(&functions);
    if (!function)
        return NULL;
    function->module = module;
    at += strspn(at, " \t\r\n");
    size_t length = strcspn(at, " \t\r\n({");
    snprintf(function->name, sizeof function->name, "%.*s", (int)length, at);
    at += length + strspn(at + length, " \t\r\n");
    if (*at == '(')
        read_params(&function->params, at);
    return function;
}

/* Read ".attribute(.managed) .align 4 .b32 name;" or "... .b8 name[16];", from behind the attribute. */
static void read_variable(struct variable *v, const char *at) {
    char text[200], *last;
    snprintf(text, sizeof text, "%.*s", (int)strcspn(at, ";"), at);
    char *array = strchr(text, '[');
    size_t count = array ? strtoul(array + 1, NULL, 10) : 1;
    if (array)
        *array = 0;
    for (char *type = text; !v->size && (type = strchr(type, '.')); type++)
        v->size = param_size(type) * count;
    for (char *word = strtok_r(text, " \t\r\n", &last); word; word = strtok_r(NULL, " \t\r\n", &last))
        snprintf(v->name, sizeof v->name, "%s", word);
}

static char *without_comments(const char *image) {
    char *text = strdup(image);
    for (char *at = text; at && (at = strstr(at, "//"));)
        while (*at && *at != '\n')
            *at++ = ' ';
    return text;
}

static CUresult load(CUmodule *out, const char *image) {
    const unsigned char *bytes = (const unsigned char *)image;
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    if (!memcmp(bytes, "\x7f" "ELF", 4) || !memcmp(bytes, "\x50\xed\x55\xba", 4))
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (!isprint(bytes[0]) && !isspace(bytes[0]))
        return CUDA_ERROR_INVALID_IMAGE;
    char *text = without_comments(image);
    if (!text || !strstr(text, ".version") || !strstr(text, ".target")) {
        free(text);
        return CUDA_ERROR_INVALID_PTX;
    }
    CUmodule module = pool_new(&modules);
    unsigned room = 0;
    for (char *at = text; (at = strstr(at, ".entry")); at += 6)
        room++;
    module->functions = calloc(room + 1, sizeof(CUfunction));
    for (char *at = text; (at = strstr(at, ".entry")); at += 6)
        module->functions[module->count++] = read_entry(module, at + 6);
    module->variable_count = 0;
    for (char *at = text; (at = strstr(at, ".attribute(.managed)")) && module->variable_count < MAX_VARIABLES;) {
        struct variable *v = &module->variables[module->variable_count++];
        memset(v, 0, sizeof *v);
        read_variable(v, at += strlen(".attribute(.managed)"));
    }
    free(text);
    *out = module;
    return CUDA_SUCCESS;
}

static CUresult load_file(CUmodule *out, const char *path) {
    FILE *file = path ? fopen(path, "rbe") : NULL;
    if (!file)
        return path ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
    char *text = NULL;
    size_t size = 0;
    ssize_t got = getdelim(&text, &size, 0, file);
    fclose(file);
    CUresult result = got > 0 ? load(out, text) : CUDA_ERROR_INVALID_IMAGE;
    free(text);
    return result;
}

static CUresult unload(CUmodule module) {
    if (!pool_holds(&modules, module))
        return CUDA_ERROR_INVALID_HANDLE;
    for (unsigned i = 0; i < module->count; i++)
        pool_delete(&functions, module->functions[i]);
    for (unsigned i = 0; i < module->variable_count; i++)
        if (module->variables[i].va)
            alloc_free(module->variables[i].va, MAP_MANAGED);
    free(module->functions);
    pool_delete(&modules, module);
    return CUDA_SUCCESS;
}

/* Variables are made when they are first asked for: code is loaded lazily. */
static CUresult find_variable(CUdeviceptr *out, size_t *size, CUmodule module, const char *name) {
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool_holds(&modules, module))
        return CUDA_ERROR_INVALID_HANDLE;
    for (unsigned i = 0; i < module->variable_count; i++) {
        struct variable *v = &module->variables[i];
        if (strcmp(v->name, name))
            continue;
        CUresult result = v->va ? CUDA_SUCCESS : managed_alloc(&v->va, v->size, CU_MEM_ATTACH_GLOBAL);
        if (out)
            *out = v->va;
        if (size)
            *size = v->size;
        return result;
    }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult find(CUfunction *out, CUmodule module, const char *name) {
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool_holds(&modules, module))
        return CUDA_ERROR_INVALID_HANDLE;
    for (unsigned i = 0; i < module->count; i++)
        if (!strcmp(module->functions[i]->name, name)) {
            *out = module->functions[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

/* ---- modules ---- */

API(CALL_CONTEXT, cuModuleLoad, (CUmodule * out, const char *path), (out, path)) { return load_file(out, path); }
API(CALL_CONTEXT, cuModuleLoadData, (CUmodule * out, const void *image), (out, image)) { return load(out, image); }
API(CALL_CONTEXT, cuModuleLoadDataEx, (CUmodule * out, const void *image, unsigned count, CUjit_option *options, void **values),
    (out, image, count, options, values)) {
    (void)count, (void)options, (void)values;
    return load(out, image);
}
API(CALL_CONTEXT, cuModuleLoadFatBinary, (CUmodule * out, const void *image), (out, image)) {
    return out && image ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_ERROR_INVALID_VALUE;
}
API(CALL_CONTEXT, cuModuleUnload, (CUmodule module), (module)) { return unload(module); }
API(CALL_CONTEXT, cuModuleGetFunction, (CUfunction * out, CUmodule module, const char *name), (out, module, name)) { return find(out, module, name); }
API(CALL_CONTEXT, cuModuleGetFunctionCount, (unsigned *out, CUmodule module), (out, module)) {
    if (!out || !pool_holds(&modules, module))
        return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *out = module->count;
    return CUDA_SUCCESS;
}
API(CALL_CONTEXT, cuModuleGetGlobal_v2, (CUdeviceptr * out, size_t *size, CUmodule module, const char *name), (out, size, module, name)) {
    return find_variable(out, size, module, name);
}
API(CALL_INIT, cuModuleGetLoadingMode, (CUmoduleLoadingMode * out), (out)) {
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = 2; /* lazy */
    return CUDA_SUCCESS;
}

/* ---- libraries ---- */

API(CALL_INIT, cuLibraryLoadData,
    (CUlibrary * out, const void *code, CUjit_option *options, void **values, unsigned count, CUlibraryOption *library_options, void **library_values,
        unsigned library_count),
    (out, code, options, values, count, library_options, library_values, library_count)) {
    (void)options, (void)values, (void)count, (void)library_options, (void)library_values, (void)library_count;
    return load((CUmodule *)out, code);
}
API(CALL_INIT, cuLibraryLoadFromFile,
    (CUlibrary * out, const char *path, CUjit_option *options, void **values, unsigned count, CUlibraryOption *library_options, void **library_values,
        unsigned library_count),
    (out, path, options, values, count, library_options, library_values, library_count)) {
    (void)options, (void)values, (void)count, (void)library_options, (void)library_values, (void)library_count;
    return load_file((CUmodule *)out, path);
}
API(CALL_INIT, cuLibraryUnload, (CUlibrary library), (library)) { return unload((CUmodule)library); }
API(CALL_INIT, cuLibraryGetKernel, (CUkernel * out, CUlibrary library, const char *name), (out, library, name)) {
    return find((CUfunction *)out, (CUmodule)library, name);
}
API(CALL_INIT, cuLibraryGetKernelCount, (unsigned *out, CUlibrary library), (out, library)) {
    if (!out || !pool_holds(&modules, library))
        return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *out = ((CUmodule)library)->count;
    return CUDA_SUCCESS;
}
API(CALL_CONTEXT, cuLibraryGetModule, (CUmodule * out, CUlibrary library), (out, library)) {
    if (!out || !pool_holds(&modules, library))
        return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *out = (CUmodule)library;
    return CUDA_SUCCESS;
}
API(CALL_CONTEXT, cuLibraryGetGlobal, (CUdeviceptr * out, size_t *size, CUlibrary library, const char *name), (out, size, library, name)) {
    return find_variable(out, size, (CUmodule)library, name);
}
API(CALL_CONTEXT, cuLibraryGetManaged, (CUdeviceptr * out, size_t *size, CUlibrary library, const char *name), (out, size, library, name)) {
    return find_variable(out, size, (CUmodule)library, name);
}
API(CALL_CONTEXT, cuKernelGetFunction, (CUfunction * out, CUkernel kernel), (out, kernel)) {
    if (!out || !function_of(kernel))
        return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *out = function_of(kernel);
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuKernelGetLibrary, (CUlibrary * out, CUkernel kernel), (out, kernel)) {
    if (!out || !function_of(kernel))
        return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *out = (CUlibrary)function_of(kernel)->module;
    return CUDA_SUCCESS;
}

/* ---- functions ---- */

static CUresult get_attribute(int *out, CUfunction_attribute name, CUfunction function) {
    static const int values[] = {1024, 0, 0, 0, 32, 90, 90, 0};
    if (!out || name < 0 || name > 15)
        return CUDA_ERROR_INVALID_VALUE;
    if (!function_valid(function))
        return CUDA_ERROR_INVALID_HANDLE;
    *out = name < 8 ? values[name] : name == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? function->max_dynamic_shared : 0;
    return CUDA_SUCCESS;
}
static CUresult set_attribute(CUfunction function, CUfunction_attribute name, int value) {
    if (name < 8 || name > 15 || value < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!function_valid(function))
        return CUDA_ERROR_INVALID_HANDLE;
    if (name == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        function->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}
API(CALL_CONTEXT, cuFuncGetAttribute, (int *out, CUfunction_attribute name, CUfunction function), (out, name, function)) {
    return get_attribute(out, name, function);
}
API(CALL_CONTEXT, cuFuncSetAttribute, (CUfunction function, CUfunction_attribute name, int value), (function, name, value)) {
    return set_attribute(function, name, value);
}
API(CALL_INIT, cuKernelGetAttribute, (int *out, CUfunction_attribute name, CUkernel kernel, CUdevice device), (out, name, kernel, device)) {
    return device_valid(device) ? get_attribute(out, name, function_of(kernel)) : CUDA_ERROR_INVALID_DEVICE;
}
API(CALL_INIT, cuKernelSetAttribute, (CUfunction_attribute name, int value, CUkernel kernel, CUdevice device), (name, value, kernel, device)) {
    return device_valid(device) ? set_attribute(function_of(kernel), name, value) : CUDA_ERROR_INVALID_DEVICE;
}
API(CALL_CONTEXT, cuFuncSetCacheConfig, (CUfunction function, CUfunc_cache config), (function, config)) {
    (void)config;
    return function_valid(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
API(CALL_CONTEXT, cuFuncGetModule, (CUmodule * out, CUfunction function), (out, function)) {
    if (!out || !function_valid(function))
        return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *out = function->module;
    return CUDA_SUCCESS;
}
static CUresult name_of(const char **out, CUfunction function) {
    if (!out || !function_valid(function))
        return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *out = function->name;
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuFuncGetName, (const char **out, CUfunction function), (out, function)) { return name_of(out, function); }
API(CALL_INIT, cuKernelGetName, (const char **out, CUkernel kernel), (out, kernel)) { return name_of(out, function_of(kernel)); }

static CUresult param_info(CUfunction function, size_t index, size_t *offset, size_t *size) {
    if (!offset || !function_valid(function))
        return offset ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    if (index >= function->params.count)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = function->params.offset[index];
    if (size)
        *size = function->params.size[index];
    return CUDA_SUCCESS;
}
API(CALL_INIT, cuFuncGetParamInfo, (CUfunction function, size_t index, size_t *offset, size_t *size), (function, index, offset, size)) {
    return param_info(function, index, offset, size);
}
API(CALL_INIT, cuKernelGetParamInfo, (CUkernel kernel, size_t index, size_t *offset, size_t *size), (kernel, index, offset, size)) {
    return param_info(function_of(kernel), index, offset, size);
}
API(CALL_INIT, cuFuncIsLoaded, (int *out, CUfunction function), (out, function)) {
    if (!out || !function_valid(function))
        return out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *out = 1;
    return CUDA_SUCCESS;
}
API(CALL_CONTEXT, cuFuncLoad, (CUfunction function), (function)) { return function_valid(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

API(CALL_CONTEXT, cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *out, CUfunction function, int block, size_t shared), (out, function, block, shared)) {
    (void)shared;
    if (!out || block <= 0 || !function_valid(function))
        return CUDA_ERROR_INVALID_VALUE;
    *out = block > 1024 ? 0 : 2048 / block;
    return CUDA_SUCCESS;
}
