"""The gates, host functions, locks and fork, with the stub driver: semantics.md 2.4, pitfalls 3, 9, 10, FR-48."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from shim.hooks import HOOKS
from tests.preload.stub import ROOT

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

PRELUDE = """
import ctypes, os, threading, time
cuda = ctypes.CDLL("libcuda.so.1")
shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
LAUNCH, MEMORY = 0, 1
HOST = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
stub_int = lambda name: ctypes.c_int.in_dll(cuda, name)
stub_pointer = lambda name: ctypes.c_void_p.in_dll(cuda, name)
calls = lambda symbol: cuda.stub_calls(symbol.encode())
stream = ctypes.c_void_p(0x1000)

def launch():
    return cuda.cuLaunchKernel(*[None] * 11)

def copy():
    return cuda.cuMemcpyHtoD_v2(None, None, None)

def copy_async():
    return cuda.cuMemcpyHtoDAsync_v2(None, None, None, stream)

def start(*functions):
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads

def until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)

def join(threads):
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "still waiting at a gate"

assert cuda.cuInit(0) == 0
"""


@pytest.fixture
def check(run: Run, inside: Path, stub_driver: Path) -> Callable[[str], None]:
    """A function that runs Python after the prelude, with the shim and the stub driver; its assertions are the test."""

    def run_checks(body: str) -> None:
        program = PRELUDE + textwrap.dedent(body)
        result = run([sys.executable, "-c", program], preload=[inside], libraries=stub_driver, PYTHONPATH=str(ROOT))
        assert result.returncode == 0, result.stderr.decode()

    return run_checks


def test_open_gates_hold_nobody(check: Callable[[str], None]) -> None:
    check("""
        assert launch() == copy() == copy_async() == 0
        assert shim.inside_in_flight(LAUNCH) == shim.inside_in_flight(MEMORY) == 0
    """)


def test_launch_gate_holds_launches_and_lets_copies_pass(check: Callable[[str], None]) -> None:
    check("""
        shim.inside_close(LAUNCH)
        waiting = start(launch, lambda: cuda.cuGraphLaunch(None, stream))
        until(lambda: shim.inside_waiting(LAUNCH) == 2, "two launches wait")
        assert shim.inside_in_flight(LAUNCH) == 0 and calls("cuLaunchKernel") == calls("cuGraphLaunch") == 0
        assert copy() == 0 and copy_async() == 0
        shim.inside_open()
        join(waiting)
        assert calls("cuLaunchKernel") == calls("cuGraphLaunch") == 1 and shim.inside_waiting(LAUNCH) == 0
    """)


def test_memory_gate_holds_copies_of_every_kind(check: Callable[[str], None]) -> None:
    check("""
        shim.inside_close(LAUNCH)
        shim.inside_close(MEMORY)
        names = ["cuMemcpyHtoD_v2_ptds", "cuMemcpyAsync_ptsz", "cuMemsetD8_v2", "cuStreamWriteValue32_v2",
                 "cuMemcpyDtoH", "cuMemAllocAsync", "cuModuleUnload", "cuLaunchHostFunc_ptsz"]
        waiting = start(*[lambda name=name: getattr(cuda, name)(*[None] * 9) for name in names])
        until(lambda: shim.inside_waiting(MEMORY) == len(names), "every one waits")
        assert not any(calls(name) for name in names)
        shim.inside_open()
        join(waiting)
        assert all(calls(name) for name in names)
    """)


def test_every_generated_hook_waits_at_its_gate(check: Callable[[str], None]) -> None:
    check("""
        from shim.hooks import HOOKS, Gate, Kind
        held = {gate: [hook for hook in HOOKS if hook.kind is Kind.GATED and hook.gate is gate] for gate in Gate}
        every = held[Gate.LAUNCH] + held[Gate.MEMORY]
        assert len(held[Gate.LAUNCH]) > 10 and len(held[Gate.MEMORY]) > 200 and not held[Gate.NONE]
        shim.inside_close(LAUNCH)
        shim.inside_close(MEMORY)
        before = {hook.symbol: calls(hook.symbol) for hook in every}
        call = lambda hook: getattr(cuda, hook.symbol)(*[None] * len(hook.arguments))
        waiting = start(*[lambda hook=hook: call(hook) for hook in every])
        until(lambda: shim.inside_waiting(LAUNCH) == len(held[Gate.LAUNCH]), "every launch waits")
        until(lambda: shim.inside_waiting(MEMORY) == len(held[Gate.MEMORY]), "everything else waits")
        # The gates themselves ask whether a stream is captured.
        passed = [hook.symbol for hook in every if calls(hook.symbol) != before[hook.symbol]]
        assert passed == ["cuStreamIsCapturing"], passed
        shim.inside_open()
        join(waiting)
        assert not [hook.symbol for hook in every if calls(hook.symbol) == before[hook.symbol]]
    """)


def test_every_hook_by_hand_waits_at_its_gate(check: Callable[[str], None]) -> None:
    """Allocation, mapping, export, import, registration, contexts, modules, callbacks."""
    check("""
        from shim.hooks import HOOKS, Gate
        held = {gate: [hook for hook in HOOKS if hook.by_hand and hook.gate is gate] for gate in Gate}
        every = held[Gate.LAUNCH] + held[Gate.MEMORY]
        assert len(every) > 80 and {"cuCtxCreate_v4", "cuModuleUnload", "cuMemMap"} < {hook.symbol for hook in every}
        shim.inside_close(LAUNCH)
        shim.inside_close(MEMORY)
        before = {hook.symbol: calls(hook.symbol) for hook in every}
        room = (ctypes.c_char * 4096)()
        call = lambda hook: getattr(cuda, hook.symbol)(*[room] * len(hook.arguments))
        returned = []
        start(*[lambda hook=hook: (call(hook), returned.append(hook.symbol)) for hook in every])
        count = lambda gate: shim.inside_waiting(gate)
        until(lambda: count(LAUNCH) + count(MEMORY) + len(returned) == len(every), "every call waits or returns")
        passed = [hook.symbol for hook in every if calls(hook.symbol) != before[hook.symbol]]
        assert not returned and not passed, (returned, passed)
        os._exit(0)
    """)


def test_nodes_of_graphs_wait_at_the_memory_gate(check: Callable[[str], None]) -> None:
    """They may name addresses, which the driver looks up when the node is made."""
    check("""
        shim.inside_close(LAUNCH)
        shim.inside_close(MEMORY)
        names = ["cuGraphAddNode", "cuGraphAddNode_v2", "cuGraphAddNode_v3", "cuGraphNodeSetParams",
                 "cuGraphNodeSetParams_v2", "cuGraphExecNodeSetParams"]
        node = (ctypes.c_char * 256)()
        last = {"cuGraphAddNode": 4, "cuGraphAddNode_v2": 5, "cuGraphAddNode_v3": 5, "cuGraphExecNodeSetParams": 2}
        waiting = start(*[lambda name=name: getattr(cuda, name)(*[None] * last.get(name, 1), node) for name in names])
        until(lambda: shim.inside_waiting(MEMORY) == len(names), "every one waits")
        assert not any(calls(name) for name in names)
        shim.inside_open()
        join(waiting)
        assert all(calls(name) == 1 for name in names)
    """)


def test_admission_lets_exactly_that_many_launches_through(check: Callable[[str], None]) -> None:
    check("""
        shim.inside_close(LAUNCH)
        waiting = start(*[launch] * 5)
        until(lambda: shim.inside_waiting(LAUNCH) == 5, "five wait")
        shim.inside_admit(2)
        until(lambda: calls("cuLaunchKernel") == 2, "two are let through")
        time.sleep(0.05)
        assert calls("cuLaunchKernel") == 2 and shim.inside_admitted() == 2 and shim.inside_waiting(LAUNCH) == 3
        shim.inside_close(MEMORY)
        shim.inside_admit(3)
        time.sleep(0.05)
        assert calls("cuLaunchKernel") == 2, "nobody is let through once both gates are closed"
        shim.inside_open()
        join(waiting)
    """)


def test_the_launch_of_a_thread_is_let_through(check: Callable[[str], None]) -> None:
    check("""
        shim.inside_close(LAUNCH)
        waiting = start(*[launch] * 3)
        until(lambda: shim.inside_waiting(LAUNCH) == 3, "three wait")
        shim.inside_admit_thread(waiting[1].native_id)
        until(lambda: not waiting[1].is_alive(), "it is let through")
        time.sleep(0.05)
        assert calls("cuLaunchKernel") == 1 and waiting[0].is_alive() and waiting[2].is_alive()
        shim.inside_admit_thread(waiting[1].native_id)
        time.sleep(0.05)
        assert shim.inside_admitted() == 1, "its thread has gone"
        shim.inside_open()
        join(waiting)
    """)


def test_more_launches_wait_than_there_are_places(check: Callable[[str], None]) -> None:
    check("""
        shim.inside_close(LAUNCH)
        waiting = start(*[launch] * 70)
        until(lambda: shim.inside_waiting(LAUNCH) == 70, "all wait")
        shim.inside_admit(64)
        until(lambda: calls("cuLaunchKernel") == 64, "those with a place are let through")
        until(lambda: shim.inside_waiting(LAUNCH) == 6, "the others wait")
        def admit():
            shim.inside_admit(1)
            return calls("cuLaunchKernel") == 70
        until(admit, "they take the places that became free")
        assert shim.inside_admitted() == 70
        shim.inside_open()
        join(waiting)
    """)


def test_admissions_that_nobody_used_lapse(check: Callable[[str], None]) -> None:
    check("""
        shim.inside_close(LAUNCH)
        shim.inside_admit(7)
        shim.inside_close(MEMORY)
        waiting = start(launch)
        until(lambda: shim.inside_waiting(LAUNCH) == 1, "waits")
        time.sleep(0.05)
        assert calls("cuLaunchKernel") == 0
        shim.inside_open()
        join(waiting)
    """)


def test_a_call_that_is_inside_is_counted_until_it_is_out(check: Callable[[str], None]) -> None:
    check("""
        stub_int("stub_hold").value = 1
        inside = start(lambda: cuda.cuMemcpyDtoH_v2(None, None, None))
        until(lambda: shim.inside_in_flight(MEMORY) == 1, "inside")
        shim.inside_close(MEMORY)
        time.sleep(0.05)
        assert shim.inside_in_flight(MEMORY) == 1
        stub_int("stub_hold").value = 0
        join(inside)
        assert shim.inside_in_flight(MEMORY) == 0
    """)


def test_once_nobody_is_inside_nobody_gets_in(check: Callable[[str], None]) -> None:
    """The order of counting and looking: threads that hammer, gates that close, counters that must stand still."""
    check("""
        stop = False
        def hammer():
            while not stop:
                copy(), launch(), copy_async()
        threads = start(*[hammer] * 6)
        seen = lambda: [calls(name) for name in ("cuMemcpyHtoD_v2", "cuLaunchKernel", "cuMemcpyHtoDAsync_v2")]
        for _ in range(100):
            shim.inside_close(LAUNCH)
            shim.inside_close(MEMORY)
            until(lambda: shim.inside_in_flight(LAUNCH) + shim.inside_in_flight(MEMORY) == 0, "all out")
            before = seen()
            time.sleep(0.002)
            assert seen() == before
            shim.inside_open()
            until(lambda: seen() != before, "they go on")
        stop = True
        join(threads)
    """)


# For each instruction of a gated call: a process is stopped there, the gate is closed, the counters are read. Where
# they say that nobody is inside, the process goes on and must not arrive in the driver. Prints how many stops said so,
# and how many arrived.
EVERY_STEP = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
extern int cuMemcpyHtoD_v2(unsigned long long, const void *, unsigned long);
extern int *stub_counter(const char *);
static int read_int(int memory, const void *at) { int v = -1; pread(memory, &v, 4, (off_t)at); return v; }
int main(void) {
    alarm(90);
    char *closed = ((void *(*)(void))dlsym(RTLD_DEFAULT, "inside_closed_word"))();
    char *shards = ((void *(*)(void))dlsym(RTLD_DEFAULT, "inside_shards"))();
    int *calls = stub_counter("cuMemcpyHtoD_v2"), held = 0, arrived = 0, running = 1;
    for (int steps = 1; running; steps++) {
        pid_t pid = fork();
        if (!pid) {
            cuMemcpyHtoD_v2(1, &pid, 8);
            if (ptrace(PTRACE_TRACEME, 0, 0, 0)) _exit(3);
            raise(SIGSTOP);
            cuMemcpyHtoD_v2(1, &pid, 8);
            raise(SIGUSR1);
        }
        int status = 0;
        waitpid(pid, &status, 0);
        if (!WIFSTOPPED(status)) return printf("ptrace\n"), 0;
        for (int i = 0; i < steps && running; i++) {
            ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
            waitpid(pid, &status, 0);
            running = WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP;
        }
        char path[64];
        sprintf(path, "/proc/%d/mem", pid);
        int memory = open(path, O_RDWR), inside = 0, both = 3;
        if (running && read_int(memory, calls) == 1) {
            pwrite(memory, &both, 4, (off_t)closed);
            for (int i = 0; i < 64; i++) inside += read_int(memory, shards + 64 * i + 4);
            ptrace(PTRACE_DETACH, pid, 0, 0);
            if (inside == 0) {
                usleep(3000);
                held++;
                arrived += read_int(memory, calls) != 1;
            }
        }
        close(memory);
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
    }
    printf("%d %d\n", held, arrived);
    return 0;
}
"""


