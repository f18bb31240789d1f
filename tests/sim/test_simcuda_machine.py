"""The simulated machine: what it shares between processes, what it leaves behind, what a checkpoint takes out of it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import SIMCUDA, Setting
from tests.programs.usage import memory_by_pid

pytestmark = pytest.mark.machine(driver="sim")
MIB = 1 << 20
Start = Callable[..., Worker]


def bare(start: Start, device: int = 0, **options: object) -> Worker:
    """Start a worker without the shim."""
    return start(device, shim=False, **options)


CONTEXT = """
cuda.cuInit(0)
context = ctypes.c_void_p()
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
address = ctypes.c_uint64()
"""
"""Start of a script that needs a context."""


def run_script(machine: Setting, script: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run Python text on the machine, without the shim; `cuda` is the driver by ctypes."""
    text = 'import ctypes, os, sys\ncuda = ctypes.CDLL("libcuda.so.1")\n' + script
    return subprocess.run([sys.executable, "-c", text], env=machine.environ() | extra, capture_output=True, text=True,
                          timeout=60, check=False)


def cycle(machine: Setting, pid: int, *verbs: str) -> list[int]:
    """Drive a process through checkpoint verbs from another process; return the codes."""
    text = (f"from tests.programs import calls\ncalls.init()\n"
            f"print(*[getattr(calls, 'cp_' + verb)({pid}).code for verb in {list(verbs)!r}])")
    done = run_script(machine, text)
    assert done.returncode == 0, done.stderr
    return [int(code) for code in done.stdout.split()]


FULL = ("lock", "checkpoint", "restore", "unlock")


def test_last_process_leaves_no_folder(machine: Setting, start_worker: Start) -> None:
    one, other = bare(start_worker), bare(start_worker, 1)
    one.alloc(MIB)
    assert machine.state is not None
    for worker in (one, other):
        worker.process.terminate()  # Python ends on SIGTERM without its exit handlers: as good as killed
        worker.process.wait(60)
    assert machine.state.exists()  # nobody was left to remove it ...
    assert run_script(machine, "cuda.cuInit(0)").returncode == 0
    assert not machine.state.exists()  # ... until the next one came and left


def test_killed_process_gives_its_memory_back(machine: Setting, start_worker: Start) -> None:
    one, other = bare(start_worker), bare(start_worker)
    free = other.mem_info()[0]
    one.alloc(64 * MIB)
    handle = one.mem_create(64 * MIB)
    fd = one.mem_export(handle)
    copy = one.give_fd(fd)
    assert other.mem_info()[0] == free - 128 * MIB
    one.kill()
    context = 16 * MIB
    assert other.mem_info()[0] == free - 64 * MIB + context  # the export that this test holds keeps its memory
    os.close(copy)
    assert other.mem_info()[0] == free + context
    assert machine.state is not None
    assert not list(machine.state.glob("mem-*"))


def test_killed_while_others_call(machine: Setting, start_worker: Start) -> None:
    """Processes die in mid-call, over and over; the table's lock and what it says survive."""
    witness = bare(start_worker)
    free = witness.mem_info()[0]
    loop = """
print("up", flush=True)
while True:
    cuda.cuMemAlloc_v2(ctypes.byref(address), 1 << 20)
    cuda.cuMemFree_v2(address)
"""
    for delay_s in (0.01, 0.03, 0.05, 0.08):
        text = 'import ctypes\ncuda = ctypes.CDLL("libcuda.so.1")\n' + CONTEXT + loop
        victims = [subprocess.Popen([sys.executable, "-c", text], env=machine.environ(), stdout=subprocess.PIPE)
                   for _ in range(2)]
        for victim in victims:
            assert victim.stdout is not None
            victim.stdout.readline()
        time.sleep(delay_s)
        for victim in victims:
            victim.kill()
            victim.wait()
        assert witness.mem_info()[0] == free


def test_usage_by_pid(machine: Setting, start_worker: Start) -> None:
    one, other = bare(start_worker, 0), bare(start_worker, 1)
    one.alloc(100 * MIB)
    used = memory_by_pid(machine)
    assert used[one.pid] == (100 + 16) * MIB
    assert used[other.pid] == 16 * MIB
    assert cycle(machine, one.pid, "lock", "checkpoint") == [0, 0]
    assert one.pid not in memory_by_pid(machine)
    assert cycle(machine, one.pid, "restore", "unlock") == [0, 0]
    assert memory_by_pid(machine) == used


