"""The testing kit: what a payload store must pass, and stores that fail on purpose.

    PayloadConformance       the contract of kvstore.payloads.port.PayloadStore, as a test class to subclass
    RawPayloads              the storage behind a payload store, as that class reaches it
    FaultyPayloads           a payload store with injected faults; Plan and Rule say which

Needs pytest, which kvstore itself does not.
"""

from kvstore.conformance.arrange import RawPayloads
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.conformance.payloads import PayloadConformance

__all__ = ["PayloadConformance", "RawPayloads", "FaultyPayloads", "Plan", "Rule"]
