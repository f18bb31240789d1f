"""Suspend and resume processes that share GPU memory.

Owns the command line, the phases over all ranks, the driver's checkpoint calls and the state on disk. It speaks to the
shim through the control protocol (docs/reference/control-protocol.md) and must not know how the shim keeps its tables.
"""

__version__ = "0.1.0"