def test_checkpointed_process_holds_nothing_of_the_machine(machine: Setting, start_worker: Start) -> None:
    """What CRIU will have to dump: no descriptor and no mapping of the state folder, no open connection."""
    worker = bare(start_worker)
    worker.block(4 * MIB)
    address = worker.alloc(4 * MIB)
    worker.fill(address, 4 * MIB, 5)
    maps, fds = Path(f"/proc/{worker.pid}/maps"), Path(f"/proc/{worker.pid}/fd")
    assert str(machine.state) in maps.read_text()
    assert worker.nvidia_fds()
    assert cycle(machine, worker.pid, "lock", "checkpoint") == [0, 0]
    assert str(machine.state) not in maps.read_text()
    assert not [fd for fd in fds.iterdir() if str(machine.state) in os.readlink(fd)]
    assert cycle(machine, worker.pid, "restore", "unlock") == [0, 0]
    worker.check()


def test_machine_may_go_while_a_process_is_checkpointed(machine: Setting, start_worker: Start) -> None:
    """A checkpointed process joins whatever machine it finds when it is restored, as after CRIU on another node."""
    worker = bare(start_worker)
    address = worker.alloc(8 * MIB)
    worker.fill(address, 8 * MIB, 3)
    assert cycle(machine, worker.pid, "lock", "checkpoint") == [0, 0]
    assert machine.state is not None
    assert not machine.state.exists()
    assert cycle(machine, worker.pid, "restore", "unlock") == [0, 0]
    worker.check()


LINKS = """
at = "/proc/self/fd/"
links = [os.readlink(at + n) for n in os.listdir(at) if os.path.lexists(at + n)]
"""


def test_descriptors_do_not_pass_exec(machine: Setting) -> None:
    inner = "import os\n" + LINKS + "print(links)"
    done = run_script(machine, CONTEXT + f"os.execv(sys.executable, [sys.executable, '-c', {inner!r}])")
    assert done.returncode == 0
    assert "nvidia" not in done.stdout and "socket" not in done.stdout


def test_fork_without_exec_has_no_driver(machine: Setting) -> None:
    child = LINKS + """
ok = cuda.cuInit(0) == 3 and cuda.cuCtxSynchronize() == 3 and not [l for l in links if "nvidia" in l]
os._exit(0 if ok else 1)
"""
    done = run_script(machine, CONTEXT + f"""
child = os.fork()
if child == 0:
    exec({child!r})
assert os.waitpid(child, 0)[1] == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(address), 4096) == 0
""")
    assert done.returncode == 0, done.stderr


def test_cpu_cannot_touch_device_memory(machine: Setting) -> None:
    done = run_script(machine, CONTEXT + """
assert cuda.cuMemAlloc_v2(ctypes.byref(address), 4096) == 0
ctypes.c_uint8.from_address(address.value).value
""")
    assert done.returncode == -11


@pytest.mark.machine(driver="sim", devices=5, memory_bytes=64 * MIB)
def test_size_of_the_machine(machine: Setting, start_worker: Start) -> None:
    worker = bare(start_worker, 4)
    assert worker.device_count() == 5
    assert worker.mem_info() == [48 * MIB, 64 * MIB]
    assert worker.code("alloc", 64 * MIB) == 2
    assert worker.code("alloc", 32 * MIB) == 0
    assert worker.code("mem_create", 32 * MIB, "device", 4) == 2
    assert worker.code("mem_create", 32 * MIB, "device", 3) == 0


def test_no_devices(machine: Setting) -> None:
    assert run_script(machine, "sys.exit(cuda.cuInit(0))", SIMCUDA_DEVICES="0").returncode == 100


def test_foreign_folder_is_refused(machine: Setting, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert run_script(machine, "sys.exit(cuda.cuInit(0) % 256)", SIMCUDA_STATE=str(link)).returncode == 304 % 256


def test_version_symbols() -> None:
    cuda = ctypes.CDLL(str(SIMCUDA))
    cuda.simcudaDriverVersionString.restype = ctypes.c_char_p
    assert cuda.simcudaVersion() == 13000
    assert cuda.simcudaDriverVersionString().startswith(b"580.")