def test_closing_at_any_instruction_leaves_no_hole(
    run: Run, inside: Path, stub_driver: Path, built: Callable[..., Path]
) -> None:
    program = built("every-step", EVERY_STEP, f"-L{stub_driver}", "-l:libcuda.so.1")
    words = run([program], preload=[inside], libraries=stub_driver).stdout.split()
    if words == [b"ptrace"]:
        pytest.skip("ptrace is not allowed here")
    held, arrived = map(int, words)
    assert held > 10 and arrived == 0


def test_a_captured_stream_passes(check: Callable[[str], None]) -> None:
    check("""
        shim.inside_close(LAUNCH)
        shim.inside_close(MEMORY)
        stub_int("stub_captured").value = 1
        before = calls("cuStreamIsCapturing")
        assert copy_async() == 0 and launch() == 0
        assert cuda.cuMemcpyAsync_ptsz(None, None, None, None) == 0
        assert calls("cuStreamIsCapturing") == before + 3
        waiting = start(copy)
        until(lambda: shim.inside_waiting(MEMORY) == 1, "a call without a stream waits")
        stub_int("stub_captured").value = 0
        shim.inside_open()
        join(waiting)
        before = calls("cuStreamIsCapturing")
        copy_async()
        assert calls("cuStreamIsCapturing") == before, "the driver is asked only where the gate is closed"
    """)


