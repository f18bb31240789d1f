"""Look-ups by cuGetProcAddress, every row of the table: pitfall 29, FR-36."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.preload import stub
from tests.preload.stub import ROOT

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

# What the checks run with, in a process under the shim: `address` of a symbol by dlsym, `ask` both entry points.
PRELUDE = """
import ctypes, os
from shim.hooks import LOOKUPS, NEWEST_CUDA, Kind, Variant
cuda = ctypes.CDLL("libcuda.so.1")
FLAGS = {Variant.ANY: (0, 1, 2), Variant.LEGACY: (0, 1), Variant.PER_THREAD: (2,)}
EXPORTED = [hook for hook in LOOKUPS if hook.kind is not Kind.REAL]

def address(symbol):
    return ctypes.cast(getattr(cuda, symbol), ctypes.c_void_p).value

def image(pointer):
    class Info(ctypes.Structure):
        _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p)]
    info = (Info * 2)()  # the fourth member is not looked at, but written
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(pointer), ctypes.byref(info))
    return os.path.basename(info[0].file.decode()), info[0].name.decode() if info[0].name else None

def ask(name, version, flags=0, form=5):
    found = ctypes.c_void_p()
    name = name if name is None else name.encode()
    if form == 4:
        rc = cuda.cuGetProcAddress(name, ctypes.byref(found), version, ctypes.c_uint64(flags))
    else:
        rc = cuda.cuGetProcAddress_v2(name, ctypes.byref(found), version, ctypes.c_uint64(flags), None)
    return found.value if rc == 0 else None
"""


def check(run: Run, driver: Path, body: str, **env: str) -> str:
    """Run `body` after the prelude under the shim; its assertions are the test. Return what it logged."""
    program = PRELUDE + textwrap.dedent(body)
    result = run([sys.executable, "-c", program], libraries=driver, PYTHONPATH=str(ROOT), **env)
    assert result.returncode == 0, result.stderr.decode()
    return result.stderr.decode()


ADDRESSES = pytest.mark.parametrize("env", [{}, {"STUB_ALIAS": "1"}], ids=["symbols", "other-addresses"])
"""A driver may hand out the addresses of its symbols, and then a row is known by that, or others."""


@ADDRESSES
def test_every_row_at_its_versions(run: Run, stub_driver: Path, shim_path: Path, env: dict[str, str]) -> None:
    check(run, stub_driver, f"""
        for hook in EXPORTED:
            assert image(address(hook.symbol))[0] == "{shim_path.name}", hook
            for version in (hook.since, (hook.until or NEWEST_CUDA + 10) - 10):
                for flags in FLAGS[hook.variant]:
                    for form in (4, 5):
                        found = ask(hook.name, version, flags, form)
                        assert found == address(hook.symbol), (hook, version, flags, form)
    """, **env)  # fmt: skip


def test_the_wrappers_call_their_own_driver_function(run: Run, stub_driver: Path, shim_path: Path) -> None:
    """Each generated wrapper, called with zeros, arrives at the driver's function of the same symbol, from the shim."""
    check(run, stub_driver, f"""
        cuda.stub_caller.restype = ctypes.c_char_p
        for hook in EXPORTED:
            if hook.kind is not Kind.GATED:
                continue
            before = cuda.stub_calls(hook.symbol.encode())
            assert getattr(cuda, hook.symbol)(*[ctypes.c_void_p()] * len(hook.arguments)) == 0, hook
            assert cuda.stub_calls(hook.symbol.encode()) == before + 1, hook
            assert cuda.stub_caller(hook.symbol.encode()).decode() == "{shim_path.name}", hook
    """)  # fmt: skip


@ADDRESSES
def test_two_abis_under_one_name(run: Run, stub_driver: Path, env: dict[str, str]) -> None:
    check(run, stub_driver, """
        assert ask("cuStreamWaitValue32", 8000) == address("cuStreamWaitValue32")
        assert ask("cuStreamWaitValue32", 11060) == address("cuStreamWaitValue32")
        assert ask("cuStreamWaitValue32", 11070) == address("cuStreamWaitValue32_v2")
        assert ask("cuStreamWaitValue32", 11070, 2) == address("cuStreamWaitValue32_v2_ptsz")
        assert ask("cuIpcOpenMemHandle", 4010) == address("cuIpcOpenMemHandle")
        assert ask("cuIpcOpenMemHandle", 11000) == address("cuIpcOpenMemHandle_v2")
        assert ask("cuGetProcAddress", 11030) == address("cuGetProcAddress")
        assert ask("cuGetProcAddress", 12000) == address("cuGetProcAddress_v2")
        # Through the pointer that was looked up, as libcudart does.
        found = ctypes.c_void_p()
        form = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64,
                                ctypes.c_void_p)
        look = form(ask("cuGetProcAddress", 12000))
        assert look(b"cuMemAlloc", ctypes.addressof(found), 3020, 0, None) == 0
        assert found.value == address("cuMemAlloc_v2")
    """, **env)  # fmt: skip


