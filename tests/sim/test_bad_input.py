"""Bad input: one clear line each, exit 2 or 3 before anything changed, the workload untouched (FR-13).

With test_statedir, test_control and the B numbers of the other files this keeps every finding of FR-80 as a test: who
may speak to a socket and whom the tool believes (B01, B02), the state directory (B15), locks that fail (B13).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpususpend import processes
from gpususpend.deadline import Deadline
from gpususpend.defaults import SAME_PIDS
from gpususpend.driver import DriverProcess
from tests.programs.client import Worker
from tests.programs.setting import Setting
from tests.programs.tool import Answer, Tool
from tests.sim import ordinary
from tests.unit.fake_shim import sleeper

MIB = 1 << 20
Start = Callable[..., Worker]


def refused(answer: Answer, word: str, *named: object, exit_code: int = 3) -> None:
    """Check the exit code, the word, that the message is one line and names what it must."""
    answer.expect(exit_code)
    data = answer.json
    assert (data["ok"], data["reason"], data["exit_code"]) == (False, word, exit_code), answer
    message = data["error"]["message"]
    assert "\n" not in message and data["next"] in ("retry", "cold-start", "operator")
    for name in named:
        assert str(name) in message, f"{name} is not in: {message}"
    lines = [line for line in answer.stderr.splitlines() if line]
    assert lines == [f"nvsnap-gpu-suspend: {message}"], answer


def untouched(tool: Tool, *workers: Worker) -> None:
    """Check that workers run, hold their content, and that no record was left."""
    for worker in workers:
        worker.check()
    for group in tool.run("status", *(worker.pid for worker in workers)).expect(0).json["groups"]:
        assert group["state"] == "running" and group["id"] is None, group


@pytest.mark.parametrize("word", ["abc", "0", "12x", "1.5", "٣", "99999999999999999999", "9" * 5000, "0x10"],
                         ids=lambda word: word[:20])
def test_not_a_number(tool: Tool, word: str) -> None:
    """Neither here nor behind --tree."""
    refused(tool.run("suspend", word), "not-a-number", word, exit_code=2)
    refused(tool.run("suspend", "--tree", word), "not-a-number", word, exit_code=2)


def test_malformed_arguments(tool: Tool) -> None:
    """Every command answers in JSON too."""
    refused(tool.run("suspend"), "no-target", exit_code=2)
    refused(tool.run("suspend", "--all", 1), "usage", exit_code=2)
    for words in (["suspend", "--bogus"], ["resume", "--timeout", "x", 1], ["suspend", "--timeout", "-1", 1],
                  ["bogus"], ["suspend", "--driver", "amd", 1], ["run"]):
        assert tool.run(*words).expect(2).json["ok"] is False


def test_a_command_that_cannot_be_started_has_no_output(tool: Tool) -> None:
    """What stands on stdout of `run` is the command's; a name that is not there, and an empty one."""
    for word, code in (("/no/such/command", 3), ("", 2)):
        answer = tool.run("run", "--", word, json_out=False).expect(code)
        assert answer.stdout == "" and len(answer.stderr.splitlines()) == 1, answer


VERBS = ["suspend", "resume", "stop", "status", "recover"]


@pytest.mark.parametrize("command", VERBS)
def test_no_such_process(tool: Tool, command: str) -> None:
    """A pid that nobody has; a tree's root too, and beside a process that there is."""
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    with sleeper() as child:
        for words in ([gone.pid], ["--tree", gone.pid], [child.pid, gone.pid], [child.pid, "--tree", gone.pid]):
            refused(tool.run(command, *words), "no-such-process", gone.pid)


@pytest.mark.parametrize("command", VERBS)
def test_thread_id(tool: Tool, command: str) -> None:
    """The process that it belongs to is named."""
    with sleeper("import threading; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()") as child:
        tid = next(int(name) for name in os.listdir(f"/proc/{child.pid}/task") if int(name) != child.pid)
        refused(tool.run(command, tid), "thread-id", tid, child.pid)