def test_every_way_to_record_is_counted(check: Callable[[str], None]) -> None:
    symbols = [hook.symbol for hook in HOOKS if re.match(r"cuStream(Begin|End)\w*[cC]apture", hook.symbol)]
    begin = [symbol for symbol in symbols if "Begin" in symbol]
    assert {symbol.split("_")[0].removeprefix("cuStreamBegin") for symbol in begin} == {
        "Capture", "CaptureToGraph", "RecaptureToGraph", "CaptureToCig"}
    check(f"""
        for at, (begin, end) in enumerate([(b, e) for b in {begin} for e in {sorted(set(symbols) - set(begin))}]):
            one = ctypes.c_void_p(0x1000 + at)
            assert getattr(cuda, begin)(one, *[None] * 5) == 0 and shim.inside_captures() == 1, begin
            assert getattr(cuda, end)(one, None) == 0 and shim.inside_captures() == 0, (begin, end)
    """)


def test_nobody_asks_whose_an_import_under_way_is(check: Callable[[str], None]) -> None:
    """The call that makes it finds out; an answer in between would be about an object that has no key yet."""
    check("""
        UNKNOWN = 2
        assert shim.inside_import_under_way() == UNKNOWN
    """)


def test_threads_of_ours_and_nested_calls_pass(check: Callable[[str], None]) -> None:
    check("""
        def ours():
            shim.inside_bypass(1)
            assert copy() == 0 and launch() == 0
        shim.inside_enter(MEMORY)
        shim.inside_close(LAUNCH)
        shim.inside_close(MEMORY)
        join(start(ours))
        assert copy() == 0, "a hook that calls a hook"
        shim.inside_leave(MEMORY)
        assert shim.inside_in_flight(MEMORY) == 0
        waiting = start(copy)
        until(lambda: shim.inside_waiting(MEMORY) == 1, "outside it waits again")
        shim.inside_open()
        join(waiting)
    """)


