"""Devices, contexts, peer access."""

from __future__ import annotations

from cuda.bindings import driver as cu

from tests.programs.calls.base import Result, ask, ask_raw, command


@command
def init() -> Result:
    """Initialise the driver in this process."""
    return ask("cuInit", 0)


@command
def driver_version() -> Result:
    """Return the CUDA version of the driver, 13000 for 13.0."""
    return ask("cuDriverGetVersion")


@command
def device_count() -> Result:
    """Return the number of devices."""
    return ask("cuDeviceGetCount")


@command
def device(ordinal: int) -> Result:
    """Return the device handle of `ordinal`."""
    return ask("cuDeviceGet", ordinal)


@command
def device_uuid(ordinal: int) -> Result:
    """Return the device's UUID as 32 hexadecimal digits."""
    answer = ask_raw("cuDeviceGetUuid", ordinal)
    return Result(answer.code, answer.value and bytes(answer.value.bytes).hex())


@command
def device_attribute(name: str, ordinal: int) -> Result:
    """Return the device attribute CU_DEVICE_ATTRIBUTE_<name>."""
    return ask("cuDeviceGetAttribute", getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), ordinal)


@command
def can_access_peer(ordinal: int, peer: int) -> Result:
    """Tell whether device `ordinal` can reach the memory of `peer`."""
    return ask("cuDeviceCanAccessPeer", ordinal, peer)


@command
def primary_retain(ordinal: int) -> Result:
    """Retain the primary context of a device and return it."""
    return ask("cuDevicePrimaryCtxRetain", ordinal)


@command
def primary_release(ordinal: int) -> Result:
    """Give up one reference to the primary context."""
    return ask("cuDevicePrimaryCtxRelease", ordinal)


@command
def primary_reset(ordinal: int) -> Result:
    """Destroy everything in the primary context."""
    return ask("cuDevicePrimaryCtxReset", ordinal)


@command
def primary_state(ordinal: int) -> Result:
    """Return [flags, active] of the primary context."""
    return ask("cuDevicePrimaryCtxGetState", ordinal)


@command
def ctx_create(ordinal: int, flags: int = 0) -> Result:
    """Create a context of its own and make it current."""
    return ask("cuCtxCreate", None, flags, ordinal)


@command
def ctx_destroy(context: int) -> Result:
    """Destroy a context."""
    return ask("cuCtxDestroy", context)


@command
def ctx_set_limit(limit: int, value: int) -> Result:
    """Set a limit of the current context (0: bytes of stack a thread)."""
    return ask("cuCtxSetLimit", limit, value)


@command
def ctx_set(context: int) -> Result:
    """Make `context` current in this thread (0: none)."""
    return ask("cuCtxSetCurrent", context)


@command
def ctx_current() -> Result:
    """Return the current context of this thread."""
    return ask("cuCtxGetCurrent")


@command
def ctx_push(context: int) -> Result:
    """Push `context` on this thread's stack."""
    return ask("cuCtxPushCurrent", context)


@command
def ctx_pop() -> Result:
    """Pop this thread's current context and return it."""
    return ask("cuCtxPopCurrent")


@command
def ctx_device() -> Result:
    """Return the device of the current context."""
    return ask("cuCtxGetDevice")


@command
def ctx_sync() -> Result:
    """Wait for all work of the current context."""
    return ask("cuCtxSynchronize")


@command
def peer_enable(context: int, flags: int = 0) -> Result:
    """Let the current context reach the memory of `context`."""
    return ask("cuCtxEnablePeerAccess", context, flags)


@command
def peer_disable(context: int) -> Result:
    """Undo `peer_enable`."""
    return ask("cuCtxDisablePeerAccess", context)
