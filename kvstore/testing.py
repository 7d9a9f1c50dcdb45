"""The testing kit: what an implementation of a port must pass, and stores that fail on purpose.

    PayloadConformance       the contract of kvstore.payloads.port.PayloadStore, as a test class to subclass
    RawPayloads              the storage behind a payload store, as that class reaches it
    FaultyPayloads           a payload store with injected faults; Plan and Rule say which

    IndexConformance         the contract of kvstore.index.port.Index, as a test class to subclass
    MaintenanceConformance   the contract of kvstore.index.maintenance.Maintenance. An index passes these two,
                             and one more for each ability that it has: NoteConformance, PinConformance,
                             QuotaConformance, LeaseConformance, HeatConformance, RepairConformance,
                             JournalConformance, SessionConformance, VerdictConformance
    FullIndexConformance     all of them, and what the abilities promise together

Needs pytest, which kvstore itself does not.
"""

from kvstore.conformance.arrange import RawPayloads
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.conformance.index.abilities import (
    HeatConformance,
    LeaseConformance,
    PinConformance,
    QuotaConformance,
)
from kvstore.conformance.index.admission import NoteConformance, VerdictConformance
from kvstore.conformance.index.index import IndexConformance
from kvstore.conformance.index.journal import JournalConformance
from kvstore.conformance.index.repair import RepairConformance
from kvstore.conformance.index.sessions import SessionConformance
from kvstore.conformance.index.whole import FullIndexConformance, MaintenanceConformance
from kvstore.conformance.payloads import PayloadConformance

__all__ = [
    "PayloadConformance",
    "RawPayloads",
    "FaultyPayloads",
    "Plan",
    "Rule",
    "IndexConformance",
    "MaintenanceConformance",
    "NoteConformance",
    "PinConformance",
    "QuotaConformance",
    "LeaseConformance",
    "HeatConformance",
    "RepairConformance",
    "JournalConformance",
    "SessionConformance",
    "VerdictConformance",
    "FullIndexConformance",
]