def test_a_host_function_passes_closed_gates(check: Callable[[str], None]) -> None:
    check("""
        seen = []
        @HOST
        def function(argument):
            seen.append((argument, copy(), launch()))
        @CALLBACK
        def callback(stream, status, argument):
            seen.append((stream, status, argument, copy()))
        assert cuda.cuLaunchHostFunc(stream, function, ctypes.c_void_p(7)) == 0
        run = HOST(stub_pointer("stub_fn").value)
        given = stub_pointer("stub_argument").value
        assert given != 7
        shim.inside_close(LAUNCH)
        shim.inside_close(MEMORY)
        join(start(lambda: run(given)))
        assert seen == [(7, 0, 0)]
        shim.inside_open()
        assert cuda.cuStreamAddCallback(stream, callback, ctypes.c_void_p(8), 0) == 0
        run_callback = CALLBACK(stub_pointer("stub_callback").value)
        given = stub_pointer("stub_argument").value
        shim.inside_close(MEMORY)
        join(start(lambda: run_callback(0x1000, 5, given)))
        assert seen[1] == (0x1000, 5, 8, 0)
        waiting = start(copy)
        until(lambda: shim.inside_waiting(MEMORY) == 1, "afterwards gates hold again")
        shim.inside_open()
        join(waiting)
    """)


