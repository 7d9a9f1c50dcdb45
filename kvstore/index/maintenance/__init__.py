"""The index as maintenance and people see it: the ports beside kvstore.index.port.Index. None of them is on a
request's path.

What every index has:

    Catalogue     looks: what there is, how much of it, where the index says that it is
    Removal       takes out: evicts to a quota, invalidates, reaps the trash, sweeps what dangles
    Diagnosis     answers whether the index is well
    Maintenance   all three

What an index may lack:

    Pins          keep segments from going by policy
    Quotas        are set by operators while engines run
    Ages          say how old what is served may be
    Salts         tell what requests with different salts have stored, and forbid a salt
    Sessions      lists what is remembered of clients' sessions (kvstore.index.sessions)
    Heat          watches which segments begin loads
    Repair        makes good what fsck found
    Journal       remembers what was committed, evicted and asked for, and what more room would bring
    Operations    remembers what operators did

    FullIndex     Maintenance, all of these and EngineIndex: what our leaves implement

The rules of kvstore.index.port hold here too: batch first, sync, safe for many threads and processes, every
call with a deadline, bounded in time and in answer. A verb accounts for what it changes in the same
transaction. Every change may be asked for by several processes at once; one that is asked for twice is made
once.

Not here, and why: anything that needs several namespaces at one moment (in a Redis Cluster they lie on
different nodes; kvstore.index.eviction plans over them, and its plan is safe to carry out twice), payloads.
"""

from kvstore.index.maintenance.abilities import (
    CLOCKS_DIFFER_S,
    Ages,
    Heat,
    Pins,
    Quotas,
    Reconciled,
    Repair,
    Salts,
)
from kvstore.index.maintenance.catalogue import (
    Account,
    Catalogue,
    Diagnosis,
    Entry,
    Listing,
    SegmentState,
    Usage,
)
from kvstore.index.maintenance.journal import (
    Event,
    Fate,
    Ghosts,
    Journal,
    Operation,
    Operations,
    position_order,
)
from kvstore.index.maintenance.removal import Candidate, Erased, Removal
from kvstore.index.port import EngineIndex
from kvstore.index.sessions import Sessions

__all__ = [
    "CLOCKS_DIFFER_S",
    "Account",
    "Ages",
    "Candidate",
    "Catalogue",
    "Diagnosis",
    "Entry",
    "Erased",
    "Event",
    "Fate",
    "FullIndex",
    "Ghosts",
    "Heat",
    "Journal",
    "Listing",
    "Operation",
    "Operations",
    "Maintenance",
    "Pins",
    "Quotas",
    "Reconciled",
    "Removal",
    "Repair",
    "Salts",
    "SegmentState",
    "Sessions",
    "Usage",
    "position_order",
]


class Maintenance(Catalogue, Removal, Diagnosis):
    """What every index offers beside the path of requests."""


class FullIndex(
    EngineIndex, Maintenance, Pins, Quotas, Ages, Salts, Sessions, Heat, Repair, Journal, Operations
):
    """An index with every ability, for engines and for maintenance."""
