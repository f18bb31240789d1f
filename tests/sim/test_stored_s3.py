"""`suspend --store s3://…`: the same, with the chunks in an object store behind a real server."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.programs.tool import Tool
from tests.sim.conftest import Background, Pair, records, running

pytest.importorskip("obstore", reason="the extra gpushare[object-store] is not installed")
s3 = pytest.importorskip("tests.store.s3")

pytestmark = pytest.mark.machine(driver="sim")


def test_cycle(pair: Pair, tool: Tool, tmp_path: Path) -> None:
    """Down, and up when the server is there again; status and the record show the URL."""
    with s3.serving(tmp_path / "log") as url:
        env = s3.variables(url)
        words = ("--store", f"s3://{s3.BUCKET}/store", "--ckpt-dir", str(tmp_path / "one"))
        down = tool.suspend(*pair.pids, options=words, env=env).expect(0).json["groups"][0]
        assert down["stored"]["store"] == words[1] and down["stored"]["bytes"]["new"]
        away = env | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_REGION": "none"}
        answer = tool.resume(*pair.pids, env=away, deadline_s=250).expect(6)
        assert "Still suspended" in answer.json["error"]["message"]
        tool.resume(*pair.pids, env=env).expect(0)
    pair.check()


def test_server_that_does_not_answer(pair: Pair, tool: Tool, tmp_path: Path) -> None:
    """It is waited for until --copy-timeout or a signal: nothing is changed, and the same works when it answers."""
    with s3.running(tmp_path / "log") as server:
        env = s3.variables(server.url)
        words = ("--store", f"s3://{s3.BUCKET}/store", "--ckpt-dir", str(tmp_path / "one"))
        with server.deaf():
            tool.suspend(*pair.pids, options=(*words, "--copy-timeout", "2"), env=env).expect(3)
            ended(server, Background(tool, "suspend", *words, *pair.pids, env=env))
        running(tool)
        pair.check()
        tool.suspend(*pair.pids, options=words, env=env).expect(0)
        with server.deaf():
            answer = tool.resume(*pair.pids, options=("--copy-timeout", "2"), env=env).expect(6)
            assert "does not answer" in answer.json["error"]["message"]
            ended(server, Background(tool, "resume", *pair.pids, env=env))
        assert [record["stage"] for record in records(tool)] == ["suspended"]
        tool.resume(*pair.pids, env=env).expect(0)
    pair.check()


def ended(server: s3.Server, command: Background) -> None:
    """A signal ends a command that waits for the server."""
    server.wait_for_client(command.process.pid)
    command.process.send_signal(signal.SIGTERM)
    assert command.end().expect(130).json["error"]["code"] == "not-begun"