def test_entries_of_host_functions_are_used_again(check: Callable[[str], None]) -> None:
    check("""
        ran = []
        function = HOST(ran.append)
        for i in range(1000):
            assert cuda.cuLaunchHostFunc(stream, function, ctypes.c_void_p(i + 1)) == 0
            HOST(stub_pointer("stub_fn").value)(stub_pointer("stub_argument").value)
        assert ran == list(range(1, 1001)) and shim.inside_hostfuncs() == 1
        stub_int("stub_fail").value = 400
        for i in range(100):
            assert cuda.cuLaunchHostFunc(stream, function, None) == 400
        assert shim.inside_hostfuncs() == 1, "one that the driver refused is free again"
        stub_int("stub_fail").value = 0
        assert cuda.cuLaunchHostFunc(stream, None, None) == 0 and stub_pointer("stub_fn").value is None
    """)


def test_a_captured_host_function_runs_as_often_as_the_graph(check: Callable[[str], None]) -> None:
    check("""
        ran = []
        function = HOST(ran.append)
        stub_int("stub_captured").value = 1
        assert cuda.cuLaunchHostFunc(stream, function, ctypes.c_void_p(3)) == 0
        run, given = HOST(stub_pointer("stub_fn").value), stub_pointer("stub_argument").value
        for _ in range(50):
            run(given)
        assert ran == [3] * 50
        for i in range(100):
            assert cuda.cuLaunchHostFunc(stream, function, ctypes.c_void_p(3)) == 0
            assert stub_pointer("stub_argument").value == given, "captured again: the same entry"
        assert shim.inside_hostfuncs() == 1
        for i in range(3000):
            cuda.cuLaunchHostFunc(stream, function, ctypes.c_void_p(10 + i % 1000))
        assert shim.inside_hostfuncs() == 1001
    """)


def test_graph_nodes_show_the_applications_function(check: Callable[[str], None]) -> None:
    check("""
        class Params(ctypes.Structure):
            _fields_ = [("fn", ctypes.c_void_p), ("data", ctypes.c_void_p)]
        ran = []
        function = HOST(ran.append)
        address = ctypes.cast(function, ctypes.c_void_p).value
        node = ctypes.c_void_p()
        given = Params(address, 5)
        assert cuda.cuGraphAddHostNode(ctypes.byref(node), None, None, None, ctypes.byref(given)) == 0
        assert (given.fn, given.data) == (address, 5) and stub_pointer("stub_fn").value != address
        HOST(stub_pointer("stub_fn").value)(stub_pointer("stub_argument").value)
        got = Params()
        assert cuda.cuGraphHostNodeGetParams(node, ctypes.byref(got)) == 0
        assert (got.fn, got.data) == (address, 5) and ran == [5]
        # The form for nodes of any kind: the type first, the host parameters at 16.
        whole = (ctypes.c_uint64 * 32)(3, 0, address, 6)
        assert cuda.cuGraphAddNode(ctypes.byref(node), None, None, None, whole) == 0
        assert whole[2] == address and stub_pointer("stub_fn").value != address
        HOST(stub_pointer("stub_fn").value)(stub_pointer("stub_argument").value)
        kernel = (ctypes.c_uint64 * 32)(0, 0, address, 6)
        assert cuda.cuGraphAddNode(ctypes.byref(node), None, None, None, kernel) == 0
        assert stub_pointer("stub_fn").value == address and ran == [5, 6], "other kinds of node are left alone"
    """)


