"""Work: copies, memsets, streams, events, graphs, kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

from tests.programs.calls.base import Result, ask, command

PTX = Path(__file__).resolve().parents[3] / "gpususpend" / "demo" / "kernels.ptx"

# Copies and memsets. With `stream` given the asynchronous form is called.


def _in_stream(name: str, arguments: tuple[Any, ...], stream: int | None) -> Result:
    return ask(name, *arguments) if stream is None else ask(name + "Async", *arguments, stream)


@command
def copy(target: int, source: int, size: int, stream: int | None = None) -> Result:
    """Copy between any two addresses."""
    return _in_stream("cuMemcpy", (target, source, size), stream)


@command
def copy_htod(target: int, source: int, size: int, stream: int | None = None) -> Result:
    """Copy from host memory to the device."""
    return _in_stream("cuMemcpyHtoD", (target, source, size), stream)


@command
def copy_dtoh(target: int, source: int, size: int, stream: int | None = None) -> Result:
    """Copy from the device to host memory."""
    return _in_stream("cuMemcpyDtoH", (target, source, size), stream)


@command
def copy_dtod(target: int, source: int, size: int, stream: int | None = None) -> Result:
    """Copy from device to device."""
    return _in_stream("cuMemcpyDtoD", (target, source, size), stream)


@command
def copy_peer(target: int, target_ctx: int, source: int, source_ctx: int, size: int) -> Result:
    """Copy between two contexts."""
    return ask("cuMemcpyPeer", target, target_ctx, source, source_ctx, size)


@command
def memset_d8(address: int, value: int, count: int, stream: int | None = None) -> Result:
    """Set `count` bytes."""
    return _in_stream("cuMemsetD8", (address, value, count), stream)


@command
def memset_d32(address: int, value: int, count: int, stream: int | None = None) -> Result:
    """Set `count` words of 32 bits."""
    return _in_stream("cuMemsetD32", (address, value, count), stream)


@command
def memset_2d_d32(address: int, pitch: int, value: int, width: int, height: int) -> Result:
    """Set `height` rows of `width` words."""
    return ask("cuMemsetD2D32", address, pitch, value, width, height)


# Streams, events, graphs


@command
def stream_create(flags: int = 1) -> Result:
    """Create a stream; flag 1 keeps it apart from the default stream."""
    return ask("cuStreamCreate", flags)


@command
def stream_destroy(stream: int) -> Result:
    """Destroy a stream."""
    return ask("cuStreamDestroy", stream)


@command
def stream_sync(stream: int) -> Result:
    """Wait for a stream."""
    return ask("cuStreamSynchronize", stream)


@command
def stream_query(stream: int) -> Result:
    """Ask whether a stream is done: 0, or 600 while it works."""
    return ask("cuStreamQuery", stream)


@command
def stream_wait_event(stream: int, event: int) -> Result:
    """Let a stream wait for an event."""
    return ask("cuStreamWaitEvent", stream, event, 0)


@command
def stream_write_value(stream: int, address: int, value: int) -> Result:
    """Write a word in stream order."""
    return ask("cuStreamWriteValue32", stream, address, value, 0)


@command
def stream_wait_value(stream: int, address: int, value: int, flags: int = 0) -> Result:
    """Wait in stream order until a word is at least `value`."""
    return ask("cuStreamWaitValue32", stream, address, value, flags)


@command
def event_create(flags: int = 0) -> Result:
    """Create an event (flags 6: interprocess without timing)."""
    return ask("cuEventCreate", flags)


@command
def event_destroy(event: int) -> Result:
    """Destroy an event."""
    return ask("cuEventDestroy", event)


@command
def event_record(event: int, stream: int = 0) -> Result:
    """Record an event in a stream."""
    return ask("cuEventRecord", event, stream)


@command
def event_sync(event: int) -> Result:
    """Wait for an event."""
    return ask("cuEventSynchronize", event)


@command
def event_query(event: int) -> Result:
    """Ask whether an event happened: 0, or 600 until it does."""
    return ask("cuEventQuery", event)


@command
def capture_begin(stream: int, mode: int = 0) -> Result:
    """Begin to record a graph; mode 0 global, 1 thread local, 2 relaxed."""
    return ask("cuStreamBeginCapture", stream, cu.CUstreamCaptureMode(mode))


@command
def capture_end(stream: int) -> Result:
    """End the recording and return the graph."""
    return ask("cuStreamEndCapture", stream)


@command
def graph_instantiate(graph: int) -> Result:
    """Make a graph executable."""
    return ask("cuGraphInstantiate", graph, 0)


@command
def graph_of(graph: int) -> Result:
    """Return a new graph whose only node is a copy of another graph."""
    made = ask("cuGraphCreate", 0)
    if made.code:
        return made
    added = ask("cuGraphAddChildGraphNode", made.value, None, 0, graph)
    return added if added.code else made


@command
def graph_launch(executable: int, stream: int) -> Result:
    """Launch an executable graph."""
    return ask("cuGraphLaunch", executable, stream)


@command
def graph_exec_destroy(executable: int) -> Result:
    """Destroy an executable graph."""
    return ask("cuGraphExecDestroy", executable)


@command
def graph_destroy(graph: int) -> Result:
    """Destroy a graph."""
    return ask("cuGraphDestroy", graph)


# Kernels


@command
def module_load() -> Result:
    """Load kernels.ptx into the current context; return the module."""
    return ask("cuModuleLoadData", PTX.read_bytes() + b"\0")


MANAGED_VARIABLE = b".visible .global .attribute(.managed) .align 4 .b32 counter;"


@command
def module_load_managed() -> Result:
    """Load a module that has a managed variable `counter`."""
    head = b".version 6.0\n.target sm_52\n.address_size 64\n"
    return ask("cuModuleLoadData", head + MANAGED_VARIABLE + b"\n\0")


@command
def module_global(module: int, name: str) -> Result:
    """Return address and size of a variable of a module."""
    return ask("cuModuleGetGlobal", module, name.encode())


@command
def module_unload(module: int) -> Result:
    """Unload a module."""
    return ask("cuModuleUnload", module)


@command
def function(module: int, name: str) -> Result:
    """Return the kernel `name` of a module."""
    return ask("cuModuleGetFunction", module, name.encode())


NARROW = {"gs_fill": {2}, "gs_wait_flag": {1}}
"""Positions of the parameters that are 4 bytes wide; every other one has 8."""


@command
def launch(kernel: int, name: str, arguments: list[int], stream: int = 0, blocks: int = 0,
           form: str = "plain") -> Result:
    """Launch a kernel of kernels.ptx; `form` is plain, ex or cooperative."""
    narrow = NARROW.get(name, set())
    types = tuple(ctypes.c_uint32 if i in narrow else ctypes.c_uint64 for i in range(len(arguments)))
    waits = name == "gs_wait_flag"
    grid = (blocks or (1 if waits else 32), 1, 1)
    block = (1 if waits else 128, 1, 1)
    parameters = (tuple(arguments), types)
    if form == "ex":
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.hStream = stream
        return ask("cuLaunchKernelEx", config, kernel, parameters, 0)
    if form == "cooperative":
        return ask("cuLaunchCooperativeKernel", kernel, *grid, *block, 0, stream, parameters)
    return ask("cuLaunchKernel", kernel, *grid, *block, 0, stream, parameters, 0)


@command
def host_function(stream: int, function: int, data: int = 0) -> Result:
    """Let the driver call a C function in stream order."""
    return ask("cuLaunchHostFunc", stream, cu.CUhostFn(function), data)
