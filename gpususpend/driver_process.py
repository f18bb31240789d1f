"""The driver process: the only place that loads cuda-bindings, apart from everything that must not.

Owns cuInit (and never a context: that would take GPU memory and change what the others see) and the checkpoint calls,
each in a thread of its own.  Must not know phases or groups.  Started by `driver.DriverProcess.start`.

A call that the supervisor no longer waits for is never broken off: the process outlives the command until every call
has returned, and writes down what they returned for `recover`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from gpususpend import errors, origin, processes, system
from gpususpend.helpers import HELD_BACK, Inherited, Message, boot_id, let_signals_in

TITLE = "gpushare-driver"
# Results that are not the driver's: the driver lacks the function, or the call could not be made.
NOT_CALLED = -1
_PAIR_BYTES, _UUID_BYTES = 32, 16
_PIDS_A_DEVICE = 4096


def leftover_name(pid: int, start_time: int) -> str:
    """Return the name of the file with the calls that a command left behind."""
    return f"driver-{pid}-{start_time}.json"


class Cuda:
    """The driver through cuda-bindings; every method returns (code, name, value) and raises nothing of the driver's."""

    def __init__(self) -> None:
        # Imported here, late: a driver that is missing must become an answer.
        from cuda.bindings import driver

        self._driver = driver

    def init(self) -> tuple[int, str, Any]:
        """Initialise the driver; the value tells its version, and whether it is the simulated one."""
        code, name, _ = self._call(self._driver.cuInit, 0)
        library = ctypes.CDLL("libcuda.so.1")
        simulated = hasattr(library, "simcudaVersion")
        _, _, cuda_version = self._call(self._driver.cuDriverGetVersion)
        if simulated:
            library.simcudaDriverVersionString.restype = ctypes.c_char_p
            version = library.simcudaDriverVersionString().decode()
        else:
            version = kernel_driver_version()
        return code, name, {"simulated": simulated, "driver": version, "cuda": cuda_version}

    def state(self, pid: int) -> tuple[int, str, Any]:
        """Return the checkpoint state of a process; a state that the bindings do not know stays a number."""
        return self._call(self._driver.cuCheckpointProcessGetState, pid)

    def restore_thread(self, pid: int) -> tuple[int, str, Any]:
        """Return the id of the thread that must run during checkpoint and restore."""
        return self._call(self._driver.cuCheckpointProcessGetRestoreThreadId, pid)

    def lock(self, pid: int, timeout_ms: int) -> tuple[int, str, Any]:
        """Lock a process; the driver gives up after `timeout_ms` (0 would mean never)."""
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, timeout_ms)
        return self._call(self._driver.cuCheckpointProcessLock, pid, arguments)

    def checkpoint(self, pid: int) -> tuple[int, str, Any]:
        """Checkpoint a locked process."""
        return self._call(self._driver.cuCheckpointProcessCheckpoint, pid, None)

    def restore(self, pid: int, pairs: list[list[str]]) -> tuple[int, str, Any]:
        """Restore a checkpointed process, on other GPUs where pairs of UUIDs (old, new) are given."""
        if not pairs:
            # Drivers before 580 know no pairs and want no arguments.
            return self._call(self._driver.cuCheckpointProcessRestore, pid, None)
        native = []
        for old, new in pairs:
            pair = self._driver.CUcheckpointGpuPair()
            # The bindings let nobody set the bytes of a UUID.
            ctypes.memmove(int(pair.getPtr()), uuid_bytes(old) + uuid_bytes(new), _PAIR_BYTES)
            native.append(pair)
        arguments = self._driver.CUcheckpointRestoreArgs()
        arguments.gpuPairs = native
        arguments.gpuPairsCount = len(native)
        return self._call(self._driver.cuCheckpointProcessRestore, pid, arguments)

    def unlock(self, pid: int) -> tuple[int, str, Any]:
        """Unlock a process."""
        return self._call(self._driver.cuCheckpointProcessUnlock, pid, None)

    def devices(self) -> tuple[int, str, Any]:
        """Return every GPU in the driver's order: UUID, name, bytes of memory, whether that is the machine's, and the
        first number of its compute capability.
        """
        code, name, count = self._call(self._driver.cuDeviceGetCount)
        # Newer bindings dropped the suffix; the driver's function is the same.
        get_uuid = getattr(self._driver, "cuDeviceGetUuid_v2", None) or self._driver.cuDeviceGetUuid
        attribute = self._driver.CUdevice_attribute
        found = []
        for index in range(count if code == 0 else 0):
            answers = [self._call(self._driver.cuDeviceGet, index)]
            device = answers[0][2]
            answers += [
                self._call(get_uuid, device),
                self._call(self._driver.cuDeviceGetName, 256, device),
                self._call(self._driver.cuDeviceTotalMem, device),
                self._call(self._driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, device),
                self._call(
                    self._driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device
                ),
            ]
            failed = [answer for answer in answers if answer[0]]
            if failed:
                return failed[0]
            title = answers[2][2].split(b"\0")[0].decode(errors="replace")
            found.append(
                {
                    "uuid": uuid_text(answers[1][2].bytes),
                    "name": title,
                    "bytes": answers[3][2],
                    "integrated": bool(answers[4][2]),
                    "compute": answers[5][2],
                }
            )
        return code, name, found

    def usage(self, index: int) -> tuple[int, str, Any]:
        """Return the bytes used on a simulated GPU, by pid; a real one is asked through NVML."""
        library = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(_PIDS_A_DEVICE)
        pids, sizes = (ctypes.c_uint * _PIDS_A_DEVICE)(), (ctypes.c_size_t * _PIDS_A_DEVICE)()
        code = library.simcudaDeviceUsage(index, pids, sizes, ctypes.byref(count))
        return code, self._name(code), [[pids[i], sizes[i]] for i in range(min(count.value, _PIDS_A_DEVICE))]

    def _call(self, function: Callable[..., Any], *arguments: object) -> tuple[int, str, Any]:
        try:
            result = function(*arguments)
        except (KeyError, ValueError) as error:
            number = re.search(r"-?\d+", str(error))
            if number is None:
                return NOT_CALLED, f"{type(error).__name__}: {error}", 0
            value = int(number.group())
            # The result itself and what the call returns are both turned into enumerations: tell them apart by
            # the message or, where older bindings say nothing but the number, by its size.
            is_state = "CUprocessState" in str(error) or (isinstance(error, KeyError) and 0 <= value < 100)
            return (0, self._name(0), value) if is_state else (value, self._name(value), 0)
        except RuntimeError as error:
            return NOT_CALLED, f"the driver lacks this call: {error}", 0
        code = int(result[0])
        value = result[1] if len(result) > 1 else 0
        plain = int(value) if isinstance(value, int) else value
        return code, self._name(code), plain if code == 0 else 0

    def _name(self, code: int) -> str:
        try:
            return str(self._driver.CUresult(code).name)
        except ValueError:
            return f"unknown result {code}"


