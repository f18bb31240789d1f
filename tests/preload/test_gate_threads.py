"""What can happen to a thread that waits at a gate: a signal, a fork in its handler, a cancellation, the end of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.preload.conftest import Runner

PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern int cuInit(unsigned), cuMemcpyHtoD_v2(unsigned long long, const void *, unsigned long);
extern int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                          void **);
extern int stub_calls(const char *);
enum { LAUNCH, MEMORY };
static const char *names[] = {"cuLaunchKernel", "cuMemcpyHtoD_v2"};
static int fork_wanted, child_status = -1, signals, passed[2];

#define INSIDE(result, name, ...) ((result(*)(__VA_ARGS__))dlsym(RTLD_DEFAULT, "inside_" #name))
#define WAIT(condition) for (int i = 0; i < 60000 && !(condition); i++) usleep(1000); if (!(condition)) return __LINE__

static unsigned waiting(int cls) { return INSIDE(unsigned, waiting, int)(cls); }
static unsigned in_flight(void) {
    return INSIDE(unsigned, in_flight, int)(LAUNCH) + INSIDE(unsigned, in_flight, int)(MEMORY);
}

static void on_signal(int number) {
    (void)number;
    if (fork_wanted) {
        pid_t child = fork();
        if (child == 0) return; /* goes on where it waited: nothing is closed there */
        waitpid(child, &child_status, 0);
    }
    __atomic_add_fetch(&signals, 1, __ATOMIC_SEQ_CST);
}

static void *call(void *argument) {
    int cls = (int)(size_t)argument;
    pid_t before = getpid();
    passed[cls] = cls == LAUNCH ? cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0
                                : cuMemcpyHtoD_v2(1, &cls, 4) == 0;
    if (getpid() != before) _exit(passed[cls] && !INSIDE(int, closed, int)(cls) ? 0 : 1);
    pthread_testcancel();
    return argument;
}

static int begin(pthread_t *threads) {
    passed[LAUNCH] = passed[MEMORY] = 0;
    INSIDE(void, close, int)(LAUNCH);
    INSIDE(void, close, int)(MEMORY);
    for (size_t cls = 0; cls < 2; cls++) {
        if (pthread_create(&threads[cls], NULL, call, (void *)cls)) return __LINE__;
        WAIT(waiting((int)cls) == 1);
    }
    return 0;
}

int main(int count, char **words) {
    struct sigaction action;
    pthread_t threads[2];
    void *how;
    int failed;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    alarm(90);
    if (count != 2 || cuInit(0) || sigaction(SIGUSR1, &action, NULL)) return 2;
    if ((failed = begin(threads))) return failed;
    fork_wanted = !strcmp(words[1], "fork");
    for (int cls = 0; cls < 2; cls++) {
        int seen = signals, before = stub_calls(names[cls]);
        if (!strcmp(words[1], "cancel")) {
            pthread_cancel(threads[cls]);
            usleep(20000);
        } else {
            pthread_kill(threads[cls], SIGUSR1);
            WAIT(signals == seen + 1);
            if (fork_wanted && child_status != 0) return __LINE__;
        }
        if (waiting(cls) != 1 || passed[cls] || stub_calls(names[cls]) != before || in_flight() != 0) return __LINE__;
    }
    if (!strcmp(words[1], "exit")) return 0; /* with both still waiting */
    INSIDE(void, open, void)();
    for (size_t cls = 0; cls < 2; cls++) {
        if (pthread_join(threads[cls], &how) || !passed[cls] || waiting((int)cls) || in_flight()) return __LINE__;
        if (how != (!strcmp(words[1], "cancel") ? PTHREAD_CANCELED : (void *)cls)) return __LINE__;
    }
    if ((failed = begin(threads))) return failed; /* nobody is left behind who would be let through instead */
    INSIDE(void, open, void)();
    return pthread_join(threads[LAUNCH], &how) || pthread_join(threads[MEMORY], &how) || in_flight();
}
"""


@pytest.mark.parametrize("what", ["signal", "fork", "cancel", "exit"])
def test_a_thread_that_waits_at_a_gate(
    run: Runner, inside: Path, stub_driver: Path, built: Callable[..., Path], what: str
) -> None:
    """It waits on, whatever reaches it, and is counted right; a child that its handler forks waits for nobody."""
    program = built("waiting-threads", PROGRAM, "-pthread", f"-L{stub_driver}", "-l:libcuda.so.1")
    done = run([program, what], preload=[inside], libraries=stub_driver)
    assert done.returncode == 0, (done.returncode, done.stderr)