def test_what_is_not_in_the_table_is_the_drivers(run: Run, stub_driver: Path) -> None:
    check(run, stub_driver, """
        assert image(ask("cuCtxSynchronize", 2000))[0] == "libcuda.so.1"
        assert ask("cuMemAlloc_v2_and_more", NEWEST_CUDA) is None
        assert ask("cuMemAll", NEWEST_CUDA) is None
    """)  # fmt: skip


def test_odd_arguments_reach_the_driver(run: Run, stub_driver: Path) -> None:
    """libcudart's first call asks for an empty name with version 0 and no status."""
    check(run, stub_driver, """
        assert ask("", 0) is None and ask("", 0, form=4) is None
        assert ask(None, 12000) is None and ask(None, 12000, form=4) is None
        status = ctypes.c_int(-1)
        found = ctypes.c_void_p()
        rc = cuda.cuGetProcAddress_v2(b"cuMemAlloc", ctypes.byref(found), 12000, ctypes.c_uint64(0),
                                      ctypes.byref(status))
        assert (rc, status.value, found.value) == (0, 0, address("cuMemAlloc_v2"))
    """)  # fmt: skip


@ADDRESSES
def test_newer_than_the_table_with_the_same_function_is_hooked(
    run: Run, stub_driver: Path, env: dict[str, str]
) -> None:
    log = check(run, stub_driver, """
        assert ask("cuMemAlloc", 14000) == address("cuMemAlloc_v2")
        assert ask("cuLaunchKernel", 14000, 2) == address("cuLaunchKernel_ptsz")
    """, STUB_VERSION="14000", GPUSHARE_LOG="1", **env)  # fmt: skip
    assert log == ""


def test_an_unknown_abi_is_never_given_a_known_wrapper(run: Run, stub_driver: Path) -> None:
    log = check(run, stub_driver, """
        for _ in range(3):
            assert image(ask("cuMemAlloc", 14000)) == ("libcuda.so.1", "stub_new_abi")
        assert ask("cuMemAlloc", 13000) == address("cuMemAlloc_v2")
    """, STUB_VERSION="14000", STUB_NEW_ABI="cuMemAlloc", GPUSHARE_LOG="1")  # fmt: skip
    assert log.count("cuMemAlloc asked for at version 14000") == 1


def test_an_unknown_form_of_a_question_is_not_counted(run: Run, stub_driver: Path) -> None:
    """It is the driver's, and no suspend has to be refused for it."""
    log = check(run, stub_driver, """
        assert image(ask("cuStreamGetCaptureInfo", 14000)) == ("libcuda.so.1", "stub_new_abi")
    """, STUB_VERSION="14000", STUB_NEW_ABI="cuStreamGetCaptureInfo", GPUSHARE_LOG="1")  # fmt: skip
    assert "cuStreamGetCaptureInfo" not in log


def test_a_name_that_moved_to_another_symbol(run: Run, stub_driver: Path) -> None:
    """From 12.0 on cuGraphInstantiate is what 11.4 called cuGraphInstantiateWithFlags: fewer parameters."""
    check(run, stub_driver, """
        assert ask("cuGraphInstantiate", 11080) == address("cuGraphInstantiate_v2")
        assert ask("cuGraphInstantiate", 12000) == address("cuGraphInstantiateWithFlags")
        assert ask("cuGraphInstantiateWithFlags", 12000) == address("cuGraphInstantiateWithFlags")
    """)  # fmt: skip


@ADDRESSES
def test_an_old_driver_gives_what_it_has(run: Run, old_stub_driver: Path, env: dict[str, str]) -> None:
    """Asked for CUDA 13 by a new library, a driver of 11.3 answers with its own newest ABI."""
    check(run, old_stub_driver, """
        assert ask("cuCtxCreate", 13000, form=4) == address("cuCtxCreate_v2")
        assert ask("cuMemcpyHtoD", 13000, 2, form=4) == address("cuMemcpyHtoD_v2_ptds")
        assert not hasattr(cuda, "cuMulticastCreate") and not hasattr(cuda, "cuGetProcAddress_v2")
    """, STUB_VERSION="11030", **env)  # fmt: skip


def test_a_function_that_the_driver_lacks_is_not_supported(run: Run, old_stub_driver: Path) -> None:
    """Called through the ELF symbol, which we export whatever the driver has: an error, no crash."""
    check(run, old_stub_driver, """
        shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
        absent = [hook for hook in EXPORTED if hook.since > 11030]
        assert len(absent) > 20
        for hook in absent:
            assert getattr(shim, hook.symbol)(*[ctypes.c_void_p()] * len(hook.arguments)) == 801, hook
    """, STUB_VERSION="11030")  # fmt: skip


def test_a_real_pointer_is_never_our_own(run: Run, shim_path: Path, tmp_path: Path) -> None:
    """A driver library in whose scope the shim lies: what it lacks would be found in us, and call itself for ever."""
    flags = ("-Wl,--no-as-needed", f"-L{shim_path.parent}", f"-l:{shim_path.name}")
    stub.build(tmp_path, 11030, *flags)
    check(run, tmp_path, """
        shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
        assert shim.cuMulticastAddDevice(None, None) == shim.cuMemPrefetchAsync_v2(None, None, None, None, None) == 801
        assert shim.cuMemcpyHtoD_v2(None, None, None) == 0
    """, STUB_VERSION="11030")  # fmt: skip
