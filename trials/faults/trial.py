"""What a row with an engine does: requests before, during and after a fault, and what is counted of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.engine import EngineDied, EngineError
from tests.waiting import PATIENCE_S
from trials.faults.bed import (
    FRESH,
    PROBE,
    SETTINGS,
    SPARED,
    TOKENS,
    UNTOUCHED,
    VICTIMS,
    Answer,
    Bed,
    Prompt,
    the_bed,
)
from trials.faults.row import Result

#: A fault: made on entry, gone on exit. It gets the bed and the names of the payloads that it may damage, and
#: gives what tells how often it has happened until then.
Fault = Callable[[Bed, list[str]], AbstractContextManager[Callable[[], int]]]

#: How often a row makes its fault, and asks before and after it.
ROUNDS = 2
#: Seconds that a request may take longer than a store promises, besides the longest that such a request has
#: taken without one in the same row: a machine that does other things too wakes a thread late.
ALLOWANCE_S = 0.25
#: How often what was committed is asked for before it counts as lost: an index may be too slow once.
TRIES = 3
#: How long a prompt may take to be stored again: claims of saves that failed expire first.
AGAIN_S = 30.0
#: What an engine may hold more of than before: a thread's first connections.
_SPARE = {"files": 24}


@dataclass(frozen=True)
class Promise:
    """How long a request may wait for the store, in seconds: one of text, and one with an image besides."""

    text_s: float
    image_s: float

    def of(self, one: Prompt) -> float:
        """For this request."""
        return self.image_s if "images" in one else self.text_s


_MATCH_S, _LOAD_S = SETTINGS["kv"]["match_deadline_s"], SETTINGS["kv"]["load_deadline_s"]
_FETCH_S = SETTINGS["ec"]["fetch_deadline_s"]
#: Nobody waits: the store says at once that it can't.
AT_ONCE = Promise(0.0, 0.0)
#: An index that doesn't answer: a match has its deadline, and so has an item.
MATCH = Promise(_MATCH_S, _MATCH_S + _FETCH_S)
#: A bucket that answers with an error that may pass: it is asked once more, after a pause.
AGAIN = Promise(SETTINGS["s3"]["backoff_s"], 2 * SETTINGS["s3"]["backoff_s"])
#: A bucket that asks for fewer requests: a call waits for its turn.
TURN = Promise(SETTINGS["s3"]["max_backoff_s"], 2 * SETTINGS["s3"]["max_backoff_s"])
#: Payloads that don't come: a load has its deadline, and so has an item.
LOAD = Promise(_LOAD_S, _LOAD_S + _FETCH_S)


#: What misses and failed saves are counted as when something does not answer.
DOWN = ("unavailable", "deadline", "breaker_open")


@dataclass
class Trial:
    """One row's requests and counts."""

    bed: Bed
    promise: Promise
    result: Result = field(default_factory=Result)
    counted: Counter[str] = field(default_factory=Counter)
    #: Tokens that were asked for and that the store gave, while the fault was there.
    asked: int = 0
    served: int = 0
    recovered_s: float = 0.0
    #: Every request while the fault was there has an entry: its kind, what was added, what is promised.
    _waits: list[tuple[str, float, float]] = field(default_factory=list)
    #: The longest that one of a kind has taken without a store, in this row.
    _alone_s: dict[str, float] = field(default_factory=dict)

    def ask(self, one: Prompt, salt: str) -> Answer:
        """A request of the row: counted, and held against the right tokens."""
        answer = self.bed.ask(one, salt)
        self.result.requests += 1
        self.result.wrong_tokens += answer.result.token_ids != self.bed.right(one)
        return answer

    def ask_timed(self, one: Prompt, salt: str) -> None:
        """A request while the fault is there: what it takes beyond the same without a store is bounded."""
        answer, alone = self.ask(one, salt), self.bed.ask_alone(one)
        self.asked += answer.result.prompt_tokens
        self.served += answer.served
        kind = "an image" if "images" in one else "text"
        self.compare(kind, answer.seconds, alone.seconds, self.promise.of(one))

    def compare(self, kind: str, seconds: float, alone_s: float, promised_s: float) -> None:
        """Notes a request that was made while the fault was there, beside the same without a store."""
        self._waits.append((kind, max(0.0, seconds - alone_s), promised_s))
        self._alone_s[kind] = max(alone_s, self._alone_s.get(kind, 0.0))

    def judge(self) -> str:
        """Puts the request that came nearest to its bound into the result, and returns its kind."""
        waits = [
            (kind, added, promised + self._alone_s[kind] + ALLOWANCE_S)
            for kind, added, promised in self._waits
        ]
        kind, self.result.added_s, self.result.bound_s = max(waits, key=lambda one: one[1] / one[2])
        return kind

    def store(self, prompts: list[Prompt], salt: str) -> dict[int, int]:
        """Has them stored, and returns how many tokens of each the store gives: by number."""
        for one in prompts:
            self.ask(one, salt)
        return {number: self._stored(one, salt) for number, one in enumerate(prompts)}

    def _stored(self, one: Prompt, salt: str) -> int:
        """Asks until a request is served as far as its blocks go."""
        most = len(one.get("prompt_token_ids", ())) or 192
        end = time.monotonic() + AGAIN_S
        while (answer := self.ask(one, salt)).served < most // 32 * 32:
            if time.monotonic() > end:
                return 0
            self.bed.engine.idle(0.1)
        return answer.served

    def recover(self, salt: str) -> None:
        """Waits until the store serves again what it is given."""
        began, number = time.monotonic(), 0
        while True:
            number += 1
            self.ask(PROBE, f"{salt} {number}")
            self.bed.engine.idle(0.1)
            if self.ask(PROBE, f"{salt} {number}").served:
                break
            assert time.monotonic() < began + PATIENCE_S, "the store is not back"
        self.recovered_s = max(self.recovered_s, time.monotonic() - began)

    def lost(self, one: Prompt, salt: str, tokens: int) -> int:
        """Blocks of what was committed that are not served any more."""
        best = 0
        for _ in range(TRIES):
            best = max(best, self.ask(one, salt).served)
            if best >= tokens:
                return 0
            self.bed.engine.idle(0.2)
        return (tokens - best + 31) // 32


