"""The hook table against NVIDIA's header, and what is generated from it; `test_census.py` has the other functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shim import generate
from shim.hooks import HOOKS, LOOKUPS, SIMULATOR_FUNCTIONS, Gate, Hook, Kind, Variant, base_name
from tests.unit.headers import abis as types_of_functions
from tests.unit.headers import newest_headers

ROOT = Path(__file__).resolve().parents[2]
HANDLE = "CUmemGenericAllocationHandle"


@pytest.fixture(scope="module")
def headers() -> str:
    """NVIDIA's headers of the driver, of the version that the table was compared with."""
    return "".join(newest_headers())


@pytest.fixture(scope="module")
def abis(headers: str) -> dict[tuple[str, int, Variant], str]:
    """Every ABI that the headers know: (name, version, default stream) → parameters."""
    del headers  # of the right version
    return {
        (name, int(version), Variant.PER_THREAD if twin else Variant.LEGACY): params
        for name, version, twin, params in types_of_functions()
    }


def _key(hook: Hook) -> tuple[str, int, Variant]:
    """Return the header's key of a row."""
    return hook.name, hook.since, Variant.PER_THREAD if hook.variant is Variant.PER_THREAD else Variant.LEGACY


def _types(params: str) -> list[str]:
    """Return the types of a parameter list, as far as the ABI goes: names of values and of structures' versions off."""
    result = []
    for part in [] if params.strip() in ("", "void") else params.split(","):
        words = re.findall(r"\w+|\*", part.replace("const", ""))
        stars = words.count("*")
        plain = [word for word in words if word != "*"]
        kind = " ".join(plain[:-1] if len(plain) > 1 else plain)
        result.append(re.sub(r"_v\d+$", "", kind) + "*" * stars)
    return result


SAME = {
    "CUdeviceptr_v1": "unsigned int", "CUlogicalEndpointId": "cuuint32_t", "GLuint": "unsigned int",
    "GLenum": "unsigned int", "EGLint": "int", "EGLImageKHR": "void *", "EGLStreamKHR": "void *",
    "EGLSyncKHR": "void *",
    "VdpVideoSurface": "cuuint32_t", "VdpOutputSurface": "cuuint32_t", "VdpDevice": "cuuint32_t",
    "VdpGetProcAddress": "void",
}
"""Types of the header that the table spells otherwise."""


def test_every_row_is_in_the_header(abis: dict[tuple[str, int, Variant], str]) -> None:
    for hook in HOOKS:
        assert _key(hook) in abis, hook
        theirs = abis[_key(hook)]
        for name, ours in SAME.items():
            theirs = re.sub(rf"\b{name}\b", ours, theirs)
        assert _types(hook.params) == _types(theirs), hook


def test_no_abi_of_a_hooked_name_is_missing(abis: dict[tuple[str, int, Variant], str]) -> None:
    """A name that is hooked in one form and not in another would be a way past the gate."""
    hooked = {hook.name for hook in HOOKS if hook.kind is not Kind.REAL}
    ours = {_key(hook) for hook in HOOKS}
    assert {key for key in abis if key[0] in hooked and key not in ours} == set()


def test_symbols_are_those_of_the_header(headers: str) -> None:
    """The newest ABI of a name is the symbol to which the header defines it; all others are declared."""
    newest = {hook.name: hook for hook in HOOKS if not hook.until and hook.variant is not Variant.PER_THREAD}
    for name, hook in newest.items():
        defined = re.search(rf"#define {name} +(?:__CUDA_API_PT\w+\((\w+)\)|(\w+))\s", headers)
        target = (defined[1] or defined[2]) if defined else name
        # Names of CUDA 13.1 and later, and this one, keep the older ABI for source code that does not ask.
        assert hook.symbol == target or hook.since >= 13010 or name == "cuStreamGetCtx", (hook, target)
        assert re.search(rf"\b{hook.symbol}\b", headers), hook


def test_every_function_that_takes_a_handle_is_hooked(headers: str) -> None:
    """Handles are virtual: a function that we do not know would give the driver a value that is not its own."""
    code = re.sub(r"/\*.*?\*/", "", headers, flags=re.S)
    declared = re.findall(r"CUDAAPI\s+(cu\w+)\s*\(([^;]*)\);", code)
    takers = {base_name(symbol) for symbol, params in declared if HANDLE in params}
    assert takers - {hook.name for hook in HOOKS if hook.by_hand} == set()


def test_rows_are_consistent() -> None:
    assert len({hook.symbol for hook in HOOKS}) == len(HOOKS)
    for hook in HOOKS:
        assert hook.until == 0 or hook.until > hook.since, hook
        assert hook.symbol.endswith(("_ptds", "_ptsz")) == (hook.variant is Variant.PER_THREAD), hook
        assert hook.kind is not Kind.GATED or hook.gate is not Gate.NONE, hook
        if hook.variant is Variant.LEGACY:
            assert any(other.symbol in (f"{hook.symbol}_ptds", f"{hook.symbol}_ptsz") for other in HOOKS), hook


def test_no_two_rows_answer_one_question() -> None:
    for hook in LOOKUPS:
        rivals = [
            other
            for other in LOOKUPS
            if other.name == hook.name
            and other is not hook
            and (other.variant is hook.variant or Variant.ANY in (other.variant, hook.variant))
            and other.since <= hook.since
            and (other.until == 0 or hook.since < other.until)
        ]
        # A per-thread form that is newer than the plain one lives beside the 32-bit form of the name.
        assert all(other.since < 3020 for other in rivals), (hook, rivals)


@pytest.mark.parametrize("page", generate.pages())
def test_the_pages_are_the_table(page: str) -> None:
    text = (ROOT / "docs" / "reference" / page).read_text()
    assert text == generate.pages()[page], "run: python -m shim.generate --docs docs/reference"


def test_generated_header_knows_every_symbol() -> None:
    header = generate.header()
    for hook in (*HOOKS, *SIMULATOR_FUNCTIONS):
        assert f"(*{hook.symbol})(" in header
    assert generate.version_script().count(";\n") == len(generate.exported()) + 2 + 1 + 1
