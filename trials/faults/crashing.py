"""A verb is killed at every step of its work, each time in a store of its own, and others go on with that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.index.contract import QUARTER_S
from tests.store.ground import CHAINS, NEW, Ground
from trials.faults.killing import INCOMPLETE_S, asked, killed, steps_of
from trials.faults.row import Result
from trials.faults.verbs import DUE_S, Verb

#: `place(number, folder)`: the settings of an empty store, another one for each number.
Place = Callable[[int, Path], dict[str, Any]]
#: How many leaks a remark names.
_NAMED = 5


def crash(
    verb: Verb, folder: Path, place: Place, *, every: int = 1, most: int = 0, of_buckets: bool = False
) -> Result:
    """Kills the verb at every step, at one in so many, at about `most`, or at each that changes a bucket.

    What could be matched before and can be after a verb that is over can be in between. All of what is
    matched is loaded and compared: by a process that comes at once, when the verb was done again, and when a
    janitor and fsck have tidied up.
    """
    result = Result()
    # The beginning of a quarter: a save that takes seconds still counts as one of that quarter.
    started = int(time.time() // QUARTER_S * QUARTER_S) - 7200

    def prepare(number: int) -> tuple[Path, Ground]:
        own = folder / str(number)
        own.mkdir()
        made = Ground(place(number, own), started)
        asked(own, made.fill)
        asked(own, partial(verb.prepare, made))
        return own, made

    # What it comes to if nobody is killed, and how many steps it takes.
    own, whole = prepare(0)
    before = asked(own, whole.look)["blocks"]
    time.sleep(verb.wait_s)
    count = asked(own, partial(steps_of, partial(verb.work, whole), of_buckets=of_buckets))
    asked(own, partial(verb.meanwhile, whole))
    after = asked(own, whole.look)["blocks"]

    steps = range(0, count, max(every, count // most if most else 1))
    grounds = [prepare(at + 1) for at in steps]
    time.sleep(verb.wait_s)
    for at, (own, made) in zip(steps, grounds, strict=True):
        result.faults += killed(partial(verb.work, made), at, of_buckets=of_buckets)
        asked(own, partial(verb.meanwhile, made))
        _judge(result, asked(own, made.look), before, after)
    # Until claims and incomplete commits have expired, and the grace times are over.
    time.sleep(max(INCOMPLETE_S, DUE_S))
    for own, made in grounds:
        asked(own, partial(verb.work, replace(made, attempt=1)))
        _judge(result, asked(own, made.look), after, after)
        asked(own, made.settle)
    time.sleep(DUE_S)
    leaks: list[str] = []
    for at, (own, made) in zip(steps, grounds, strict=True):
        asked(own, made.settle)
        _judge(result, asked(own, made.look), after, after)
        found = asked(own, made.leaks) + asked(own, made.erase)
        leaks += [f"step {at}: {one}" for one in found]
    result.leaked = len(leaks)
    result.remark = "; ".join([f"killed at {result.faults} of {count} steps", *leaks[:_NAMED]])
    return result


def _judge(result: Result, seen: dict[str, Any], before: dict[str, int], after: dict[str, int]) -> None:
    result.requests += len(CHAINS + NEW)
    result.wrong_tokens += seen["wrong"]
    result.lost_blocks += seen["unreadable"]
    for name, blocks in seen["blocks"].items():
        least, most = sorted((before[name], after[name]))
        result.lost_blocks += max(0, least - blocks)
        # More than there ever was of it: a promise that nobody can keep.
        result.wrong_tokens += max(0, blocks - most)
