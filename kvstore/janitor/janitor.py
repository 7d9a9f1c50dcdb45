"""The janitor: keeps a store in bounds and in order, round after round.

A round, each step safe to be cut off anywhere and to be done by two at once:
    evict       down to the quotas, and what is too old          every round
    drain       what was invalidated, into the trash             every round
    reap        delete payloads whose grace has passed           every round
                and evidence that is kept no longer              once an hour
    sweep       drop entries that point at nothing               every round; less often where there are none
    cool        halve what is counted for the hottest prefixes   once an hour
    reconcile   count what there is, correct the accounts        every janitor.reconcile_s; at once where the
                                                                 index holds what makes no sense
    scrub       read and verify payloads (kvstore.janitor.scrub)   some every round
    erase       forget namespaces that are empty and unused      every round

A fleet runs one. Two at once do no harm: they read payloads twice, and halve use counts twice as often.
While it works it says so among the quotas, and engines leave all but eviction to it.

A step that fails is counted, and the others go on. Payloads that no record names are for `fsck` to find.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.index.maintenance import Account, FullIndex
from kvstore.janitor.log import Logbook
from kvstore.janitor.reports import STEPS, JanitorState, Step
from kvstore.janitor.scrub import Scrub
from kvstore.keys import NamespaceId
from kvstore.metrics import Counters
from kvstore.payloads.evidence import Evidence
from kvstore.payloads.port import PayloadStore
from kvstore.store.housekeeping import Housekeeping
from kvstore.store.rounds import AT_WORK, AT_WORK_S
from schemas.settings import Settings

log = logging.getLogger(__name__)

#: Longest time in one step, in seconds. The rest of it goes on in the next round, so that no other step waits
#: for long.
_STEP_S = 30.0
#: And with what has become too old.
_AGE_S = 10.0
_COOL_S = 3600.0
_TRIM_S = 3600.0
#: Seconds after which a step that comes at long intervals is tried again if it failed.
_RETRY_S = 60.0
#: Failures in a row after which a step leaves the other namespaces alone: the cause isn't a single namespace.
_PATIENCE = 3
#: Sweeps of a namespace in one round, and the most rounds between two where there is nothing to sweep.
_SWEEPS = 16
_SWEEP_REST = 16
#: What one call removes of a namespace that is forgotten.
_ERASE_STEP = 4096


class _Stopped(Exception):
    """The janitor is to stop."""


@dataclass
class _Turn:
    """Work that is done once in `every_s` for each namespace."""

    every_s: float
    #: The earliest time at which there may be something to do, by the monotonic clock.
    next_s: float = float("-inf")
    #: Namespaces that are left of the turn; None if no turn has begun.
    left: list[NamespaceId] | None = None
    #: When the turn began, by the monotonic clock.
    began_s: float = float("-inf")


class Janitor:
    """Works in rounds. `run` and `round` are for one thread, `state` is for any."""

    def __init__(
        self,
        index: FullIndex,
        payloads: PayloadStore,
        evidence: Evidence,
        settings: Settings,
        *,
        keyring: Keyring = NO_KEYS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._payloads = payloads
        self._evidence = evidence
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._stop = threading.Event()
        self._book = Logbook(clock)
        self._scrubbing = Scrub(
            index,
            payloads,
            settings,
            keyring=keyring,
            proceed=self._proceed,
            clock=clock,
            monotonic=monotonic,
        )
        #: The earliest time at which evidence is trimmed, by the monotonic clock.
        self._trim_at = float("-inf")
        self._undeleted: list[KVStoreError] = []
        self._housekeeping = Housekeeping(
            index,
            payloads,
            settings,
            Counters(),
            clock,
            proceed=self._proceed,
            failed=self._undeleted.append,
        )
        self._steps: dict[Step, Callable[[], None]] = {
            "evict": self._evict,
            "drain": self._drain,
            "reap": self._reap,
            "sweep": self._sweep,
            "cool": self._cool,
            "reconcile": self._reconcile,
            "scrub": self._scrub,
            "erase": self._erase,
        }
        #: Not at once, or a janitor that is started again and again would leave no counts.
        self._cooling = _Turn(_COOL_S, monotonic() + _COOL_S)
        self._reconciling = _Turn(settings.janitor.reconcile_s)
        #: The namespaces' accounts as read in this round, and when the present step is to end.
        self._accounts: list[Account] | None = None
        self._until = 0.0
        #: When this janitor last said that it works, by the monotonic clock, and with which number.
        self._said_s = float("-inf")
        self._said: int | None = None
        #: Namespaces in which something was met that makes no sense, since they were reconciled last.
        self._damaged: set[NamespaceId] = set()
        #: For how many more rounds each namespace is not swept, and how many that was to begin with.
        self._rests: dict[NamespaceId, tuple[int, int]] = {}

    def run(self, stop: threading.Event) -> None:
        """Does round after round until `stop` is set. Never raises."""
        self._stop = stop
        interval_s = self._settings.janitor.interval_s
        due = float("-inf")
        while not stop.is_set():
            began = self._monotonic()
            try:
                if began >= due:
                    due = began + interval_s
                    self.round()
                else:
                    self._say()
            except Exception:
                # A janitor that has ended is worse than one whose round has failed.
                log.exception("the janitor's round failed unexpectedly")
            stop.wait(min(interval_s, AT_WORK_S / 4))
        with suppress(KVStoreError):
            # Another number is another janitor's, which works on.
            if self._said is not None and self._index.quotas().get(AT_WORK) == self._said:
                self._index.set_quota(AT_WORK, None)

    def round(self) -> None:
        """Does one round. Raises none of the store's errors: failures are in the state."""
        began = self._monotonic()
        self._accounts = None
        with suppress(_Stopped):
            for step in STEPS:
                self._proceed()
                # If it is the index that failed, the other steps can't be done either.
                if not self._do(step) and not self._answers():
                    break
        self._book.round_ended(self._monotonic() - began)

    def state(self) -> JanitorState:
        """Returns what this janitor is doing and has done. Does no I/O."""
        return self._book.state(self._scrubbing.state)

    def _proceed(self) -> None:
        """Comes between two batches. Raises _Stopped."""
        if self._stop.is_set():
            raise _Stopped
        if self._monotonic() >= self._said_s + AT_WORK_S / 4:
            self._say()

    def _say(self) -> None:
        """Says that a janitor works. An index that is full takes no word of it: then engines help."""
        self._said_s = self._monotonic()
        self._said = int(self._clock())
        with suppress(KVStoreError):
            self._index.set_quota(AT_WORK, self._said)

    def _answers(self) -> bool:
        try:
            self._index.ping()
        except KVStoreError:
            return False
        return True

    # -- a step --------------------------------------------------------------------------------------------

    def _do(self, step: Step) -> bool:
        """Does one step if it is due; returns False if it failed. Raises _Stopped."""
        if not self._is_due(step):
            return True
        began = self._monotonic()
        self._until = began + _STEP_S
        self._book.begin(step)
        try:
            self._steps[step]()
        except _Stopped:
            raise
        except KVStoreError as exc:
            self._book.failed(step, str(exc))
        except Exception as exc:
            log.exception("janitor: %s failed unexpectedly", step)
            self._book.failed(step, repr(exc))
        finally:
            failed = self._book.end(step, self._monotonic() - began)
        return not failed

    def _is_due(self, step: Step) -> bool:
        if step == "scrub":
            return self._settings.janitor.scrub_percent > 0
        now = self._monotonic()
        if step == "cool":
            return now >= self._cooling.next_s
        return step != "reconcile" or bool(self._damaged) or now >= self._reconciling.next_s

    def _known(self) -> list[Account]:
        """Returns all namespaces that this round can reach; each round begins with another one."""
        if self._accounts is None:
            found, _ = self._index.reachable()
            turn = self._book.rounds % len(found) if found else 0
            self._accounts = found[turn:] + found[:turn]
        return self._accounts

    def _each(
        self, step: Step, names: list[NamespaceId], work: Callable[[NamespaceId], None]
    ) -> list[NamespaceId]:
        """Calls `work` for each namespace and counts the failures. Returns the namespaces that are left."""
        left: list[NamespaceId] = []
        in_a_row = 0
        for number, name in enumerate(names):
            self._proceed()
            if in_a_row == _PATIENCE or self._monotonic() >= self._until:
                # The failed ones come last, or three of them would keep the others waiting for good.
                return names[number:] + left
            try:
                work(name)
                in_a_row = 0
            except DamagedIndex as exc:
                # That is this namespace's own trouble.
                self._damage(step, name, str(exc))
                left.append(name)
            except KVStoreError as exc:
                self._book.failed(step, str(exc), namespace=name)
                left.append(name)
                in_a_row += 1
        return left

    def _damage(self, step: Step, namespace: NamespaceId, problem: str) -> None:
        self._book.failed(step, problem, namespace=namespace)
        self._damaged.add(namespace)

    def _in_turn(self, step: Step, turn: _Turn, work: Callable[[NamespaceId], None]) -> None:
        """Goes on with a turn, or begins one."""
        now = self._monotonic()
        turn.next_s = now + min(_RETRY_S, turn.every_s)
        if turn.left is None:
            turn.left, turn.began_s = [account.namespace for account in self._known()], now
        elif now >= turn.began_s + turn.every_s:
            # A namespace that fails for good must not end the turns of all others.
            left = set(turn.left)
            turn.left += [account.namespace for account in self._known() if account.namespace not in left]
            turn.began_s = now
        turn.left = self._each(step, turn.left, work)
        if not turn.left:
            turn.left, turn.next_s = None, now + turn.every_s
        elif not self._book.is_failing(step):
            turn.next_s = now

    # -- the steps -----------------------------------------------------------------------------------------

    def _evict(self) -> None:
        try:
            evicted, _ = self._housekeeping.evict()
            self._book.did("evict", evicted)
        finally:
            # In its own time: quotas that take long, or fail, lift no time to live.
            until = self._monotonic() + _AGE_S
            self._book.did("evict", self._housekeeping.age_out(lambda: self._monotonic() < until))
        for name, problem in self._housekeeping.damaged.items():
            self._damage("evict", name, problem)
        if self._housekeeping.unreachable is not None:
            raise self._housekeeping.unreachable

    def _drain(self) -> None:
        names = [account.namespace for account in self._known() if account.bygone]
        self._each("drain", names, lambda name: self._book.did("drain", self._housekeeping.drain(name)))

    def _reap(self) -> None:
        # These are the accounts from before the drain: what it has put into the trash just now is not due
        # yet.
        names = [account.namespace for account in self._known() if account.trashed]
        self._each("reap", names, self._reap_one)
        if self._monotonic() >= self._trim_at:
            self._trim_evidence()

    def _trim_evidence(self) -> None:
        self._trim_at = self._monotonic() + _RETRY_S
        for _ in self._evidence.trim(self._payloads, self._clock()):
            self._book.did("reap", 1)
            self._proceed()
            if self._monotonic() >= self._until:
                return
        self._trim_at = self._monotonic() + _TRIM_S

    def _reap_one(self, namespace: NamespaceId) -> None:
        while self._monotonic() < self._until:
            self._undeleted.clear()
            deleted = self._housekeeping.reap(namespace)
            self._book.did("reap", deleted)
            if self._undeleted:
                raise self._undeleted[-1]
            if not deleted:
                return

    def _sweep(self) -> None:
        names = [account.namespace for account in self._known()]
        self._rests = {name: self._rests.get(name, (0, 0)) for name in names}
        self._each("sweep", names, self._sweep_one)

    def _sweep_one(self, namespace: NamespaceId) -> None:
        left, rest = self._rests[namespace]
        if left:
            self._rests[namespace] = (left - 1, rest)
            return
        dropped = 0
        for _ in range(_SWEEPS):
            step = self._housekeeping.sweep(namespace)
            self._book.did("sweep", step)
            dropped += step
            if not step or self._monotonic() >= self._until:
                break
            self._proceed()
        rest = 0 if dropped else min(_SWEEP_REST, 2 * rest + 1)
        self._rests[namespace] = (rest, rest)

    def _cool(self) -> None:
        def work(namespace: NamespaceId) -> None:
            self._index.cool(namespace)
            self._book.did("cool", 1)

        self._in_turn("cool", self._cooling, work)

    def _reconcile(self) -> None:
        damaged, self._damaged = sorted(self._damaged), set()
        self._each("reconcile", damaged, self._reconcile_one)
        if self._monotonic() >= self._reconciling.next_s:
            self._in_turn("reconcile", self._reconciling, self._reconcile_one)

    def _reconcile_one(self, namespace: NamespaceId) -> None:
        found = self._index.reconcile(namespace)
        wrong = []
        if found.counted is not None and found.counted != found.recorded:
            wrong.append(f"the accounts said {found.recorded}, there was {found.counted}")
        if found.replaced:
            wrong.append(f"it was damaged: {', '.join(found.replaced)}")
        if found.mended:
            wrong.append(f"{found.mended} segments were in no order of eviction")
        if wrong:
            self._book.did("reconcile", 1)
            self._book.fault("reconcile", "; ".join(wrong) + ": corrected", namespace=namespace)

    def _scrub(self) -> None:
        until = min(self._until, self._monotonic() + self._settings.janitor.interval_s)
        before = self._scrubbing.state.payloads
        try:
            for bad in self._scrubbing.round(self._known(), until=until):
                self._book.fault("scrub", bad.problem, namespace=bad.namespace, segment=bad.segment.hex())
        finally:
            self._book.did("scrub", self._scrubbing.state.payloads - before)

    def _erase(self) -> None:
        before_s = self._clock() - self._settings.janitor.forget_after_s
        names = [
            account.namespace
            for account in self._known()
            if account.seen_s < before_s and not (account.usage.segments or account.trashed or account.bygone)
        ]
        self._each("erase", names, self._erase_one)

    def _erase_one(self, namespace: NamespaceId) -> None:
        while self._monotonic() < self._until:
            erased = self._index.erase(namespace, _ERASE_STEP)
            if erased != "more":
                self._book.did("erase", erased == "erased")
                return
            self._proceed()
