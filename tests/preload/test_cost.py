"""What an open gate costs, in instructions: counted by single steps, so nothing is timed (FR-14)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
Build = Callable[..., Path]

MOST_ADDED = 60

# The child calls twice between two breakpoints (the first call resolves); the parent steps through the second.
PROGRAM = r"""
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
extern int cuMemcpyHtoD_v2(unsigned long long, const void *, unsigned long);
extern int cuMemcpyHtoDAsync_v2(unsigned long long, const void *, unsigned long, void *);
typedef unsigned u;
extern int cuLaunchKernel(void *, u, u, u, u, u, u, u, void *, void *, void *);
extern int cuLaunchKernelEx(const void *, void *, void *, void *);
extern int cuGraphLaunch(void *, void *);
extern int cuEventRecord(void *, void *);
extern int cuMemcpyBatchAsync_v2(void *, void *, void *, unsigned long, void *, void *, unsigned long, void *);
extern int cuMemFreeAsync(unsigned long long, void *);
static long config[16];
static void call(int which) {
    if (which == 0) cuMemcpyHtoD_v2(1, &which, 8);
    if (which == 1) cuMemcpyHtoDAsync_v2(1, &which, 8, 0);
    if (which == 2) cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
    if (which == 3) cuLaunchKernelEx(config, 0, 0, 0);
    if (which == 4) cuGraphLaunch(0, 0);
    if (which == 5) cuEventRecord(0, 0);
    if (which == 6) cuMemcpyBatchAsync_v2(0, 0, 0, 0, 0, 0, 0, 0);
    if (which == 7) cuMemFreeAsync(1, 0);
}
static long steps(int which) {
    pid_t pid = fork();
    if (!pid) {
        call(which);
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        raise(SIGSTOP);
        call(which);
        raise(SIGUSR1);
        _exit(0);
    }
    int status;
    long n = 0;
    waitpid(pid, &status, 0);
    for (;;) {
        ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
        waitpid(pid, &status, 0);
        if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) break;
        n++;
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return n;
}
int main(void) {
    alarm(90);
    for (int which = 0; which < 8; which++) printf("%ld ", steps(which));
    return 0;
}
"""


def test_an_open_gate_costs_few_instructions(run: Run, built: Build, stub_driver: Path) -> None:
    program = built("cost", PROGRAM, f"-L{stub_driver}", "-l:libcuda.so.1")
    counts = {}
    for name, preload in {"with": None, "without": []}.items():
        result = run([program], preload=preload, libraries=stub_driver)
        if b"-1" in result.stdout or not result.stdout or min(map(int, result.stdout.split())) < 50:
            pytest.skip("ptrace is not allowed here")
        counts[name] = [int(word) for word in result.stdout.split()]
    added = [ours - plain for ours, plain in zip(counts["with"], counts["without"], strict=True)]
    assert max(added) <= MOST_ADDED, added