@pytest.mark.parametrize("command", ["resume", "stop", "recover"])
def test_no_such_process_beside_a_suspended_group(start_worker: Start, tool: Tool, command: str) -> None:
    """Nothing is done for the one that there is, either."""
    worker = start_worker(0)
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    holder = tool.suspend(worker.pid).expect(0).json["groups"][0]["holder"]
    refused(tool.run(command, "--driver", "sim", worker.pid, gone.pid), "no-such-process", gone.pid)
    (group,) = tool.run("status", worker.pid).expect(0).json["groups"]
    assert (group["state"], group["holder"]) == ("suspended", holder)
    tool.resume(worker.pid).expect(0)
    untouched(tool, worker)


def test_own_ancestor(tool: Tool) -> None:
    """The command would freeze whoever waits for it."""
    refused(tool.run("suspend", os.getpid()), "own-ancestor", os.getpid())


def test_process_of_another_user(tool: Tool) -> None:
    """Seen from an ordinary user; its own state directory is not asked for."""
    with sleeper() as child:
        refused(ordinary.run(tool, "suspend", child.pid, env={"NVSNAP_GPU_SUSPEND_STATE_DIR": ""}), "other-user",
                child.pid)


def is_elsewhere(pid: int, kind: str) -> bool:
    """Whether a process has a namespace other than ours; its name does not tell: a fork has its parent's."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def in_namespace(option: str) -> Iterator[int]:
    """Run a process in a namespace of its own; yields its pid as seen from here."""
    if os.geteuid() != 0:
        pytest.skip("unshare needs root here")
    extra = ["--fork"] if option == "--pid" else []
    outer = subprocess.Popen(["unshare", option, *extra, sys.executable, "-c", "import time; time.sleep(600)"])
    found = 0
    try:
        until = time.monotonic() + 60
        while not found and time.monotonic() < until:
            for process in processes.all_processes():
                if outer.pid in (process.pid, process.parent) and is_elsewhere(process.pid, option.strip("-")):
                    found = process.pid
        assert found, f"unshare {option} started nothing in a namespace of its own"
        yield found
    finally:
        if found:
            os.kill(found, signal.SIGKILL)
        outer.kill()
        outer.wait()


@pytest.mark.parametrize(("option", "word"), [("--pid", "other-pid-namespace"), ("--net", "other-net-namespace")])
def test_another_namespace(tool: Tool, own_network: None, option: str, word: str) -> None:
    """With the way in, whatever the command: one that cannot look at a process cannot say that it runs."""
    with in_namespace(option) as pid:
        for command in ("suspend", "resume", "recover", "status", "stop"):
            refused(tool.run(command, pid), word, pid, "nsenter")
        for command in ("suspend", "resume", "recover"):
            refused(tool.run(command, "--tree", pid), word, pid, "nsenter")


def test_nothing_with_cuda(tool: Tool) -> None:
    """A group without a single CUDA process is a mistake."""
    with sleeper() as child:
        refused(tool.run("suspend", child.pid), "nothing-found")
        assert child.poll() is None


def test_B02_squatter(tool: Tool) -> None:
    """A process that took the name of another one's socket is not talked to."""
    with sleeper() as victim:
        code = (
            "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
            f"s.bind('\\0nvsnap-gpushare.{victim.pid}'); s.listen()"
        )
        with sleeper(code) as squatter:
            refused(tool.run("suspend", victim.pid), "wrong-peer", victim.pid, squatter.pid)
            refused(tool.run("status", victim.pid), "wrong-peer", victim.pid, squatter.pid)


def test_unknown_protocol_version(tool: Tool) -> None:
    """A shim of the future."""
    code = (
        "import socket, threading\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.bind(f'\\0nvsnap-gpushare.{os.getpid()}'); s.listen()\n"
        "def serve():\n"
        "    while True:\n"
        "        c, _ = s.accept(); c.recv(4096); c.send(b'err 1 code=version supported=9')\n"
        "threading.Thread(target=serve, daemon=True).start()"
    )
    with sleeper(code) as child:
        refused(tool.run("suspend", child.pid), "protocol-version", child.pid, 9)