def run_on(
    bed: Bed,
    fault: Fault,
    promise: Promise,
    *,
    met: tuple[str, ...] = (),
    damages: bool = False,
    repair: Callable[[], None] | None = None,
    first: bool = False,
) -> Result:
    """Rounds of a fault on a bed.

    `met`: reasons or counters of which the engine must have counted one, or the fault was not there.
    `damages`: the fault hits what is stored of VICTIMS, which may be gone afterwards. `repair`: what an
    operator does then. `first`: the fault can't be made while requests are under way, so it is there before
    they come.
    """
    trial = Trial(bed, promise)
    try:
        _rounds(trial, partial(_suffer, trial, fault, first), met, damages, repair)
    except (EngineDied, EngineError) as exc:
        trial.result.engines_lost += 1
        trial.result.remark = str(exc).splitlines()[0]
        if isinstance(exc, EngineDied):
            bed.close_cleanly()
    return trial.result


def on(make: Any, fault: Fault, promise: Promise, **more: Any) -> Callable[[Path], Result]:
    """A row's run: this fault on this kind of bed."""
    return lambda place: run_on(the_bed(make.__name__, make), fault, promise, **more)


def rebuilt(make: Any, fault: Fault, promise: Promise, **more: Any) -> Callable[[Path], Result]:
    """The same, and `cache-admin rebuild --apply` when the fault is over."""

    def run(place: Path) -> Result:
        one = the_bed(make.__name__, make)
        return run_on(one, fault, promise, repair=one.rebuild, **more)

    return run


def mended(make: Any, fault: Fault, promise: Promise, **more: Any) -> Callable[[Path], Result]:
    """The same, and `cache-admin fsck` besides."""

    def run(place: Path) -> Result:
        one = the_bed(make.__name__, make)
        return run_on(one, fault, promise, repair=one.mend, **more)

    return run


