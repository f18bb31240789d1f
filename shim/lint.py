"""Look for the traps of Cython without Python in the shim's sources: ``python -m shim.lint [FILE...]``.

Each rule stands for something that compiles, links and then misbehaves in a process that is not ours. The linker and
the guard tests see the library; this sees the source, and names the line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shim import generate
from shim.hooks import HOOKS

MOST_LINES = 600
HEADERS = ("platform.h", "cuda_abi.h")
PUBLIC = {hook.symbol for hook in HOOKS if hook.by_hand} | {"gs_choose_dlsym", "gs_choose_dlvsym"}
"""What may be `cdef public`: the custom hooks, and what the assembler of platform.h calls."""

FORBIDDEN_CALLS = {
    name: reason
    for reason, names in {
        "stdio allocates and locks": "printf fprintf sprintf snprintf vsnprintf puts fputs putchar perror fopen fwrite",
        "the allocator may be anybody's; use memory of our own": "malloc calloc realloc free strdup posix_memalign",
        "a hook never ends the program": "exit _exit abort quick_exit assert",
        "use gs_lock, which a forked child resets": "pthread_mutex_lock pthread_mutex_unlock pthread_cond_wait",
        "ours; use the genuine ones of resolve.pxi": "dlsym dlvsym",
        "it opens a descriptor that the application's programs inherit": "dup dup2 accept pipe socketpair creat",
        "newer headers bind it to __isoc23_*, which older images lack": "strtol strtoul strtoll strtoull atoi sscanf",
    }.items()
    for name in names.split()
}
OPENING_CALLS = {"open", "openat", "socket", "accept4", "eventfd", "memfd_create", "dup3", "recvmsg", "pipe2"}
"""These say by a flag whether what they open survives exec."""
FORBIDDEN_WORDS = {
    "def": "a Python function needs Python",
    "cpdef": "a Python function needs Python",
    "class": "a class needs Python",
    "import": "an import needs Python",
    "try": "exceptions need Python",
    "raise": "exceptions need Python",
    "print": "printing needs Python, and the host program's output is not ours",
    "lambda": "a Python function needs Python",
    "yield": "a generator needs Python",
}


@dataclass(frozen=True)
class Finding:
    """One line that breaks a rule."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def _without_text(source: str) -> list[str]:
    """Return the lines with comments and the content of strings blanked, so that only code is looked at."""

    def blank(match: re.Match[str]) -> str:
        if match[0].startswith("#"):
            return ""
        quote = match["quote"]
        return quote + re.sub(r"[^\n]", " ", match[0][len(quote) : -len(quote)]) + quote

    pattern = r'#[^\n]*|(?P<quote>"""|"|\')(?:\\.|(?!(?P=quote)).)*(?P=quote)'
    return re.sub(pattern, blank, source, flags=re.S).split("\n")


def _statements(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number, statement), with statements that brackets spread over lines joined."""
    number, held = 0, ""
    for index, line in enumerate(lines, 1):
        if not held:
            number = index
        held = f"{held} {line.strip()}" if held else line
        if held.count("(") + held.count("[") <= held.count(")") + held.count("]"):
            yield number, held
            held = ""


BLOCK = re.compile(r"(cdef extern|cdef enum|cdef struct|cdef union|ctypedef struct|ctypedef union|ctypedef enum).*:$")
FUNCTION = re.compile(r"cdef\s+(?:public\s+|inline\s+)*[\w\s*]*?\b(\w+)\s*\(.*\).*:$")
FUNCTION_POINTER = re.compile(r"\(\s*\*\s*\w*\s*\)\s*\(.*\)")
INITIALISED = re.compile(r"cdef (?!extern|enum|struct|union)[^(]*=")
MODULE_CODE = re.compile(r"[A-Za-z_]\w*\s*(\[|\.|=[^=]|\()")


def _function_findings(name: str, statement: str, docstring: str) -> Iterator[str]:
    """Yield what is wrong with a function's head."""
    if not re.search(r"\)\s*noexcept nogil:$", statement):
        yield f"{name} must be noexcept nogil: an exception check hides behind inlining and calls Python"
    if '"""' not in docstring:
        yield f"{name} lacks its one line that says what it is for"
    if statement.startswith("cdef public") and name not in PUBLIC:
        yield f"{name} is public and no custom hook of shim/hooks.py"


