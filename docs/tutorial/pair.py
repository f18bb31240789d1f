"""Two processes and one number in GPU memory: the child adds to it through CUDA IPC, the parent prints it."""

import ctypes
import os
import subprocess
import sys
import time

from cuda.bindings import driver


def call(function, *arguments):
    """Call the driver and return its one result, if it has one."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        sys.exit(f"{function.__name__}: {status.name}")
    return results[0] if results else None


def start():
    """Make the primary context of the first GPU current."""
    call(driver.cuInit, 0)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, 0)))


def read(number):
    """Copy the number from the GPU."""
    host = bytearray(4)
    call(driver.cuMemcpyDtoH, host, number, len(host))
    return int.from_bytes(host, "little")


def parent():
    """Own the number, share it, and print it twice a second."""
    start()
    number = call(driver.cuMemAlloc, 4)
    call(driver.cuMemsetD32, number, 0, 1)
    handle = call(driver.cuIpcGetMemHandle, number)
    subprocess.Popen([sys.executable, __file__, ctypes.string_at(handle.getPtr(), 64).hex()])
    while True:
        print(read(number), flush=True)
        time.sleep(0.5)


def child(handle):
    """Add 1 to the number of another process, twice a second, as long as that process lives."""
    owner = os.getppid()
    start()
    shared = driver.CUipcMemHandle()
    ctypes.memmove(shared.getPtr(), bytes.fromhex(handle), 64)
    number = call(driver.cuIpcOpenMemHandle, shared, 1)
    while os.getppid() == owner:
        call(driver.cuMemsetD32, number, read(number) + 1, 1)
        time.sleep(0.5)


if __name__ == "__main__":
    if sys.argv[1:]:
        child(sys.argv[1])
    else:
        parent()
