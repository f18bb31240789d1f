"""A process under test: does what its client asks, one command after another, and knows what its memory must hold.

Runs as `python -m tests.programs.worker FD`, FD being a SOCK_SEQPACKET socket. A request is one datagram of JSON,
`{"do": name, "args": [...], "kwargs": {...}}`, with at most one descriptor; so is the answer, `{"code": n, "value": v}`
or `{"error": traceback}`. Commands are the functions of `calls` and the methods of `Worker`. SIGUSR1 prints the stacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.programs import calls, content, denied, loops
from tests.programs.calls import Result, need

Tables = dict[str, dict[int, Any]]

MADE: dict[str, Callable[[Tables, Any, Any], None]] = {
    "alloc": lambda t, a, v: t["allocations"].update({v: {"size": a[0], "ipc": False}}),
    "free": lambda t, a, v: t["allocations"].pop(a[0], None),
    "ipc_get": lambda t, a, v: t["allocations"].get(a[0], {}).update(ipc=True),
    "ipc_open": lambda t, a, v: t["opened"].update({v: a[0]}),
    "ipc_close": lambda t, a, v: t["opened"].pop(a[0], None),
    "mem_create": lambda t, a, v: t["handles"].update({v: a[0]}),
    "multicast_create": lambda t, a, v: t["handles"].update({v: a[0]}),
    "mem_import": lambda t, a, v: t["handles"].update({v: 0}),
    "fabric_import": lambda t, a, v: t["handles"].update({v: 0}),
    "mem_release": lambda t, a, v: t["handles"].pop(a[0], None),
    "mem_map": lambda t, a, v: t["mappings"].update({a[0]: {"size": a[1], "handle": a[2]}}),
    "mem_unmap": lambda t, a, v: t["mappings"].pop(a[0], None),
    "mem_export": lambda t, a, v: t["fds"].update({v: a[0]}),
    "host_register": lambda t, a, v: t["registered"].update({a[0]: a[1]}),
    "host_unregister": lambda t, a, v: t["registered"].pop(a[0], None),
}
"""How a successful call changes the list of what this process owns: tables, arguments, value."""

ASKED = [
    "MEMORY_TYPE", "DEVICE_ORDINAL", "RANGE_START_ADDR", "RANGE_SIZE", "IS_LEGACY_CUDA_IPC_CAPABLE", "IS_MANAGED",
    "MAPPED", "BUFFER_ID",
]


class Worker:
    """State of the process. Every public method is a command; what it returns is the answer's value."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._context = 0
        self._modules: dict[int, int] = {}
        self._functions: dict[tuple[int, str], int] = {}
        self._regions: dict[int, content.Region] = {}
        self._loops: dict[int, loops.Loop] = {}
        self._jobs: dict[int, list[Result]] = {}
        self._buffers: dict[int, mmap.mmap] = {}
        self._tables: Tables = {
            name: {} for name in ("allocations", "opened", "handles", "mappings", "fds", "registered")
        }
        self._received = -1

    # Start and kernels

    def start(self, ordinal: int = 0) -> dict[str, Any]:
        """Initialise the driver and make the primary context of a device current."""
        need(calls.init(), "cuInit")
        self._context = need(calls.primary_retain(ordinal), "primary context")
        need(calls.ctx_set(self._context), "set the context")
        return {"context": self._context, "simulated": calls.is_simulated()}

    def use(self, context: int) -> None:
        """Make `context` the one of this thread and of loops and jobs started from now on."""
        need(calls.ctx_set(context), "set the context")
        self._context = context

    def kernel(self, name: str, arguments: list[int], stream: int = 0, form: str = "plain") -> Result:
        """Launch a kernel by name, loading the module into the current context at first use."""
        context = need(calls.ctx_current(), "current context")
        if (context, name) not in self._functions:
            if context not in self._modules:
                self._modules[context] = need(calls.module_load(), "load the module")
            self._functions[context, name] = need(calls.function(self._modules[context], name), name)
        return calls.launch(self._functions[context, name], name, arguments, stream, form=form)

    # Memory of the process, descriptors

    def buffer(self, size: int, where: str = "anonymous") -> int:
        """Map host memory, `anonymous` or `shared` (a memfd); return its address."""
        if where == "anonymous":
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            fd = os.memfd_create("worker-buffer")
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
            os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._buffers[address] = memory
        return address

    def take(self) -> int:
        """Keep the descriptor that came with this request; return its number."""
        fd, self._received = self._received, -1
        if fd < 0:
            raise ValueError("no descriptor came with the request")
        return fd

    def give(self, fd: int) -> tuple[int, int]:
        """Send a copy of a descriptor back with the answer."""
        return fd, fd

    def close_fd(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)
        self._tables["fds"].pop(fd, None)

    def dup_fd(self, fd: int) -> int:
        """Duplicate a descriptor."""
        return os.dup(fd)

    def exec_program(self, code: str) -> None:
        """Become another program, a Python one; nobody gets an answer to this."""
        os.execv(sys.executable, [sys.executable, "-c", code])

    def deny(self, call: str) -> None:
        """Have a system call answered with EPERM, in threads that are started from now on and in this one."""
        denied.deny(call)

    def hold_gil(self, told: int, fd: int) -> None:
        """Say on `told` that the interpreter runs nothing from now on, until a byte comes out of `fd`."""
        libc, byte = ctypes.PyDLL(None), ctypes.create_string_buffer(1)
        libc.write(told, byte, 1)
        libc.read(fd, byte, 1)

    def use_up_fds(self) -> list[int]:
        """Open descriptors until the process may have no more; return them."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        opened = []
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))
        return opened

    def inherited_fds(self) -> list[int]:
        """Return the descriptors that a program has which this process starts."""
        code = "import os; f = '/proc/self/fd/'; print(*[n for n in os.listdir(f) if os.path.exists(f + n)])"
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        done = subprocess.run([sys.executable, "-Sc", code], close_fds=False, env=environ, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, text=True, timeout=60, check=True)
        return [int(word) for word in done.stdout.split()]

    def nvidia_fds(self) -> list[str]:
        """Return what the open descriptors of the driver point to."""
        return nvidia_links("self")

    def readlink(self, fd: int) -> str:
        """Return what a descriptor points to."""
        return os.readlink(f"/proc/self/fd/{fd}")

    # Content

    def fill(self, address: int, size: int, seed: int) -> None:
        """Write the pattern of `seed` through the driver and remember it."""
        content.write(address, content.pattern([seed], size // 4))
        self.expect(address, size, [seed])

    def host_fill(self, address: int, size: int, seed: int) -> None:
        """Write the pattern by the CPU, into host memory, and remember it."""
        content.host_view(address, size // 4)[:] = content.pattern([seed], size // 4)
        self._regions[address] = content.Region(address, size, [seed], host=True)

    def expect(self, address: int, size: int, seeds: list[int]) -> None:
        """Remember that the memory holds the sum of the patterns of `seeds`."""
        self._regions[address] = content.Region(address, size, seeds)

    def forget(self, address: int) -> None:
        """Expect nothing of an address any more."""
        self._regions.pop(address, None)

    def verify(self) -> list[Any]:
        """Compare all remembered memory with the reference; return what is wrong."""
        return [found for region in self._regions.values() if (found := region.wrong())]

    def read(self, address: int, count: int = 1) -> list[int]:
        """Return words of device memory."""
        return [int(word) for word in content.read(address, count)]

    def host_read(self, address: int, count: int = 1) -> list[int]:
        """Return words of this process's memory, read by the CPU."""
        return [int(word) for word in content.host_view(address, count)]

    def write(self, address: int, words: list[int]) -> None:
        """Write words to device memory."""
        content.write(address, content.np.array(words, dtype=content.np.uint32))

    def host_write(self, address: int, word: int) -> None:
        """Write one word of this process's memory by the CPU."""
        content.host_view(address, 1)[0] = word

    def checksum(self, address: int, size: int) -> int:
        """Return the sum of all words, computed by a kernel."""
        out = need(calls.alloc(8), "allocate")
        need(calls.memset_d8(out, 0, 8), "memset")
        need(self.kernel("gs_checksum", [address, size // 4, out]), "launch")
        need(calls.ctx_sync(), "sync")
        low, high = self.read(out, 2)
        need(calls.free(out), "free")
        return high << 32 | low

    # Whole blocks of shared memory

    def block(self, size: int, kind: str = "device", ordinal: int = 0, access: list[list[Any]] | None = None,
              handle_type: int = 1, hint: int = 0) -> dict[str, int]:
        """Create, map and open cuMem memory; return handle, address and size."""
        handle = self._do("mem_create", size, kind, ordinal, handle_type)
        return self._mapped(handle, size, access or self._usual(kind, ordinal), hint)

    def import_block(self, fd: int, size: int, kind: str = "device", ordinal: int = 0,
                     access: list[list[Any]] | None = None, hint: int = 0) -> dict[str, int]:
        """Import, map and open memory of another process."""
        return self._mapped(self._do("mem_import", fd), size, access or self._usual(kind, ordinal), hint)

    def _usual(self, kind: str, ordinal: int) -> list[list[Any]]:
        own = need(calls.ctx_device(), "device of the context")
        return [["device", own, 3]] + ([] if kind == "device" else [[kind, ordinal, 3]])

    def _mapped(self, handle: int, size: int, access: list[list[Any]], hint: int) -> dict[str, int]:
        address = need(calls.mem_reserve(size, 0, hint), "reserve")
        self._do("mem_map", address, size, handle)
        for entry in access:
            need(calls.mem_access(address, size, [entry]), "set access")
        return {"handle": handle, "address": address, "size": size}

    def map_block(self, handle: int, size: int, access: list[list[Any]] | None = None) -> dict[str, int]:
        """Map and open what a handle stands for."""
        return self._mapped(handle, size, access or self._usual("device", 0), 0)

    def drop_block(self, block: dict[str, int]) -> None:
        """Unmap and release memory of `block` or `import_block`; the reservation is freed too."""
        self._do("mem_unmap", block["address"], block["size"])
        self._do("mem_release", block["handle"])
        need(calls.mem_address_free(block["address"], block["size"]), "free the range")
        self.forget(block["address"])

    # Graphs

    def record_graph(self, stream: int, steps: list[list[Any]], child: bool = False) -> int:
        """Record steps, each [command, arguments...] in the stream, as an executable graph; `child`: inside another."""
        need(calls.capture_begin(stream, 1), "capture")
        for name, *arguments in steps:
            if name == "kernel":
                need(self.kernel(*arguments, stream=stream), "launch in a capture")
            else:
                need(calls.COMMANDS[name](*arguments, stream), name)
        graph = need(calls.capture_end(stream), "capture")
        if child:
            graph = need(calls.graph_of(graph), "child graph")
        return int(need(calls.graph_instantiate(graph), "instantiate"))

    def record_until(self, stream: int, mode: int, fd: int) -> None:
        """Record an empty graph until a byte comes out of a descriptor."""
        need(calls.capture_begin(stream, mode), "capture")
        os.read(fd, 1)
        need(calls.capture_end(stream), "capture")

    def hold_tables(self, told: int, fd: int) -> None:
        """Hold the lock of the shim's tables, and say so on `told`, until a byte comes out of `fd`.

        With a shim that has a way in (tests.preload.inside).
        """
        inside = ctypes.CDLL(os.environ["LD_PRELOAD"])
        inside.inside_lock(1)
        os.write(told, b".")
        os.read(fd, 1)
        inside.inside_unlock(1)

    def foreign(self, library: str, name: str, *arguments: int) -> int:
        """Call a function of a library (tests.programs.foreign), which takes and returns numbers of 64 bits."""
        function = ctypes.CDLL(library)[name]
        function.restype = ctypes.c_uint64
        return int(function(*map(ctypes.c_uint64, arguments)))

    # Loops and jobs

    def loop_start(self, kind: str, pause_s: float = 0, **options: Any) -> int:
        """Start a background loop of `loops.KINDS`; return its number."""
        number = len(self._loops) + 1
        self._loops[number] = loops.Loop(kind, self._context, loops.KINDS[kind](self.kernel, **options), pause_s)
        return number

    def loop_state(self, number: int) -> dict[str, Any]:
        """Return rounds and errors of a loop."""
        return self._loops[number].state()

    def loop_stop(self, number: int, timeout_s: float = 10) -> dict[str, Any]:
        """Stop a loop; return rounds and errors."""
        return self._loops[number].stop(timeout_s)

    def in_context(self, context: int, name: str, *arguments: Any) -> Result:
        """Run one command with another context current in this thread."""
        answer = calls.ctx_set(context)
        if answer.code == 0:
            answer = self.run(name, list(arguments), {})
            calls.ctx_set(self._context)
        return answer

    def job(self, name: str, *arguments: Any) -> int:
        """Run one command in a thread of its own; return the number to ask for its answer by."""
        number = len(self._jobs) + 1
        answers: list[Result] = []
        self._jobs[number] = answers

        def run() -> None:
            calls.ctx_set(self._context)
            answers.append(self.run(name, list(arguments), {}))

        threading.Thread(target=run, name=f"job-{number}", daemon=True).start()
        return number

    def job_answer(self, number: int, timeout_s: float = 0) -> list[Any] | None:
        """Return [code, value] of a job, None while it still runs."""
        until = time.monotonic() + timeout_s
        while not self._jobs[number] and time.monotonic() < until:
            time.sleep(0.002)
        return list(self._jobs[number][0]) if self._jobs[number] else None

    # Processes

    def fork_idle(self) -> int:
        """Fork a child that never calls CUDA and ends with this process; return its pid."""
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            self._link.close()
            while True:
                time.sleep(60)
        return child

    def fork_often(self, gap_s: float) -> None:
        """Start one program after the other from now on; each child takes `gap_s` from its fork to its exec."""
        def run() -> None:
            while True:
                child = os.fork()
                if child == 0:
                    time.sleep(gap_s)
                    os.execv("/bin/true", ["true"])
                os.waitpid(child, 0)

        threading.Thread(target=run, name="forks", daemon=True).start()

    def fork_with_cuda(self, ordinal: int = 0) -> int:
        """Fork a child that starts CUDA, owns one allocation and ends with this process; return its pid."""
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            self._link.close()
            self.start(ordinal)
            need(calls.alloc(4096), "allocate")
            while True:
                time.sleep(60)
        return child

    def environment(self, name: str) -> str | None:
        """Return a variable of the environment."""
        return os.environ.get(name)

    # What the application can see of its objects

    def snapshot(self) -> dict[str, Any]:
        """Return all that the driver answers about this process's objects, to be compared before and after."""
        tables = self._tables
        return {
            "context": calls.ctx_current(),
            "allocations": {a: self._seen_allocation(a, known["ipc"]) for a, known in tables["allocations"].items()},
            "opened": {a: self._seen_address(a) for a in tables["opened"]},
            "handles": {h: calls.mem_properties(h) for h in tables["handles"]},
            "mappings": {a: self._seen_mapping(a) for a in tables["mappings"]},
            "registered": {a: [calls.host_flags(a), calls.host_device_pointer(a)] for a in tables["registered"]},
            "fds": {fd: "nvidia" in self.readlink(fd) for fd in tables["fds"]},
            "wrong": self.verify(),
        }

    def _seen_address(self, address: int) -> list[Any]:
        return [calls.address_range(address), calls.pointer_attributes(ASKED, address)]

    def _seen_allocation(self, address: int, shared: bool) -> list[Any]:
        return [*self._seen_address(address), calls.ipc_get(address) if shared else None]

    def _seen_mapping(self, address: int) -> list[Any]:
        held = calls.mem_retain(address)
        if held.code == 0:
            need(calls.mem_release(held.value), "release")
        devices = range(need(calls.device_count(), "devices"))
        return [*self._seen_address(address), held, [calls.mem_get_access(address, "device", d) for d in devices]]

    # The command loop

    def _do(self, name: str, *arguments: Any) -> Any:
        return need(self.run(name, list(arguments), {}), name)

    def run(self, name: str, arguments: list[Any], options: dict[str, Any]) -> Result:
        """Run one command and keep the list of objects up to date."""
        function = calls.COMMANDS.get(name) or getattr(self, name)
        answer = function(*arguments, **options)
        if not isinstance(answer, Result):
            answer = Result(0, answer)
        if answer.code == 0 and name in MADE:
            MADE[name](self._tables, arguments, answer.value)
        return answer

    def serve(self) -> None:
        """Answer requests until the client closes the socket."""
        while True:
            text, fds, _, _ = socket.recv_fds(self._link, 1 << 17, 4)
            if not text:
                return
            self._received = fds[0] if fds else -1
            request, sent = json.loads(text), []
            try:
                answer = self.run(request["do"], request.get("args", []), request.get("kwargs", {}))
                value = answer.value
                if request["do"] == "give":
                    value, sent = value[0], [value[1]]
                reply = {"code": answer.code, "value": value}
            except calls.DriverError as error:
                reply = {"code": error.code, "value": str(error)}
            except Exception:
                reply = {"error": traceback.format_exc()}
            socket.send_fds(self._link, [json.dumps(reply).encode()], sent)


def nvidia_links(pid: int | str) -> list[str]:
    """Return what the descriptors of a process point to, where that belongs to the driver."""
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        # A descriptor may be closed between the listing and the look.
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sorted(link for link in links if "nvidia" in link)


def main() -> None:
    """Serve the socket whose number is the first argument."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    Worker(socket.socket(fileno=int(sys.argv[1]))).serve()
    # Daemon threads may be inside the driver; do not wait for them.
    os._exit(0)


if __name__ == "__main__":
    main()
