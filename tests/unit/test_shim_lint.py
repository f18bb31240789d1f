"""Each trap, put into a source file, is found; the shim's own sources are clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from shim import lint

GOOD = '''
cdef extern from "platform.h" nogil:
    ctypedef int (*callback)(void *) noexcept nogil
    int strcmp(const char *a, const char *b)
    void *malloc_like(size_t size)

cdef enum:
    SIZE = 64

ctypedef struct Item:
    int size
    void (*free)(void *) noexcept nogil

cdef Item items[SIZE]
cdef int count


cdef inline int add(int a,
                    int b) noexcept nogil:
    """Add; not malloc(), not "printf(" and not a class."""
    cdef Item *item = &items[0]
    item.free(item)
    return a + b if strcmp(b"malloc(", b"x") else 0
'''

TRAPS = {
    "a module-level initialiser": ("cdef int limit = 64\n", "stays 0"),
    "code at module level": ("items[0].size = 3\n", "never runs"),
    "a cimported function": ("from other cimport helper\n", "NULL at run time"),
    "a cimport of libc functions": ("from libc.string cimport strlen\n", "NULL at run time"),
    "no noexcept": ('cdef int f() nogil:\n    """F."""\n    return 0\n', "must be noexcept nogil"),
    "no nogil": ('cdef int f() noexcept:\n    """F."""\n    return 0\n', "must be noexcept nogil"),
    "no line of its own": ("cdef int f() noexcept nogil:\n    return 0\n", "lacks its one line"),
    "a split head without its line": ("cdef int f(int a,\n           int b) noexcept nogil:\n    return 0\n", "lacks"),
    "public and unknown": ('cdef public int cuFoo() noexcept nogil:\n    """F."""\n    return 0\n', "no custom hook"),
    "stdio": ('cdef void f() noexcept nogil:\n    """F."""\n    printf(b"x")\n', "stdio"),
    "malloc": ('cdef void *f() noexcept nogil:\n    """F."""\n    return malloc(8)\n', "allocator"),
    "exit": ('cdef void f() noexcept nogil:\n    """F."""\n    abort()\n', "never ends the program"),
    "a pthread mutex": ('cdef void f() noexcept nogil:\n    """F."""\n    pthread_mutex_lock(NULL)\n', "gs_lock"),
    "our own dlsym": ('cdef void *f() noexcept nogil:\n    """F."""\n    return dlsym(NULL, b"x")\n', "genuine"),
    "a duplicate": ('cdef int f() noexcept nogil:\n    """F."""\n    return dup(1)\n', "inherit"),
    "a duplicate by fcntl": ('cdef int f() noexcept nogil:\n    """F."""\n    return fcntl(1, F_DUPFD)\n', "inherit"),
    "a file": ('cdef int f() noexcept nogil:\n    """F."""\n    return open(b"/x", O_RDONLY)\n', "inherit"),
    "a newer strtol": ('cdef long f() noexcept nogil:\n    """F."""\n    return strtol(b"1", NULL, 10)\n', "__isoc23"),
    "a Python function": ("def f():\n    pass\n", "needs Python"),
    "a class": ("class A:\n    pass\n", "needs Python"),
    "an exception": ('cdef void f() noexcept nogil:\n    """F."""\n    raise ValueError\n', "need Python"),
    "the interpreter": ('cdef void f() noexcept nogil:\n    """F."""\n    with gil:\n        pass\n', "needs Python"),
    "an import": ("import os\n", "needs Python"),
    "extern functions that want the interpreter": ('cdef extern from "x.h":\n    int f()\n', "nogil"),
    "a function pointer that may raise": ("ctypedef int (*f)(int) nogil\n", "function pointer"),
}


def _messages(folder: Path, name: str, text: str) -> list[str]:
    """Return what the lint finds in a file of that content."""
    path = folder / name
    path.write_text(text)
    return [finding.message for finding in lint.check(path)]


def test_the_sources_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint.main([]) == 0, capsys.readouterr().out


def test_good_code_passes(tmp_path: Path) -> None:
    assert _messages(tmp_path, "good.pxi", GOOD) == []


@pytest.mark.parametrize("trap", TRAPS)
def test_trap(tmp_path: Path, trap: str) -> None:
    code, message = TRAPS[trap]
    found = _messages(tmp_path, "trap.pxi", GOOD + "\n" + code)
    assert any(message in text for text in found), found


def test_traps_of_headers(tmp_path: Path) -> None:
    assert "stdio" in _messages(tmp_path, "a.h", 'static void f(void) { printf("x"); }\n')[0]
    assert _messages(tmp_path, "b.h", '/* printf( */ static const char *s = "malloc(";\n') == []
    assert "every program" in _messages(tmp_path, "c.h", "__attribute__((constructor)) static void f(void) {}\n")[0]


def test_a_file_of_two_ideas(tmp_path: Path) -> None:
    assert "two ideas" in _messages(tmp_path, "long.pxi", "\n" * 601)[0]
