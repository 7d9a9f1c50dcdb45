"""A node whose folder is empty, in front of a store that others have filled."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kvstore.build import open_store
from kvstore.conformance.faulty import FaultyPayloads, Plan
from kvstore.keys import NO_SESSION, SessionId, chain_like, new_segment_id
from kvstore.store.store import Store
from tests.payloads.tiered.world import Clock, Watched
from tests.store.world import chain, match, open_space, slots
from tests.waiting import PATIENCE_S

#: Blocks of a segment that another node saves.
BLOCKS = 2
OUTCOMES = ("brought", "used", "wasted", "failed")


class Node:
    """A node whose folder is empty, in front of a shared store where another node has saved prompts."""

    def __init__(
        self,
        root: Path,
        *,
        kv: dict[str, Any] | None = None,
        ec: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """`more`: of the settings of the tiers."""
        self.index = f"sqlite://{root / 'index.db'}"
        self.shared = f"file://{root / 'slow'}"
        tiers = {"fast": f"file://{root / 'fast'}", "slow": self.shared, "fast_capacity": "64MiB", **more}
        kv = {"match_deadline_s": 60.0, **(kv or {})}
        self.store = open_store({"payloads": tiers, "index": self.index, "kv": kv, "ec": ec or {}})
        self.space = open_space(self.store)
        self.plan, tier = Plan(), self.store.backends.tier
        assert tier is not None
        self.slow = Watched(FaultyPayloads(tier._slow, self.plan))
        tier._slow = tier._fetcher._slow = self.slow
        self.tier = tier
        # Whatever opens a folder first compares it with its ledger, and nobody fills it meanwhile.
        tier.housekeeping()
        self.clock = Clock()

    def other(self) -> Store:
        """The same store as another node opens it."""
        return open_store({"payloads": self.shared, "index": self.index})

    def save(self, *steps: int, parts: int = 1, session: SessionId = NO_SESSION) -> int:
        """Another node saves a prompt, in segments of BLOCKS blocks. Returns the bytes of one segment."""
        with self.other() as other:
            space = open_space(other)
            hashes = chain(*steps)
            for first in range(0, len(steps), BLOCKS):
                slot, segment = slots(hashes[first : first + BLOCKS]), new_segment_id()
                for rank in range(parts):
                    space.save(
                        slot,
                        depth=first,
                        chain=chain_like(segment),
                        segment=segment,
                        created_s=1,
                        rank=rank,
                        ranks=parts,
                        session=session,
                    )
            return match(space, hashes).runs[0].record.nbytes

    def fetched(self) -> int:
        """How many payloads were fetched from the shared store, or are being fetched."""
        return sum(count for (verb, _), count in self.slow.calls.items() if verb == "read")

    def counted(self) -> tuple[int, int, int, int]:
        """Segments that were brought, used, wasted, and that failed to come."""
        counts = self.store.counters.snapshot()
        brought, used, wasted, failed = (counts[f"prefetch_segments{{{one}}}"] for one in OUTCOMES)
        return brought, used, wasted, failed

    def close(self) -> None:
        """Lets what is held up go, and closes the store."""
        self.slow.before = lambda verb, name: None
        self.store.close()

    def copies(self) -> int:
        """How many payloads are in the folder."""
        return self.tier.usage().payloads


class Gate:
    """Holds reads of the shared store up until it is opened."""

    def __init__(self, node: Node) -> None:
        self.waiting = 0
        self._open = threading.Event()
        self._lock = threading.Lock()
        node.slow.before = self._wait

    def _wait(self, verb: str, _: str) -> None:
        if verb == "read":
            with self._lock:
                self.waiting += 1
            assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()
