"""What becomes of every function of cuda.h, and that a new one cannot pass unseen."""

from __future__ import annotations

import re

import pytest

from shim import census
from shim.census import State
from shim.hooks import HOOKS, Kind, base_name
from tests.unit.headers import abis, newest_cuda_h, newest_headers

DECLARE = "CUresult CUDAAPI {}({});\n"


@pytest.fixture(scope="module")
def cuda_h() -> str:
    """NVIDIA's cuda.h, of the version that the table was compared with."""
    return newest_cuda_h()


def with_function(header: str, name: str, params: str) -> str:
    """Return the header with one more declaration, where the others stand."""
    first = header.index("CUresult CUDAAPI ")
    return header[:first] + DECLARE.format(name, params) + header[first:]


def test_every_function_of_the_headers_is_classified() -> None:
    """Those of cuda.h, and those that share memory with OpenGL, EGL and VDPAU, which stand in headers of their own."""
    assert [fault for header in newest_headers() for fault in census.faults(header)] == []


def test_nothing_is_listed_that_the_headers_lack(cuda_h: str) -> None:
    """The profiler's functions are known by their types alone."""
    del cuda_h  # of the right version
    declared = {base_name(one.symbol) for header in newest_headers() for one in census.declarations(header)}
    assert {function.name for function in census.functions()} == declared | {name for name, *_ in abis()}


def test_each_function_is_classified_once_and_with_a_reason() -> None:
    names = [function.name for function in census.functions()]
    assert len(names) == len(set(names))
    assert not [function for function in census.functions() if not function.reason.endswith((".", ")"))]


def test_what_the_shim_calls_unhooked_passes() -> None:
    passing = {function.name for function in census.passed()}
    assert {hook.name for hook in HOOKS if hook.kind is Kind.REAL} <= passing


@pytest.mark.parametrize(
    ("name", "params", "why"),
    [
        ("cuSomethingNew", "int *value", "not classified"),
        ("cuMemAlloc_v3", "CUdeviceptr *dptr, size_t bytesize, int kind", "a form of a hooked name"),
        ("cuDeviceGetCount_v2", "int *count, CUstream hStream", "its parameters name memory or a stream"),
        ("cuCtxSetFlags_v2", "unsigned int flags, CUdeviceptr\n    where", "its parameters name memory or a stream"),
        ("cuCtxGetId_v2", "CUmemGenericAllocationHandle handle", "its parameters name memory or a stream"),
        ("cuGraphClone_v2", "CUgraph graph, const CUDA_MEMCPY3D *like", "a structure among its parameters"),
        ("cuGraphClone_v3", "CUgraph graph, const CUgraphNodeParams *like", "a structure among its parameters"),
    ],
)
def test_a_new_function_is_found(cuda_h: str, name: str, params: str, why: str) -> None:
    (fault,) = census.faults(with_function(cuda_h, name, params))
    assert fault.startswith(f"{name}: ") and why in fault


def test_a_new_form_under_a_known_name_is_found(cuda_h: str) -> None:
    """The header gives a new ABI to source code by a macro: the declaration keeps the old name."""
    changed = re.sub(r"(#define cuMemAlloc +)cuMemAlloc_v2\b", r"\1cuMemAlloc_v3", cuda_h)
    assert changed != cuda_h
    assert [fault for fault in census.faults(changed) if fault.startswith("cuMemAlloc_v3: a form of a hooked name")]


def test_a_missing_per_thread_form_is_found(cuda_h: str) -> None:
    macro = "#define cuMemFreeHost __CUDA_API_PTSZ(cuMemFreeHost)\n"
    first = cuda_h.index("#define cu")
    (fault,) = census.faults(cuda_h[:first] + macro + cuda_h[first:])
    assert fault.startswith("cuMemFreeHost_ptsz: hooked without its form")


@pytest.mark.parametrize("name", ["cuMemcpyToPeer", "cuMemorySetLaunch", "cuThingExport", "cuGraphExportMemory"])
def test_a_name_that_says_that_it_acts_may_not_pass(cuda_h: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(census, "PASSED", f"{census.PASSED}\nWrongly.\n    {name}\n")
    (fault,) = census.faults(with_function(cuda_h, name, "int *value"))
    assert fault == f"{name}: passes, and its name says that it acts on memory"


def test_structures_that_name_memory(cuda_h: str) -> None:
    """Directly, in a member of a member, by another name; and not those that name none."""
    found = census.types_that_name_memory(cuda_h)
    assert {"CUDA_MEMCPY3D", "CUDA_MEMCPY3D_v2", "CUDA_RESOURCE_DESC", "CUgraphNodeParams", "CUlaunchConfig"} <= found
    assert not {"CUDA_KERNEL_NODE_PARAMS", "CUuuid", "CUDA_ARRAY_DESCRIPTOR", "CUmemAllocationProp"} & found


def test_states_are_those_of_the_kinds() -> None:
    state = {function.name: function.state for function in census.functions()}
    expected = {
        "cuMemcpyHtoD": State.HELD,
        "cuMemAlloc": State.TRACKED,
        "cuMemAllocManaged": State.REFUSED,
        "cuDeviceGetName": State.PASSED,
    }
    assert {name: state[name] for name in expected} == expected