def _statement_findings(statement: str, at_module_level: bool, block: str) -> Iterator[str]:
    """Yield what is wrong with a statement that is no function's head."""
    if at_module_level and block == "cdef extern" and not re.search(r"\bnogil:$", statement):
        yield "declare extern functions nogil: otherwise each call expects the interpreter"
    if at_module_level and INITIALISED.match(statement):
        yield "a module-level cdef with an initialiser stays 0: the module's body never runs"
    if at_module_level and not block and MODULE_CODE.match(statement):
        yield "code at module level never runs"
    if "cimport" in statement and not re.match(r"from libc\.stdint cimport", statement):
        yield "cimport: a function of another module links and is NULL at run time; declare it extern"
    declares = block == "cdef extern" or statement.startswith("ctypedef")
    if declares and FUNCTION_POINTER.search(statement) and "noexcept nogil" not in statement:
        yield "a function pointer must be noexcept nogil"
    if re.search(r"\bwith\s+gil\b", statement):
        yield "with gil needs Python"
    for word, reason in FORBIDDEN_WORDS.items():
        if re.match(rf"{word}\b", statement):
            yield f"{word}: {reason}"


def _cython_findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, message) for a .pyx or .pxi file."""
    source = path.read_text()
    raw = [*source.split("\n"), ""]
    lines = _without_text(source)
    block = ""  # the cdef block whose indented lines follow
    for number, text in _statements(lines):
        statement = text.strip()
        if not statement:
            continue
        at_module_level = not text.startswith(" ")
        if at_module_level:
            opens = BLOCK.match(statement)
            block = opens[1] if opens else ""
        function = None if block else FUNCTION.match(statement)
        if function:
            last = next(line for line in range(number, len(lines) + 1) if lines[line - 1].rstrip().endswith(":"))
            found = _function_findings(function[1], statement, raw[last])
        else:
            found = _statement_findings(statement, at_module_level, block)
        yield from ((number, message) for message in found)
        if block != "cdef extern":
            yield from ((number, message) for message in _forbidden_calls(statement))


def _forbidden_calls(code: str) -> Iterator[str]:
    """Yield a message for each call in `code` that the shim must not make. A member of that name is not libc's."""
    for match in re.finditer(r"(?<![\w.>])(\w+)\s*\(", code):
        if match[1] in FORBIDDEN_CALLS:
            yield f"{match[1]}: {FORBIDDEN_CALLS[match[1]]}"
        defined = code.startswith("#define")  # as a system call, with the flags of who calls it
        if match[1] in OPENING_CALLS and "CLOEXEC" not in code[match.end() :] and not defined:
            yield f"{match[1]} without CLOEXEC: the application's programs inherit the descriptor"
    if re.search(r"\bF_DUPFD\b", code):
        yield "F_DUPFD: use F_DUPFD_CLOEXEC, or the application's programs inherit the descriptor"


def _header_findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, message) for a C header of the shim."""
    blanked = re.sub(r"/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match[0]), path.read_text(), flags=re.S)
    for number, line in enumerate(re.sub(r'"(?:\\.|[^"\\])*"', '""', blanked).split("\n"), 1):
        yield from ((number, message) for message in _forbidden_calls(line))
        if "__attribute__((constructor" in line:
            yield number, "a constructor runs in every program of the container"


def check(path: Path) -> list[Finding]:
    """Return what is wrong with one source file."""
    findings = list(_header_findings(path) if path.suffix == ".h" else _cython_findings(path))
    length = path.read_text().count("\n")
    if length > MOST_LINES and path.name != "cuda_abi.h":
        findings.append((MOST_LINES, f"{length} lines: more than {MOST_LINES} are two ideas"))
    return [Finding(path, line, message) for line, message in findings]


def sources() -> list[Path]:
    """Return every file that the library is made of."""
    return [*generate.parts(), *(generate.SOURCES / name for name in HEADERS)]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if anything was found."""
    given = sys.argv[1:] if arguments is None else arguments
    findings = [finding for path in ([Path(name) for name in given] or sources()) for finding in check(path)]
    for finding in findings:
        print(finding)

    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
