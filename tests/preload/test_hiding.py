"""What is hidden on a driver that does not say its version: attributes, fabric endpoints, when settings are read."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

PRELUDE = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
MULTICAST, FABRIC, UNICAST_ENDPOINT, MULTICAST_ENDPOINT, POOLS, OTHER = 132, 128, 153, 154, 119, 16
calls = lambda symbol: cuda.stub_calls(symbol.encode())

def shown(attribute, value=9):
    found = ctypes.c_int(value)  # the stub leaves it alone
    assert cuda.cuDeviceGetAttribute(ctypes.byref(found), attribute, 0) == 0
    return found.value
"""

KEEP_BOTH = {"GPUSHARE_MULTICAST": "keep", "GPUSHARE_FABRIC": "keep"}


@pytest.fixture
def check(run: Run, stub_driver: Path) -> Callable[..., None]:
    """A function that runs Python after the prelude, with the shim and the stub driver; its assertions are the test."""

    def run_checks(body: str, **env: str) -> None:
        program = PRELUDE + textwrap.dedent(body)
        result = run([sys.executable, "-c", program], libraries=stub_driver, **env)
        assert (result.returncode, result.stderr) == (0, b""), result.stderr.decode()

    return run_checks


def test_hidden_attributes_read_zero_and_others_pass(check: Callable[..., None]) -> None:
    check("""
        assert [shown(one) for one in (MULTICAST, FABRIC, UNICAST_ENDPOINT, MULTICAST_ENDPOINT)] == [0] * 4
        assert shown(POOLS) == 1 and shown(OTHER) == 9
        assert cuda.cuDeviceGetAttribute(None, MULTICAST, 0) == 0, "the driver is the one to refuse it"
    """, GPUSHARE_MULTICAST="hide")  # fmt: skip


def test_kept_attributes_pass(check: Callable[..., None]) -> None:
    check("""
        assert [shown(one) for one in (MULTICAST, FABRIC, UNICAST_ENDPOINT, MULTICAST_ENDPOINT, POOLS)] == [9] * 5
    """, **KEEP_BOTH)  # fmt: skip


def test_calls_for_what_is_hidden_do_not_reach_the_driver(check: Callable[..., None]) -> None:
    check("""
        assert cuda.cuMulticastCreate(None, None) == 801
        assert cuda.cuLogicalEndpointCreate(1, None) == cuda.cuLogicalEndpointImport(2, None, 1) == 801
        props = (ctypes.c_int * 64)(1, 8)  # pinned, fabric
        assert cuda.cuMemPoolCreate(None, props) == cuda.cuMemCreate(props, ctypes.c_size_t(1), props, 0) == 800
        assert cuda.cuMemImportFromShareableHandle(props, props, 8) == 800
        names = ("cuMulticastCreate", "cuLogicalEndpointCreate", "cuLogicalEndpointImport", "cuMemPoolCreate",
                 "cuMemCreate", "cuMemImportFromShareableHandle")
        assert not any(calls(name) for name in names)
    """, GPUSHARE_MULTICAST="hide")  # fmt: skip


def test_calls_for_what_is_kept_reach_it(check: Callable[..., None]) -> None:
    check("""
        assert cuda.cuMulticastCreate(None, None) == cuda.cuLogicalEndpointCreate(1, None) == 0
        assert cuda.cuMemPoolCreate(None, (ctypes.c_int * 64)(1, 8)) == cuda.cuLogicalEndpointImport(2, None, 1) == 0
        assert calls("cuMulticastCreate") == calls("cuLogicalEndpointCreate") == calls("cuMemPoolCreate") == 1
    """, **KEEP_BOTH)  # fmt: skip


def test_settings_are_read_at_the_first_call_and_only_then(check: Callable[..., None]) -> None:
    check("""
        os.environ["GPUSHARE_FABRIC"] = "keep"
        assert shown(FABRIC) == 9
        del os.environ["GPUSHARE_FABRIC"]
        assert shown(FABRIC) == 9
    """)
