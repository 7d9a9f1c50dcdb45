"""The testing kit: what an implementation of a port must pass, and stores that fail on purpose.

    PayloadConformance       the contract of kvstore.ports.PayloadStore, as a test class to subclass
    RawPayloads              what that class reaches the storage through
    FaultyPayloads           a payload store with injected faults; Plan and Rule say which
    IndexConformance         the contract of kvstore.ports.Index, as a test class to subclass
    NoteConformance          the part of it that is about `note`, for wrappers that change nothing else
    MaintenanceConformance   the contract of kvstore.catalogue; a leaf's test subclasses both. It is made of
                             CatalogueConformance, UpkeepConformance and JournalConformance

Needs pytest, which kvstore itself does not.
"""

from kvstore.blobs.faulty import FaultyPayloads, Plan, Rule
from kvstore.conformance.admission import NoteConformance
from kvstore.conformance.arrange import RawPayloads
from kvstore.conformance.catalogue import CatalogueConformance
from kvstore.conformance.index import IndexConformance
from kvstore.conformance.journal import JournalConformance
from kvstore.conformance.maintenance import MaintenanceConformance
from kvstore.conformance.payloads import PayloadConformance
from kvstore.conformance.upkeep import UpkeepConformance

__all__ = [
    "PayloadConformance",
    "RawPayloads",
    "FaultyPayloads",
    "Plan",
    "Rule",
    "IndexConformance",
    "NoteConformance",
    "MaintenanceConformance",
    "CatalogueConformance",
    "UpkeepConformance",
    "JournalConformance",
]
