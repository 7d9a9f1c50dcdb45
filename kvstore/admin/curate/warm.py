"""warm: brings segments into this node's fast tier before requests ask for them.

`warm_prompt` and `warm_session` are for programs, such as a gateway beside an engine that knows which prompt
comes next, or which conversation goes on: they need neither vLLM nor torch.

    from kvstore.admin.curate.prompts import StoredPrompt
    from kvstore.admin.curate.warm import warm_prompt, warm_session

    report = warm_prompt({"settings": "/etc/kvstore.yaml"}, StoredPrompt(tokens=ids))
    print(report.warm.segments, [one.stored for one in report.prompts])
    warm_session({"settings": "/etc/kvstore.yaml"}, "user-81/trip-planner")
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.admin.backends import Cache
from kvstore.admin.counting import AmountSum, LeftOut
from kvstore.admin.curate.plan import MovePlan, Planned
from kvstore.admin.curate.prompts import StoredPrompt, plan_prompt
from kvstore.admin.curate.reports import PromptFound, SessionLine, WarmReport
from kvstore.admin.curate.sessions import plan_session
from kvstore.admin.fast_tier import FastTier, tiers_of
from kvstore.admin.operators import among
from kvstore.admin.patience import Patience
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.reports import Ended
from kvstore.build import load_settings
from kvstore.errors import KVStoreError, TransientError
from kvstore.index.maintenance import Listing
from kvstore.keys import payload_name
from kvstore.threads.each import for_each
from schemas.base import redact
from schemas.settings import Settings

#: Share of the tier's capacity that is filled: engines go on saving meanwhile, and what they save must not
#: push out what was fetched a moment ago.
_FILL_TO = 0.95


def warming_bytes(settings: Settings, max_bytes: int | None) -> int:
    """Returns how many bytes a plan to warm may hold. Raises ConfigError without tiers."""
    room = int(tiers_of(settings).fast_capacity * _FILL_TO)
    return room if max_bytes is None else min(room, max_bytes)


def warm(
    cache: Cache,
    plan: MovePlan,
    tier: FastTier,
    *,
    jobs: int = 4,
    dry_run: bool = False,
    progress: ProgressListener | None = None,
    prompts: Sequence[PromptFound] = (),
    sessions: Sequence[SessionLine] = (),
    recorded: bool = True,
) -> WarmReport:
    """Brings the planned segments to the fast tier, `jobs` at a time.

    `prompts` or `sessions` is what the plan was made from, for the report. `recorded`: among the operations
    of people. Ctrl-C and a failing store end it, and the report says so; what was fetched stays. Raises
    ConfigError without tiers, and what the tier raises when it is asked for its usage.
    """
    tiers = tiers_of(cache.settings)
    run = _Warm(cache, plan, tier, progress or Silent())
    before, began = tier.usage().nbytes, time.monotonic()
    if not dry_run:
        if recorded:
            spaces = among(plan.namespaces)
            cache.record("warm", f"{plan.amount.segments} segments of {spaces} into {redact(tiers.fast)}")
        run.all(jobs)
    return WarmReport(
        dry_run=dry_run,
        ended=run.ended,
        problem=run.problem,
        fast=redact(tiers.fast),
        capacity_bytes=tiers.fast_capacity,
        used_before_bytes=before,
        used_bytes=tier.usage().nbytes,
        namespaces=tuple(plan.namespaces),
        prompts=tuple(prompts),
        sessions=tuple(sessions),
        planned=plan.amount,
        beyond=plan.beyond,
        warm=run.done.amount,
        left_out=run.left.count,
        left=tuple(run.left.named),
        seconds=time.monotonic() - began,
    )


def warm_prompt(
    settings: Settings | Mapping[str, Any],
    prompt: StoredPrompt,
    namespaces: Sequence[str] = (),
    *,
    max_bytes: int | None = None,
    jobs: int = 4,
    dry_run: bool = False,
) -> WarmReport:
    """Brings what an engine would load of a prompt to this node's fast tier, `jobs` segments at a time.

    `settings` are the engine's, or `{"settings": FILE}`; the process must be able to write to the tier's
    folder. `namespaces` are starts of ids; by default it is looked for in all whose blocks the prompt names.
    `max_bytes` bounds what is fetched, heads first. Takes as long as the fetches, on threads that end with
    the call; any thread may call. What could not be fetched is in the report (`ended`, `problem`, `left`).
    Unlike `cache-admin warm` it leaves no line among the operations.

    Raises ConfigError for settings without tiers, or if the names of the prompt's blocks can't be computed,
    UnknownName for a namespace that isn't there, and what the index raises.
    """
    made = settings if isinstance(settings, Settings) else load_settings(settings)
    with Cache(made) as cache:
        plan, found = plan_prompt(cache, prompt, namespaces, max_bytes=warming_bytes(made, max_bytes))
        return warm(cache, plan, cache.fast, jobs=jobs, dry_run=dry_run, prompts=found, recorded=False)


def warm_session(
    settings: Settings | Mapping[str, Any],
    session: str,
    namespaces: Sequence[str] = (),
    *,
    salt: str = "",
    max_bytes: int | None = None,
    jobs: int = 4,
    dry_run: bool = False,
) -> WarmReport:
    """Brings what only a session has used to this node's fast tier; otherwise as `warm_prompt`.

    `session` is the name that its client gives it (vLLM's `session_id`), or, without a `salt`, its id or the
    start of it; `salt` is its requests' `cache_salt`. What it shares with others, such as a system prompt, is
    not known to be its.

    Raises ConfigError for settings without tiers, UnknownName for a session that no index remembers and for a
    namespace that isn't there, and what the index raises.
    """
    made = settings if isinstance(settings, Settings) else load_settings(settings)
    with Cache(made) as cache:
        most = warming_bytes(made, max_bytes)
        plan, found = plan_session(cache, session, salt=salt, prefixes=namespaces, max_bytes=most)
        return warm(cache, plan, cache.fast, jobs=jobs, dry_run=dry_run, sessions=found, recorded=False)


@dataclass
class _Warm:
    """A run of `warm`. `_lock` guards the counts and the progress."""

    cache: Cache
    plan: MovePlan
    tier: FastTier
    progress: ProgressListener
    done: AmountSum = field(default_factory=AmountSum)
    left: LeftOut = field(default_factory=LeftOut)
    ended: Ended = "complete"
    problem: str = ""
    #: Segments that the tier did not take at the first attempt.
    _again: list[tuple[Planned, Listing]] = field(default_factory=list)
    _patience: Patience = field(default_factory=Patience)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def all(self, jobs: int) -> None:
        """Fetches every segment."""
        self.progress.begin("warm", self.plan.amount.stored_bytes)
        try:
            for_each(self._segment, self._there(), jobs)
            # A tier that was busy, or had no memory for so many at once, may have room for them now.
            again, self._again = self._again, []
            for_each(self._segment, again, 1)
            for entry, _ in self._again:
                self._leave(entry, "its payload is gone, or the fast tier has no room for it")
        except KeyboardInterrupt:
            self.ended, self.problem = "cancelled", "cancelled"
        except KVStoreError as exc:
            self.ended, self.problem = "failed", str(exc)

    def _there(self) -> Iterator[tuple[Planned, Listing]]:
        for entry, listing in self.plan.listings(self.cache):
            if listing is None:
                self._leave(entry, "it was evicted meanwhile")
            else:
                yield entry, listing

    def _segment(self, work: tuple[Planned, Listing]) -> None:
        entry, listing = work
        try:
            there = all(
                self.tier.fill(payload_name(entry.namespace, entry.segment, rank), part.nbytes)
                for rank, part in enumerate(listing.record.parts)
            )
        except TransientError as exc:
            self._leave(entry, str(exc))
            self._patience.unanswered(exc)
            return
        except KVStoreError as exc:
            self._leave(entry, str(exc))
            raise
        with self._lock:
            if not there:
                self._again.append(work)
                return
            self._patience.answered()
            self.done.add(listing.record.slots, listing.record.nbytes)
            self.progress.advance(listing.record.nbytes)

    def _leave(self, entry: Planned, reason: str) -> None:
        with self._lock:
            self.left.add(entry.namespace, entry.segment, reason)
