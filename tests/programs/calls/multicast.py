"""Multicast objects, on the simulated driver only: on a real one they can take the host's GPUs out of service."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu

from tests.programs.calls.base import MISSING, Result, ask, command, is_simulated


def _ask(name: str, *arguments: Any) -> Result:
    return ask(name, *arguments) if is_simulated() else Result(MISSING)


@command
def multicast_create(size: int, devices: int = 2, handle_types: int = 1) -> Result:
    """Create a multicast object for a number of devices."""
    wanted = cu.CUmulticastObjectProp()
    wanted.numDevices, wanted.size, wanted.handleTypes = devices, size, handle_types
    return _ask("cuMulticastCreate", wanted)


@command
def multicast_add(team: int, ordinal: int) -> Result:
    """Add a device."""
    return _ask("cuMulticastAddDevice", team, ordinal)


@command
def multicast_bind(team: int, offset: int, memory: int, memory_offset: int, size: int) -> Result:
    """Bind memory by its handle."""
    return _ask("cuMulticastBindMem", team, offset, memory, memory_offset, size, 0)


@command
def multicast_bind_for(team: int, ordinal: int, offset: int, memory: int, memory_offset: int, size: int) -> Result:
    """Bind memory by its handle for a device."""
    return _ask("cuMulticastBindMem_v2", team, ordinal, offset, memory, memory_offset, size, 0)


@command
def multicast_bind_at(team: int, offset: int, address: int, size: int) -> Result:
    """Bind memory by its address."""
    return _ask("cuMulticastBindAddr", team, offset, address, size, 0)


@command
def multicast_bind_at_for(team: int, ordinal: int, offset: int, address: int, size: int) -> Result:
    """Bind memory by its address for a device."""
    return _ask("cuMulticastBindAddr_v2", team, ordinal, offset, address, size, 0)


@command
def multicast_unbind(team: int, ordinal: int, offset: int, size: int) -> Result:
    """Undo a bind."""
    return _ask("cuMulticastUnbind", team, ordinal, offset, size)
