"""A thread that is cancelled ends at a cancellation point of the program, never inside the shim with a lock held."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.preload.conftest import Runner

PROGRAM = r"""
#include <pthread.h>
#include <string.h>
#include "cuda_abi.h"

CUresult cuInit(unsigned int), cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult cuMemExportToShareableHandle(void *, CUmemGenericAllocationHandle, int, unsigned long long);

static int done;

static int share(void) {
    CUmemAllocationProp prop;
    CUmemGenericAllocationHandle handle = 0;
    int fd = 0; /* what the stub of a driver exports */
    memset(&prop, 0, sizeof prop);
    prop.location.type = 1;
    return cuMemCreate(&handle, 2 << 20, &prop, 0) || cuMemExportToShareableHandle(&fd, handle, 1, 0)
        || cuMemRelease(handle);
}

static void *cancelled(void *unused) {
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    pthread_cancel(pthread_self());
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &before);
    done = share() == 0;
    pthread_testcancel();
    return unused;
}

int main(void) {
    pthread_t thread;
    void *how;
    if (cuInit(0) || pthread_create(&thread, NULL, cancelled, NULL) || pthread_join(thread, &how)) return 2;
    if (how != PTHREAD_CANCELED || !done) return 3;
    return share(); /* waits for ever where the thread has kept a lock */
}
"""


def test_a_cancelled_thread_leaves_the_shim_first(run: Runner, built: Callable[..., Path], stub_driver: Path) -> None:
    program = built("cancelled", PROGRAM, "-pthread", str(stub_driver / "libcuda.so.1"))
    done = run([program], libraries=stub_driver)
    assert done.returncode == 0, (done.returncode, done.stderr)


POINTS = {
    "accept", "accept4", "clock_nanosleep", "close", "connect", "creat", "getrandom", "msgrcv", "msgsnd", "nanosleep",
    "open", "open64", "openat", "openat64", "pause", "poll", "ppoll", "pread", "pselect", "pthread_cond_timedwait",
    "pthread_cond_wait", "pthread_join", "pwrite", "read", "readv", "recv", "recvfrom", "recvmsg", "select",
    "sem_timedwait", "sem_wait", "send", "sendmsg", "sendto", "sleep", "tcdrain", "usleep", "wait", "waitpid", "write",
    "writev",
}  # fmt: skip


def test_no_cancellation_point_is_called_on_threads_of_the_program(shim_path: Path) -> None:
    """What is left of them is called by the listener alone."""
    command = ["nm", "--dynamic", "--undefined-only", str(shim_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {line.split()[-1].split("@")[0] for line in output.splitlines()}
    assert "syscall" in used and used & POINTS <= {"accept4", "poll"}
