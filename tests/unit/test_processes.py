"""Facts about processes: identity, threads, namespaces, trees, device nodes, death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpususpend import errors, processes
from tests.unit.fake_shim import sleeper


def own() -> processes.Process:
    """Return this process."""
    return processes.read_process(os.getpid())


def test_own_facts() -> None:
    """What /proc says of this process."""
    me = own()
    assert (me.pid, me.uid, me.parent) == (os.getpid(), os.geteuid(), os.getppid())
    assert me.inner_pid == me.pid and me.start_time > 0
    assert processes.is_same(me) and not processes.is_same(replace(me, start_time=me.start_time + 1))


def test_no_such_process() -> None:
    """A pid that nobody has, and a zombie."""
    with pytest.raises(errors.NoSuchProcess):
        processes.read_process(2**22 + 1)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(errors.NoSuchProcess):
        processes.read_process(child.pid)
    child.wait()


def test_thread_id_is_told_from_a_process() -> None:
    """The id of a thread has a folder in /proc too."""
    with sleeper("import threading; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()") as child:
        tids = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
        tid = next(tid for tid in tids if tid != child.pid)
        with pytest.raises(errors.ThreadId) as caught:
            processes.read_process(tid)
        assert caught.value.facts["owner"] == child.pid


def test_name_with_brackets_and_spaces(tmp_path: Path) -> None:
    """The command's name stands between brackets in `stat` and may hold any character."""
    with sleeper("open('/proc/self/comm', 'w').write('a) R 1 (b')") as child:
        found = processes.read_process(child.pid)
        assert found.comm == "a) R 1 (b" and found.parent == os.getpid()


def test_tree_and_own_line() -> None:
    """Descendants over several generations; this process and its ancestors."""
    code = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with sleeper(code) as child:
        deadline = time.monotonic() + 60
        below: list[processes.Process] = []
        while len(below) < 2 and time.monotonic() < deadline:
            below = processes.descendants([os.getpid()], processes.all_processes())
            below = [p for p in below if p.pid == child.pid or p.parent == child.pid]
        assert {process.parent for process in below} == {os.getpid(), child.pid}
        for process in below:
            if process.pid != child.pid:
                os.kill(process.pid, 9)
    line = processes.own_line()
    assert os.getpid() in line and os.getppid() in line


def test_other_user_is_refused() -> None:
    """An ordinary user works on own processes only; root on all."""
    me = own()
    with pytest.raises(errors.OtherUser):
        processes.check_reachable(me, own_uid=me.uid + 1)
    processes.check_reachable(me, own_uid=0)


@pytest.mark.parametrize(
    ("option", "error"), [("--pid", errors.OtherPidNamespace), ("--net", errors.OtherNetNamespace)]
)
def test_other_namespace_is_refused(option: str, error: type[errors.Refused]) -> None:
    """Named with the way out."""
    if os.geteuid() != 0:
        pytest.skip("unshare needs root here")
    command = ["unshare", option, *(["--fork"] if option == "--pid" else []), "sleep", "600"]
    child = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            below = [p for p in processes.all_processes() if p.comm == "sleep" and child.pid in (p.pid, p.parent)]
            if below:
                break
        with pytest.raises(error) as caught:
            processes.check_reachable(below[0])
        assert "nsenter" in str(caught.value)
        os.kill(below[0].pid, 9)
    finally:
        child.kill()
        child.wait()


def test_threads_by_name() -> None:
    """By the kernel's name of a thread."""
    code = (
        "import threading\n"
        "done = threading.Event()\n"
        "def named():\n"
        f"    with open('/proc/thread-self/comm', 'w') as file: file.write('{processes.CONTROL_THREAD}')\n"
        "    done.set(); time.sleep(600)\n"
        "threading.Thread(target=named, daemon=True).start(); done.wait()"
    )
    with sleeper(code) as child:
        found = processes.threads_named(child.pid, [processes.CONTROL_THREAD])
        assert len(found) == 1 and found[0] != child.pid
    assert processes.threads_named(child.pid, [processes.CONTROL_THREAD]) == []


def test_nodes_that_are_open_and_mapped(tmp_path: Path) -> None:
    """A node of the simulated driver counts; a library with nvidia in its name does not."""
    node, library = tmp_path / "nvidiactl-1-2", tmp_path / "libnvidia-ml.so.1"
    for path in (node, library):
        path.write_bytes(b"x" * 4096)
    code = (
        "import mmap\n"
        f"a = open('{node}', 'r+b'); m = mmap.mmap(a.fileno(), 4096)\n"
        f"b = open('{library}', 'r+b'); n = mmap.mmap(b.fileno(), 4096); os.unlink('{node}')"
    )
    with sleeper(code) as child:
        nodes = processes.nvidia_nodes(child.pid)
        assert {node.path for node in nodes} == {str(node)}
        assert sorted(node.fd is None for node in nodes)[0] is False and any(node.fd is None for node in nodes)
        assert processes.uses_cuda(child.pid)
    assert processes.nvidia_nodes(child.pid) == []


def test_FR2_death_is_seen_by_pidfd() -> None:
    """At once, in order, and a pid that was reused counts as dead."""
    with sleeper() as first, sleeper() as second:
        members = [processes.read_process(first.pid), processes.read_process(second.pid)]
        with processes.Watch(members) as watch:
            assert watch.dead() == []
            second.kill()
            second.wait()
            assert [process.pid for process in watch.dead()] == [second.pid]
            first.kill()
            first.wait()
            assert [process.pid for process in watch.dead()] == [second.pid, first.pid]
    me = own()
    with processes.Watch([replace(me, start_time=1)]) as watch:
        assert [process.pid for process in watch.dead()] == [me.pid]
    with processes.Watch(members) as watch:
        assert len(watch.dead()) == 2


def test_watch_sees_one_that_is_on_its_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is being taken apart: the pidfd says nothing yet, and whoever asks it gets errors."""
    with sleeper() as child, processes.Watch([processes.read_process(child.pid)]) as watch:
        assert watch.dead() == []
        monkeypatch.setattr(processes, "is_same", lambda process: False)
        assert [process.pid for process in watch.dead()] == [child.pid]
        child.kill()
        child.wait()
        assert len(watch.dead()) == 1


def test_one_look_tells_whether_a_process_uses_cuda(tmp_path: Path) -> None:
    """Its maps are read once: they are the slowest file of a process with much memory."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    folder = tmp_path / "7"
    (folder / "task" / "7").mkdir(parents=True)
    (folder / "fd").mkdir()
    (folder / "task" / "7" / "comm").write_text("python\n")
    node, shim = "7f00-7f01 rw-s 0 00:05 7 /dev/nvidia0\n", f"7f02-7f03 r-xp 0 08:01 8 /x/{processes.SHIM_LIBRARY}\n"
    for maps, uses in (("", False), (node, True), (node + shim, False), (shim, False)):
        (folder / "maps").write_text(maps)
        opened.clear()
        assert processes.uses_cuda(7, str(tmp_path)) is uses
        assert opened.count(f"{tmp_path}/7/maps") == 1
    (folder / "task" / "7" / "comm").write_text(f"{processes.CONTROL_THREAD}\n")
    (folder / "maps").write_text(node + shim)
    assert processes.uses_cuda(7, str(tmp_path))