def test_a_forked_child_starts_empty(check: Callable[[str], None]) -> None:
    """Pitfall 10, FR-48: no thread, no lock held, no state, open gates."""
    check("""
        function = HOST(lambda argument: None)
        cuda.cuLaunchHostFunc(stream, function, None)
        shim.inside_close(LAUNCH)
        shim.inside_close(MEMORY)
        waiting = start(copy, launch)
        until(lambda: shim.inside_waiting(MEMORY) == 1 and shim.inside_waiting(LAUNCH) == 1, "both wait")
        held = threading.Event()
        holder = start(lambda: (shim.inside_lock(0), shim.inside_lock(1), held.set(), time.sleep(3600)))
        held.wait()
        pid = os.fork()
        if pid == 0:
            good = not shim.inside_closed(LAUNCH) and not shim.inside_closed(MEMORY) and copy() == launch() == 0
            good = good and shim.inside_waiting(MEMORY) == 0 and shim.inside_in_flight(MEMORY) == 0
            good = good and shim.inside_hostfuncs() == 0 and cuda.cuLaunchHostFunc(stream, function, None) == 0
            shim.inside_lock(0), shim.inside_lock(1), shim.inside_unlock(1), shim.inside_unlock(0)
            os._exit(0 if good and len(os.listdir("/proc/self/task")) == 1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert shim.inside_closed(LAUNCH) and shim.inside_waiting(MEMORY) == 1, "the parent's gates stay"
        shim.inside_open()
        join(waiting)
        os._exit(0)
    """)


def test_a_fork_waits_for_a_change_of_the_tables(check: Callable[[str], None]) -> None:
    """The child closes what stands in them; an entry that is half made would name a descriptor of the application.

    It waits for a tenth of a second at most, which a change may take on a busy machine.
    """
    check("""
        state = ctypes.c_int.in_dll(shim, "inside_state")
        waited = 0
        while waited < 5:
            state.value = 0
            threads = start(lambda: shim.inside_change(30_000))
            until(lambda: state.value == 1, "the change has begun")
            began = time.monotonic()
            pid = os.fork()
            if pid == 0:
                os._exit(0 if state.value == 2 else 1)
            if os.waitpid(pid, 0)[1] == 0:
                waited += 1
            else:
                assert time.monotonic() - began > 0.1
            join(threads)
        shim.inside_lock(1), shim.inside_unlock(1)
    """)


def test_locks_out_of_order_stop_a_debug_build(run: Run, inside: Path, stub_driver: Path) -> None:
    program = PRELUDE + "shim.inside_lock(1)\nshim.inside_lock(0)\n"
    result = run([sys.executable, "-c", program], preload=[inside], libraries=stub_driver)
    assert result.returncode < 0


def test_text_without_stdio(check: Callable[[str], None]) -> None:
    check("""
        shim.inside_format.restype = ctypes.c_ulong
        def format(size, number=-5, wide=0xfedcba9876543210):
            out = ctypes.create_string_buffer(200)
            length = shim.inside_format(out, ctypes.c_ulong(size), b"text", number, ctypes.c_ulong(wide))
            return length, out.value
        whole = b"<text te -5 4294967291 fedcba9876543210 18364758544493064720 c%>"
        assert format(200) == (len(whole), whole)
        for size in range(1, len(whole) + 1):
            assert format(size) == (size - 1, whole[:size - 1]), size
        assert format(0) == (0, b"")
        assert format(200, -2**31, 0)[1] == b"<text te -2147483648 2147483648 0 0 c%>"
    """)


def test_threads_of_ours_have_the_name_and_no_signals(check: Callable[[str], None]) -> None:
    check("""
        seen = ctypes.create_string_buffer(32)
        assert shim.inside_thread(seen) == 1
        until(lambda: seen.raw[16], "the thread runs")
        assert seen.value == b"nvsnap-gpushare"
    """)