def test_B01_client_of_another_user_gets_no_reply(start_worker: Start, tool: Tool) -> None:
    """The server hangs up; the tool of that user refuses before it even asks."""
    worker = start_worker(0)
    code = (
        "import os, socket, sys\n"
        f"s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect('\\0nvsnap-gpushare.{worker.pid}')\n"
        "s.settimeout(60)\n"
        "try:\n    s.send(b'1 hello'); print(s.recv(100))\nexcept OSError as e: print(b'')\n"
    )
    command = ["setpriv", f"--reuid={ordinary.UID}", "--clear-groups", ordinary.python(), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stdout.strip() == "b''", done
    refused(ordinary.run(tool, "suspend", worker.pid, env={"NVSNAP_GPU_SUSPEND_STATE_DIR": ""}), "other-user")
    untouched(tool, worker)


def test_B01_client_outside_the_pid_namespace_gets_no_reply(machine: Setting, tool: Tool) -> None:
    """To a container's process a client outside has no pid: nobody knows who it is."""
    if os.geteuid() != 0:
        pytest.skip("unshare needs root here")
    code = (
        "from cuda.bindings import driver\nimport os, time\n"
        "assert int(driver.cuInit(0)[0]) == 0\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    process = subprocess.Popen(command, env=machine.environ(with_shim=True), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        inner_pid = int(process.stdout.readline())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(60)
            link.connect(f"\0nvsnap-gpushare.{inner_pid}")
            with contextlib.suppress(BrokenPipeError):
                link.send(b"1 hello")
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(1000) == b""
        # Seen from here it has another pid, and is refused before anybody connects.
        below = processes.descendants([process.pid], processes.all_processes())
        pid = next(one.pid for one in below if one.inner_pid == inner_pid)
        refused(tool.suspend(pid), "other-pid-namespace", pid, inner_pid)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def test_state_directory_of_another_user(tool: Tool, tmp_path: Path) -> None:
    """B15 through the command line."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    os.chown(path, ordinary.UID, ordinary.UID)
    for command in ("suspend", "status", "resume", "stop", "recover", "gpus"):
        words = [command] if command in ("status", "recover", "gpus") else [command, "1"]
        refused(tool.run(*words, "--state-dir", str(path)), "unsafe-state-dir", path, ordinary.UID)
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "file", "mode"])
def test_B15_state_directory_that_is_none(tool: Tool, tmp_path: Path, kind: str) -> None:
    """A symbolic link, a file, a mode that lets others in: refused, and the target untouched."""
    path, target = tmp_path / "state", tmp_path / "target"
    target.mkdir(mode=0o700)
    (target / "precious").write_text("precious")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
        path.chmod(0o777)
    refused(tool.run("status", "--state-dir", str(path)), "unsafe-state-dir", path)
    assert [item.name for item in target.iterdir()] == ["precious"]
    assert kind != "file" or path.read_text() == "precious"


def test_no_driver(tool: Tool, tmp_path: Path) -> None:
    """FR-13: on a machine without NVIDIA's driver, with a process that seems to use it."""
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has the driver")
    node = tmp_path / "nvidia0"
    node.touch()
    env = {"LD_LIBRARY_PATH": ""}
    with sleeper(f"f = open('{node}')") as child:
        refused(tool.run("suspend", child.pid, env=env), "no-driver", "libcuda")


def test_wrong_driver(start_worker: Start, tool: Tool) -> None:
    """A simulated process, and the option left out."""
    worker = start_worker(0)
    refused(tool.run("suspend", worker.pid), "driver-mismatch", worker.pid, "--driver sim")
    untouched(tool, worker)


def test_a_driver_that_does_not_know_the_process(start_worker: Start, tool: Tool, tmp_path: Path) -> None:
    """As a command in another container may meet: found before anything has changed."""
    worker = start_worker(0)
    (tmp_path / "elsewhere").mkdir()
    answer = tool.suspend(worker.pid, env={"SIMCUDA_STATE": str(tmp_path / "elsewhere")})
    refused(answer, "driver-error", worker.pid, "NOT_INITIALIZED")
    untouched(tool, worker)


def test_another_tool_has_locked_the_process(start_worker: Start, tool: Tool, machine: Setting, tmp_path: Path) -> None:
    """Its state is named; once that tool has let it go, all is well."""
    worker = start_worker(0)
    (tmp_path / "state").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environ().items():
            patch.setenv(name, value)
        driver = DriverProcess.start(tmp_path / "state", simulated=True)
    with driver:
        assert driver.lock([worker.pid], 10)[worker.pid].ok
        refused(tool.suspend(worker.pid), "driver-state", worker.pid, "LOCKED")
        assert driver.unlock([worker.pid], Deadline(10))[worker.pid].ok
    untouched(tool, worker)


def test_unshimmed_process(start_worker: Start, tool: Tool) -> None:
    """Named, with the way out."""
    bare = start_worker(0, shim=False)
    block = bare.alloc(MIB)
    bare.fill(block, MIB, 1)
    refused(tool.suspend(bare.pid), "no-shim", bare.pid, "run --", "--allow-unshimmed")
    bare.check()


NVML = "import os, time; node = open(os.environ['NODE'], 'w'); print(os.getpid(), flush=True); time.sleep(600)"


@contextlib.contextmanager
def nvml_reader(machine: Setting, *, with_shim: bool) -> Iterator[int]:
    """A process that has a node of the driver open as NVML does, and never calls CUDA."""
    env = machine.environ(with_shim=with_shim) | {"NODE": f"{machine.state}/nvidia0"}
    with subprocess.Popen([sys.executable, "-c", NVML], env=env, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield int(child.stdout.readline())
        finally:
            child.kill()


def test_process_that_reads_nvml_under_the_shim(start_worker: Start, tool: Tool, machine: Setting) -> None:
    """The driver calls it running, as a process with CUDA; its shim has not begun, so it is only stopped and continued.

    The front ends of inference servers are such processes.
    """
    worker = start_worker(0)
    block = worker.alloc(MIB)
    worker.fill(block, MIB, 1)
    with nvml_reader(machine, with_shim=True) as reader:
        for _ in range(2):
            answer = tool.suspend(worker.pid, reader).expect(0)
            kinds = {rank["pid"]: rank["kind"] for rank in answer.json["groups"][0]["ranks"]}
            assert kinds == {worker.pid: "shimmed", reader: "plain"}
            tool.resume(worker.pid, reader).expect(0)
            worker.check()


def test_process_that_reads_nvml_without_the_shim(start_worker: Start, tool: Tool, machine: Setting) -> None:
    """Nothing tells it from a process that uses CUDA."""
    worker = start_worker(0)
    with nvml_reader(machine, with_shim=False) as reader:
        refused(tool.suspend(worker.pid, reader), "no-shim", reader)
    untouched(tool, worker)


def test_name_that_is_free_again(start_worker: Start, tool: Tool, tmp_path: Path) -> None:
    """A process for whose socket no name was free when CUDA began is refused, not overlooked; it is there later."""
    code = (
        "import os, socket, sys; from cuda.bindings import driver\n"
        f"taken = [socket.socket(socket.AF_UNIX, 5) for _ in range({SAME_PIDS})]\n"
        "for n, one in enumerate(taken): one.bind(f'\\0nvsnap-gpushare.{os.getpid()}' + (f'.{n}' if n else ''))\n"
        "assert int(driver.cuInit(0)[0]) == 0\n"
        "print(os.getpid(), flush=True); sys.stdin.readline(); taken[7].close(); sys.stdin.readline()"
    )
    env = tool.setting.environ(with_shim=True)
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as child:
        try:
            assert child.stdin is not None and child.stdout is not None
            pid = int(child.stdout.readline())
            for options in ((), ("--allow-unshimmed",)):
                answer = tool.suspend(pid, options=options)
                refused(answer, "no-socket", pid, "has the shim", f"all {SAME_PIDS} names", "try again")
                assert answer.json["next"] == "retry"
            assert any("has the shim" in told for told in tool.run("status", pid).expect(0).json["warnings"])
            child.stdin.write("\n")
            child.stdin.flush()
            until = time.monotonic() + 60
            while tool.suspend(pid).exit_code != 0:
                assert time.monotonic() < until
                time.sleep(0.2)
            tool.resume(pid).expect(0)
        finally:
            child.kill()


def test_unshimmed_process_that_may_share(start_worker: Start, tool: Tool) -> None:
    """Allowed only where nobody can map its memory."""
    first, second = start_worker(0, shim=False), start_worker(0, shim=False)
    answer = tool.suspend(first.pid, options=("--allow-unshimmed",))
    refused(answer, "may-share", first.pid, second.pid)
    second.halt()
    answer = tool.suspend(first.pid, options=("--allow-unshimmed",))
    refused(answer, "may-share", f"pid {second.pid} is stopped by a signal and cannot be asked", f"-CONT {second.pid}")
    second.kill()
    tool.suspend(first.pid, options=("--allow-unshimmed",)).expect(0)
    tool.resume(first.pid).expect(0)


def test_a_part_of_a_gpu_and_mps(start_worker: Start, tool: Tool, tmp_path: Path) -> None:
    """By the environment that the workload was started with, not by the command's; with the sign that shows it."""
    part = start_worker(0, env={"NVIDIA_VISIBLE_DEVICES": "MIG-12"})
    refused(tool.suspend(part.pid), "mig", part.pid, "NVIDIA_VISIBLE_DEVICES=MIG-12")
    os.mkfifo(tmp_path / "control")
    client = start_worker(0, env={"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    refused(tool.suspend(client.pid), "mps", client.pid, f"{tmp_path}/control")
    bare = start_worker(0, shim=False, env={"NVIDIA_VISIBLE_DEVICES": "MIG-12"})
    for worker in (part, client):
        worker.kill()
    refused(tool.suspend(bare.pid, options=("--allow-unshimmed",)), "mig", bare.pid)


@pytest.mark.parametrize("depth", ["process", "pages"])
def test_FR55_memory_that_is_the_machines(start_worker: Start, tool: Tool, tmp_path: Path, depth: str) -> None:
    """To keep it in RAM frees nothing, and froze machines; a store takes what the shim carries."""
    worker = start_worker(0)
    worker.fill(worker.alloc(MIB), MIB, 1)
    options, unified = ("--depth", depth), {"SIMCUDA_INTEGRATED": "1"}
    refused(tool.suspend(worker.pid, options=options, env=unified), "integrated-gpu", worker.pid, "--store")
    place = ("--store", tmp_path / "store", "--ckpt-dir", tmp_path / "checkpoint")
    tool.suspend(worker.pid, options=(*options, *map(str, place)), env=unified).expect(0)
    tool.resume(worker.pid).expect(0)
    worker.check()
    bare = start_worker(0, shim=False)
    worker.kill()
    if depth == "process":
        allowed = ("--allow-unshimmed",)
        refused(tool.suspend(bare.pid, options=allowed, env=unified), "integrated-gpu", bare.pid)


def test_tool_inside_the_driver(start_worker: Start, tool: Tool) -> None:
    """Pitfall 20: a warning, since most do no harm."""
    worker = start_worker(0, env={"CUDA_INJECTION64_PATH": "/opt/tool.so"})
    answer = tool.suspend(worker.pid).expect(0)
    assert any(str(worker.pid) in text and "/opt/tool.so" in text for text in answer.json["warnings"]), answer
    tool.resume(worker.pid).expect(0)


@pytest.mark.parametrize(("heartbeat", "warned"), [("0", True), ("86400", False), ("", False)])
def test_fr57_away_for_longer_than_a_watchdog_waits(
    start_worker: Start, tool: Tool, heartbeat: str, warned: bool
) -> None:
    """FR-57: the resume says what may end the process now, and how to prevent it."""
    worker = start_worker(0, env={"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": heartbeat})
    tool.suspend(worker.pid).expect(0)
    warnings = tool.resume(worker.pid).expect(0).json["warnings"]
    told = [text for text in warnings if "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" in text]
    assert bool(told) == warned and all(str(worker.pid) in text for text in told), warnings


def test_half_of_a_sharing_group(start_worker: Start, tool: Tool) -> None:
    """Seen from either side, and both run on."""
    owner, other = start_worker(0), start_worker(1)
    block = owner.alloc(MIB)
    owner.fill(block, MIB, 5)
    other.expect(other.ipc_open(owner.ipc_get(block)), MIB, [5])
    refused(tool.suspend(owner.pid), "half-group", other.pid)
    refused(tool.suspend(other.pid), "half-group", owner.pid)
    untouched(tool, owner, other)


def test_process_that_is_gone_meanwhile(start_worker: Start, tool: Tool) -> None:
    """Killed just before: no such process, and the other is untouched."""
    worker, dying = start_worker(0), start_worker(0)
    dying.kill()
    refused(tool.suspend(worker.pid, dying.pid), "no-such-process", dying.pid)
    untouched(tool, worker)


def test_driver_too_old(start_worker: Start, tool: Tool, machine: Setting) -> None:
    """FR-13: the version is in the message. (The simulated driver is never too old, so the check itself is asked.)"""
    from gpususpend import errors, preflight

    for version in ("565.77", "550.54.15", "", "unknown"):
        with pytest.raises(errors.DriverTooOld) as caught:
            preflight.check_driver_version(version, simulated=False)
        assert "570" in str(caught.value)
    preflight.check_driver_version("570.86.10", simulated=False)


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--state-dir", ""], ["suspend", "1", "--trace", ""], ["suspend", "1", "--store", ""],
        ["suspend", "1", "--store", "x", "--ckpt-dir", ""], ["resume", "1", "--cache", ""],
        ["resume", "1", "--gpu-map", ""], ["gpus", ""], ["store", "ls", ""], ["store", "rm", "x", ""],
        ["store", "fsck", "x", "--repair-from", ""], ["cache-gc", "", "1"], ["cache-prefetch", "x", "y", ""],
        ["store", "forget", "x", "y", "--state-dir", ""],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_path_that_is_empty(tool: Tool, words: list[str]) -> None:
    """As an unset variable of a script leaves it: malformed, never the default or the current directory."""
    refused(tool.run(*words), "usage", exit_code=2)


def test_a_variable_that_is_empty(tool: Tool) -> None:
    """It means the default, as one that is not set."""
    env = {"NVSNAP_GPU_SUSPEND_STATE_DIR": "", "NVSNAP_GPU_SUSPEND_DRIVER": ""}
    words = "import click, sys; from gpususpend.cli import options\n" \
        "@options.common_options\ndef shown(common): print(common.state_dir, common.simulated)\n" \
        "click.command()(shown)([])"
    done = subprocess.run([sys.executable, "-c", words], env=tool.environ() | env, capture_output=True, text=True)
    assert done.stdout.split() == ["None", "False"], done


def test_every_command_has_help_with_an_example(tool: Tool) -> None:
    """And says it in no time."""
    for command in ("suspend", "resume", "stop", "status", "gpus", "recover", "run", "env"):
        answer = tool.run(command, "--help", json_out=False).expect(0)
        assert "Example:" in answer.stdout and f"nvsnap-gpu-suspend {command}" in answer.stdout


def test_socket_is_there(start_worker: Start) -> None:
    """The name that all of this is about."""
    worker = start_worker(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(f"\0nvsnap-gpushare.{worker.pid}")
        link.send(b"1 hello")
        assert link.recv(1000).startswith(b"ok 1")


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "-1", "soon", "1e300", "1e9"])
def test_a_time_limit_is_a_number_above_zero(tool: Tool, seconds: str) -> None:
    """Refused as an argument, before anybody is looked for."""
    tool.run("suspend", "--driver", "sim", "--timeout", seconds, 1, json_out=False).expect(2)


PLAIN_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_name_that_no_terminal_can_show() -> None:
    """Bytes that are no text, and what a terminal takes for commands."""
    program = r"import ctypes, time; ctypes.CDLL(None).prctl(15, b'a\xff\x1b[2J'); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        named.stdout.readline()
        comm = processes.read_process(named.pid).comm
        named.kill()
    assert comm == "a\ufffd?[2J"
    script = f"from gpususpend import start; start.open_streams(); print({comm!a})"
    command, env = [sys.executable, "-c", script], os.environ | PLAIN_LOCALE
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert done.stdout == b"a\\ufffd?[2J\n"
