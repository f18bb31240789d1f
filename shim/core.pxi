# The shim core, in the order in which its parts build on each other.
#
#   tables       growing tables whose items never move; the innermost lock
#   objects      physical allocations, their mappings and access
#   uncarried    what a suspend must refuse
#   wire         the text of the protocol, calling a peer
#   captures     graphs that are being recorded
#   contexts     contexts and devices
#   handles, exports, imports, allocations, peers, ipc, fabric, hostmem, attributes, hiding, managed, counted, teams,
#   multicast
#                the hooks
#   staging, stored          copies to and from the arena; the same through a ring
#   phases, seal, received, drain      what a suspend and a resume do
#   control, verbs           the socket and its verbs

cdef enum:
    HANDLE_TAG = 0x6753

include "syscalls.pxi"
include "tables.pxi"
include "objects.pxi"
include "uncarried.pxi"
include "wire.pxi"
include "captures.pxi"
include "contexts.pxi"
include "handles.pxi"
include "exports.pxi"
include "imports.pxi"
include "allocations.pxi"
include "peers.pxi"
include "ipc.pxi"
include "fabric.pxi"
include "hostmem.pxi"
include "attributes.pxi"
include "hiding.pxi"
include "managed.pxi"
include "counted.pxi"
include "graphics.pxi"
include "staging.pxi"
include "stored.pxi"
include "teams.pxi"
include "multicast.pxi"
include "phases.pxi"
include "seal.pxi"
include "received.pxi"
include "drain.pxi"
include "control.pxi"
include "verbs.pxi"