def _rounds(
    trial: Trial,
    suffer: Callable[[list[str], str], None],
    met: tuple[str, ...],
    damages: bool,
    repair: Callable[[], None] | None,
) -> None:
    bed, result = trial.bed, trial.result
    salt = f"{time.monotonic()}"
    if not bed.begun:
        trial.store([*VICTIMS, *SPARED], f"{salt} first")
        bed.begun = True
    before = bed.held()
    for number in range(ROUNDS):
        name = f"{salt} {number}"
        here = bed.names()
        victims = trial.store(VICTIMS, name)
        targets = sorted(bed.names() - here)
        spared = trial.store([*SPARED, *UNTOUCHED], name)
        assert all(victims.values()) and all(spared.values()), "the store was not well before the fault"
        counted = bed.counters()
        suffer(targets, name)
        counted = bed.counters() - counted
        trial.counted += counted
        trial.recover(f"{name} probe")
        if repair is not None:
            repair()
        if not damages:
            result.lost_blocks += _lost(trial, VICTIMS, name, victims)
        result.lost_blocks += _lost(trial, [*SPARED, *UNTOUCHED], name, spared)
        # What was damaged, or came during the fault, is stored now or a little later.
        for one in (*VICTIMS, *FRESH) if damages else FRESH:
            result.lost_blocks += not trial._stored(one, name)
    reasons = sum(count for key, count in trial.counted.items() if key in met or _reason(key) in met)
    if met and not reasons:
        result.faults = 0
    if damages:
        # What was damaged and nobody has asked for since is left to a scrub.
        bed.mend()
    after = bed.held()
    left = {
        name: (before[name], now) for name, now in after.items() if now > before[name] + _SPARE.get(name, 0)
    }
    strays = bed.strays()
    result.leaked += sum(now - was for was, now in left.values()) + strays
    result.remark = _remark(trial, left, strays)


def _suffer(trial: Trial, fault: Fault, first: bool, targets: list[str], salt: str) -> None:
    """The fault begins while requests are under way, and ends after some more."""
    bed, known = trial.bed, [*VICTIMS, *SPARED]
    alone_s = bed.batch_alone(known)
    for one in known:
        bed.right(one)
    bed.forget(bed.engine)
    batch = [{**one, "cache_salt": salt} for one in known]
    with ThreadPoolExecutor(1) as waiter, ExitStack() as stack:
        made = stack.enter_context(fault(bed, targets)) if first else None
        began = time.monotonic()
        bed.engine.start_generate(batch, max_tokens=TOKENS)
        # Making the fault may take longer than the batch does, and nobody waits for that.
        ending = waiter.submit(lambda: (bed.engine.finish_generate(), time.monotonic()))
        made = made or stack.enter_context(fault(bed, targets))
        results, ended = ending.result()
        trial.compare("all at once", ended - began, alone_s, max(map(trial.promise.of, known)))
        trial.result.requests += len(known)
        for one, got in zip(known, results, strict=True):
            trial.result.wrong_tokens += got.token_ids != bed.right(one)
        for one in (*known, *FRESH, *known):
            trial.ask_timed(one, salt)
        trial.result.faults += made()


def _lost(trial: Trial, prompts: list[Prompt], salt: str, tokens: dict[int, int]) -> int:
    return sum(trial.lost(one, salt, tokens[number]) for number, one in enumerate(prompts))


def _reason(counter: str) -> str:
    """Of `miss_blocks{deadline}` or `save_failures{capacity}`; "" of any other counter."""
    name, _, reason = counter.partition("{")
    return reason.rstrip("}") if name in ("miss_blocks", "save_failures") else ""


def _remark(trial: Trial, left: dict[str, tuple[int, int]], strays: int) -> str:
    reasons: Counter[str] = Counter()
    for name, count in trial.counted.items():
        if (reason := _reason(name)) and reason != "absent":
            reasons[reason] += count
    said = [f"{trial.served / max(1, trial.asked):.0%} of the tokens served meanwhile"]
    if reasons:
        said.append("blocks not served or saved: " + ", ".join(f"{n} {r}" for r, n in reasons.most_common(3)))
    said.append(f"longest for {trial.judge()}")
    said.append(f"well {trial.recovered_s:.1f} s later")
    if left or strays:
        said.append(f"left: {left or ''} {strays} strays")
    return "; ".join(said)