def kernel_driver_version() -> str:
    """Return the version of NVIDIA's kernel driver, "" where it cannot be read."""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version", encoding="utf-8") as file:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read())
        if found:
            return found.group()
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return ""


def uuid_bytes(text: str) -> bytes:
    """Return the bytes of a GPU's UUID as `GPU-xxxxxxxx-xxxx-…`."""
    return uuid.UUID(text.removeprefix("GPU-")).bytes


def uuid_text(content: bytes) -> str:
    """Return a GPU's UUID as NVML writes it."""
    return f"GPU-{uuid.UUID(bytes=bytes(content[:_UUID_BYTES]))}"


class DriverServer:
    """Runs each request in a thread, answers when it returns, and keeps account of those that nobody waits for."""

    def __init__(self, inherited: Inherited) -> None:
        self._supervisor = inherited
        self._lock = threading.Lock()
        self._cuda: Cuda | None = None
        # By request id.  What a call returned goes to the supervisor, or into the file once it was abandoned.
        self._running: dict[int, Message] = {}
        self._abandoned: dict[int, Message] = {}
        own = processes.read_process(os.getpid())
        self._identity = {"pid": own.pid, "start_time": own.start_time}
        self._file = leftover_name(own.pid, own.start_time)

    def run(self) -> None:
        """Serve until the supervisor hangs up; threads that are still in a call keep the process alive."""
        while (request := self._supervisor.receive()) is not None:
            if request["do"] == "abandon":
                self._abandon(request["ids"])
            else:
                entry = {"call": request["do"], "pid": request.get("pid", 0), "finished": False}
                with self._lock:
                    self._running[request["id"]] = entry
                thread = threading.Thread(target=self._serve, args=(request, entry))
                try:
                    system.start(thread)
                except errors.SystemCall as denial:
                    self._answer(request, entry, (NOT_CALLED, str(denial), 0), 0.0)
        self._supervisor.leave_terminal()
        with self._lock:
            left = list(self._running)
        self._abandon(left)

    def _serve(self, request: Message, entry: Message) -> None:
        begun = time.monotonic()
        try:
            answer = self._do(request)
        except Exception as error:
            answer = NOT_CALLED, f"{type(error).__name__}: {error}", 0
        self._answer(request, entry, answer, time.monotonic() - begun)

    def _answer(self, request: Message, entry: Message, answer: tuple[int, str, Any], seconds: float) -> None:
        code, name, value = answer
        outcome = {"finished": True, "code": code, "name": name, "value": value, "seconds": round(seconds, 6)}
        with self._lock:
            del self._running[request["id"]]
            entry.update(outcome)
            # Under the lock, so that whoever abandons has either got the answer before or finds it in the file.
            if request["id"] in self._abandoned:
                self._write()
            else:
                self._supervisor.send({"id": request["id"], **outcome})

    def _do(self, request: Message) -> tuple[int, str, Any]:
        if request["do"] == "init":
            self._cuda = Cuda()
        if self._cuda is None:
            raise RuntimeError("the driver was not initialised")
        method: Callable[..., tuple[int, str, Any]] = getattr(self._cuda, request["do"])
        return method(*request["arguments"])

    def _abandon(self, ids: list[int]) -> None:
        with self._lock:
            found = {number: self._running[number] for number in ids if number in self._running}
            self._abandoned.update(found)
            if found:
                self._write()
            self._supervisor.send({"abandoned": list(found)})

    def _write(self) -> None:
        calls = [call for call in self._abandoned.values() if call["pid"]]
        if not calls:  # of no process: nobody has to know
            return
        content = {**self._identity, "boot_id": boot_id(), "origin": origin.here(), "calls": calls}
        with contextlib.suppress(errors.StateNotWritten):
            self._supervisor.state_dir.write(self._file, json.dumps(content).encode())


def main() -> None:
    """Run the driver process on what it inherited."""
    # Whatever stops a whole session or service must not break off a call; without one the process ends by itself.
    for ignored in HELD_BACK:
        signal.signal(ignored, signal.SIG_IGN)
    let_signals_in()
    DriverServer(Inherited(TITLE)).run()


if __name__ == "__main__":
    main()
