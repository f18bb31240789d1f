"""k8s/vllm_ckpt_cycle.sh: it cycles a server in place, and leaves it running however it ends (B09)."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs.client import Worker
from tests.programs.setting import ROOT, Setting
from tests.programs.tool import Tool

MIB = 1 << 20
SCRIPT = ROOT / "k8s" / "vllm_ckpt_cycle.sh"
pytestmark = pytest.mark.machine(driver="sim")


@pytest.fixture
def worker(start_worker: Callable[..., Worker]) -> Worker:
    """A process with memory whose content is known."""
    one = start_worker(0)
    one.fill(one.alloc(MIB), MIB, 1)
    return one


class Server(http.server.ThreadingHTTPServer):
    """Answers as an OpenAI-compatible server does; `tokens` is what the next completion has.

    `said` is what it says instead, by path; once `mute` is set it takes requests and says nothing.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens: list[list[int]] = [[1, 2, 3]]
        self.said: dict[str, str] = {}
        self.mute = threading.Event()
        self.ended = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "model" and asked["temperature"] == 0
        tokens = self.server.tokens  # type: ignore[attr-defined]
        found = tokens.pop(0) if len(tokens) > 1 else tokens[0]
        self._answer({"choices": [{"text": str(found), "token_ids": found, "logprobs": None}]})

    def _answer(self, data: object) -> None:
        server: Server = self.server  # type: ignore[assignment]
        if server.mute.is_set():
            server.ended.wait()
            return
        content = server.said.get(self.path, json.dumps(data)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A server beside the worker."""
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.ended.set()
        one.shutdown()
        thread.join(10)


@pytest.fixture
def start(tool: Tool, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts the script; `command` is this tree's, with the simulated driver.

    `after_suspend` is what a shell does when the server has been suspended, before the script goes on.
    """
    command = tmp_path / "nvsnap-gpu-suspend"
    command.write_text(
        f'#!/bin/sh\n{sys.executable} -m gpususpend "$@"\nstatus=$?\n'
        '[ "$1" != suspend ] || eval "$AFTER_SUSPEND"\nexit $status\n'
    )
    command.chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def begin(*words: object, after_suspend: str = "") -> subprocess.Popen[str]:
        started.append(subprocess.Popen(
            [str(SCRIPT), "--command", str(command), *map(str, words)], cwd=ROOT, text=True,
            env=tool.environ() | {"NVSNAP_GPU_SUSPEND_DRIVER": "sim", "AFTER_SUSPEND": after_suspend},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ))  # fmt: skip
        return started[-1]

    yield begin
    for one in started:
        with one:
            one.kill()


def wait_for(file: Path, script: subprocess.Popen[str]) -> None:
    """Wait until the script's command has made a file."""
    until = time.monotonic() + 60
    while not file.exists():
        assert script.poll() is None and time.monotonic() < until
        time.sleep(0.02)


def state(tool: Tool, worker: Worker) -> str:
    """Return the state of the worker."""
    groups = tool.run("status", worker.pid).expect(0).json["groups"]
    return str(groups[0]["ranks"][0]["state"])


def test_cycles_with_the_same_answers(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, server: Server
) -> None:
    """Twice; the server is asked before and after each."""
    script = start("--cycles", 2, "--hold", 0.1, "--url", server.url, worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 0 and said.count("the same answer") == 2, said
    assert state(tool, worker) == "running"
    worker.check()


def test_another_answer_is_a_failure(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, server: Server
) -> None:
    """Exit status 1, and the server runs."""
    server.tokens = [[1, 2, 3], [1, 2, 4]]
    script = start("--hold", 0.1, "--url", server.url, worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 1 and "another answer after cycle 1" in said, said
    assert state(tool, worker) == "running"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_b09_a_script_that_is_killed_leaves_the_server_running(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, tmp_path: Path, number: signal.Signals
) -> None:
    """While the server is suspended; the exit status is the signal's."""
    suspended = tmp_path / "suspended"
    script = start("--hold", 600, worker.pid, after_suspend=f"touch {suspended}")
    wait_for(suspended, script)
    assert state(tool, worker) == "suspended"
    script.send_signal(number)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 128 + number, said
    assert state(tool, worker) == "running"
    worker.check()


def test_b09_nobody_reads_what_it_says(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, tmp_path: Path
) -> None:
    """Its terminal or log has gone (ssh, a pipe into tee): it goes on to its end, and the server runs."""
    suspended, go_on = tmp_path / "suspended", tmp_path / "go-on"
    script = start(
        "--hold", 0.1, worker.pid, after_suspend=f"touch {suspended}; until [ -e {go_on} ]; do sleep 0.01; done"
    )
    wait_for(suspended, script)
    for stream in (script.stdout, script.stderr):
        assert stream is not None
        stream.close()
    go_on.touch()
    assert script.wait(timeout=100) == 0
    assert state(tool, worker) == "running"
    worker.check()


def test_b09_the_first_failure_is_the_exit_status(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, machine: Setting
) -> None:
    """A load that fails once: the way out resumes again, and the script still says 8."""
    machine.inject("cuMemCreate 1 2", worker.pid)
    script = start("--hold", 0.1, worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 8 and "bringing the server back" in said, said
    assert state(tool, worker) == "running"
    worker.check()


@pytest.mark.parametrize("collected", [True, False])
@pytest.mark.parametrize("when", ["before", "suspended"])
def test_a_server_that_has_died_is_told_once(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, when: str, collected: bool
) -> None:
    """Each line once; nothing is left to be brought back, whether or not its parent has collected it."""
    over = f"[ ! -e /proc/{worker.pid} ]" if collected else f"grep -q '^State:.*Z' /proc/{worker.pid}/status"
    kill = f"kill -9 {worker.pid}; until {over}; do sleep 0.01; done"
    if collected:
        threading.Thread(target=worker.process.wait, daemon=True).start()
    if when == "before":
        subprocess.run(["bash", "-c", kill], check=True, timeout=60)
    script = start("--hold", 0.1, worker.pid, after_suspend=kill)
    said = script.communicate(timeout=100)[1].splitlines()
    assert script.returncode == (3 if when == "before" else 5), said
    assert len(said) == len(set(said)) and str(worker.pid) in said[-1] and "NOT running" not in said[-1], said


def test_a_server_that_does_not_answer(start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker) -> None:
    """One line, of the last attempt, and nothing was suspended."""
    script = start("--url", "http://127.0.0.1:1", "--wait", 0.5, worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 1 and len(said.splitlines()) == 1, said
    assert "http://127.0.0.1:1/v1/models does not answer within 0.5 s: " in said and "refused" in said, said
    assert state(tool, worker) == "running"


def test_a_server_that_answers_no_more(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, server: Server, tmp_path: Path
) -> None:
    """After a resume: it takes the request and says nothing."""
    suspended, go_on = tmp_path / "suspended", tmp_path / "go-on"
    script = start(
        "--url", server.url, "--wait", 2, "--hold", 0.1, worker.pid,
        after_suspend=f"touch {suspended}; until [ -e {go_on} ]; do sleep 0.01; done",
    )  # fmt: skip
    wait_for(suspended, script)
    server.mute.set()
    go_on.touch()
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 1, said
    assert said.splitlines()[-1] == f"{server.url}/v1/models does not answer within 2 s: it says nothing"
    assert state(tool, worker) == "running"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize("answer", ['{"data":[],"choices":[]}', "{}", "[]", "1", '{"data":1,"choices":[1]}'])
def test_an_answer_of_another_form_is_one_line(
    start: Callable[..., subprocess.Popen[str]], worker: Worker, server: Server, path: str, answer: str
) -> None:
    """What came is in it."""
    server.said[path] = answer
    script = start("--url", server.url, worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 1 and len(said.splitlines()) == 1, said
    assert f"{server.url}{path}: not the answer of an OpenAI-compatible server: {answer[0]}" in said, said


@pytest.mark.parametrize("url", ["nowhere", "http://127.0.0.1:port"])
def test_what_is_no_url_is_one_line(start: Callable[..., subprocess.Popen[str]], worker: Worker, url: str) -> None:
    """As a server that does not answer."""
    script = start("--url", url, "--wait", 0.5, worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 1 and len(said.splitlines()) == 1 and "does not answer" in said, said


def test_a_command_that_is_not_there(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, tmp_path: Path
) -> None:
    """It is looked for first; nothing is said of the server."""
    script = start("--command", tmp_path / "nowhere", worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 127 and said == f"{tmp_path}/nowhere: no such command\n", said


def test_a_command_that_does_not_run(
    start: Callable[..., subprocess.Popen[str]], worker: Worker, tmp_path: Path
) -> None:
    """Nobody can say what became of the server."""
    command = tmp_path / "command"
    command.write_text("#!/bin/sh\nexit 70\n")
    command.chmod(0o755)
    script = start("--command", command, worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 70 and f"whether pid {worker.pid} runs is not known" in said, said
    assert "NOT running" not in said, said


def test_a_refused_suspend_has_changed_nothing(start: Callable[..., subprocess.Popen[str]]) -> None:
    """A process without the shim: exit status 3, and nothing is brought back."""
    with subprocess.Popen(["sleep", "600"]) as other:
        script = start(other.pid)
        said = script.communicate(timeout=100)[1]
        other.kill()
    assert script.returncode == 3 and "refused (exit status 3): nothing was changed" in said.splitlines()[-1], said
    assert "bringing" not in said and "NOT running" not in said, said


def test_a_server_that_does_not_come_back_is_told(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, machine: Setting
) -> None:
    """No load comes through: `status` says what it is in, and so does the script."""
    machine.inject("\n".join(f"cuMemCreate {call} 2" for call in range(1, 9)), worker.pid)
    script = start("--hold", 0.1, worker.pid)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 8 and f"pid {worker.pid} is NOT running (resuming)" in said, said


@pytest.mark.parametrize("words", [
    [], ["--cycles", "many", "1"], ["--what", "1"], ["1", "2"], ["--hold"], ["1.5"], ["01"],
    *([option, value, "1"] for option in ("--cycles", "--hold", "--wait") for value in ("08", "-1", "9" * 20, "")),
    ["--cycles", "1.5", "1"],
])  # fmt: skip
def test_bad_words_change_nothing(start: Callable[..., subprocess.Popen[str]], words: list[str]) -> None:
    """Exit status 2 and the usage."""
    script = start(*words)
    said = script.communicate(timeout=60)[1]
    assert script.returncode == 2 and "usage:" in said, said


def test_a_checkpoint_directory_is_for_one_cycle(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker, tmp_path: Path
) -> None:
    """More are refused before the first, which would write a checkpoint; one goes."""
    words = (worker.pid, "--", "--store", tmp_path / "store", f"--ckpt-dir={tmp_path}/ckpt")
    script = start("--cycles", 2, "--hold", 0.1, *words)
    said = script.communicate(timeout=60)[1]
    assert script.returncode == 2 and "one cycle" in said and not (tmp_path / "store").exists(), said
    script = start("--hold", 0.1, *words)
    said = script.communicate(timeout=100)[1]
    assert script.returncode == 0 and (tmp_path / "ckpt").exists(), said
    assert state(tool, worker) == "running"
    worker.check()


def test_what_the_way_back_needs_too_is_refused(
    start: Callable[..., subprocess.Popen[str]], tool: Tool, worker: Worker
) -> None:
    """Behind the dashes it would reach the suspend alone."""
    script = start(worker.pid, "--", "--state-dir", "/tmp/other")
    said = script.communicate(timeout=60)[1]
    assert script.returncode == 2 and "NVSNAP_GPU_SUSPEND_STATE_DIR" in said, said
    assert state(tool, worker) == "running"
