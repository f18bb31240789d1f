"""`suspend --store s3://…`: the same, with the chunks in an object store behind a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.tool import Tool
from tests.sim.conftest import Pair

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
