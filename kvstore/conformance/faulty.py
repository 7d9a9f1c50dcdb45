"""FaultyPayloads: a payload store that fails on purpose, for tests and drills.

    transient   raises TransientError instead of the call
    unanswered  makes the call, then raises TransientError: its answer was lost on the way
    permission  raises PermissionDenied instead of the call
    no_space    raises CapacityExceeded instead of the call (put)
    delay       sleeps `delay_s`, then goes on
    missing     answers that the payload isn't there (read)
    truncate    cuts the end off the stored bytes (put), or off the bytes that were read (read)
    flip        changes one byte of the stored ones (put), or of those that were read (read)

`truncate` and `flip` are silent, like a failing disk. A put never changes its caller's buffers.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvstore.errors import CapacityExceeded, PermissionDenied, TransientError
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.rules.tiers import Tier

Fault = Literal["transient", "unanswered", "permission", "no_space", "delay", "missing", "truncate", "flip"]
Verb = Literal["put", "read", "delete", "list", "ping"]

_EVERY: tuple[Verb, ...] = get_args(Verb)
#: The verbs for which a fault makes sense; a rule that names no verbs gets these.
_VERBS: dict[Fault, tuple[Verb, ...]] = {
    "transient": _EVERY,
    "unanswered": ("put", "read", "delete", "ping"),
    "permission": _EVERY,
    "no_space": ("put",),
    "delay": _EVERY,
    "missing": ("read",),
    "truncate": ("put", "read"),
    "flip": ("put", "read"),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Says which calls get a fault: calls of `verbs` whose payload name contains `name`.

    The first `skip` of these calls pass, then each is hit with `probability`, `times` of them at most.
    `at` is the byte that `flip` changes, and at which `truncate` cuts; by default a random one.
    """

    fault: Fault
    verbs: tuple[Verb, ...] = ()
    name: str = ""
    probability: float = 1.0
    skip: int = 0
    times: int | None = None
    delay_s: float = 0.0
    at: int | None = None

    def __post_init__(self) -> None:
        wrong = set(self.verbs) - set(_VERBS[self.fault])
        if wrong:
            raise ValueError(f"{self.fault} makes no sense for {', '.join(sorted(wrong))}")


class Plan:
    """The rules in force, and how often they hit. Equal seeds and calls give equal faults.

    `injected` counts faults by (verb, fault). A lock guards everything here: safe for any thread.
    """

    def __init__(self, *rules: Rule, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._armed = [_Armed(rule) for rule in rules]
        self.injected: Counter[tuple[Verb, Fault]] = Counter()

    def replace(self, *rules: Rule) -> None:
        """Puts these rules in force instead of the others. Without any the store is healthy."""
        with self._lock:
            self._armed = [_Armed(rule) for rule in rules]

    def draw(self, verb: Verb, names: Sequence[str]) -> Sequence[Rule]:
        """Returns the rules that hit this call, in their order."""
        with self._lock:
            hits = [armed.rule for armed in self._armed if armed.hits(verb, names, self._random)]
            self.injected.update((verb, rule.fault) for rule in hits)
            return hits

    def position(self, rule: Rule, size: int) -> int:
        """Returns which of `size` bytes a `flip` changes, or a `truncate` cuts at."""
        with self._lock:
            return self._random.randrange(size) if rule.at is None else min(rule.at, size - 1)


@dataclass(slots=True)
class _Armed:
    """A rule, how many calls it applied to, and how many it has hit."""

    rule: Rule
    seen: int = 0
    done: int = 0

    def hits(self, verb: Verb, names: Sequence[str], rng: random.Random) -> bool:
        rule = self.rule
        if verb not in (rule.verbs or _VERBS[rule.fault]) or not any(rule.name in name for name in names):
            return False
        self.seen += 1
        if self.seen <= rule.skip or (rule.times is not None and self.done >= rule.times):
            return False
        hit = rng.random() < rule.probability
        self.done += hit
        return hit


class FaultyPayloads(PayloadStore):
    """Passes calls on to `inner`, with the faults that `plan` draws for them."""

    def __init__(
        self, inner: PayloadStore, plan: Plan, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._inner = inner
        self._plan = plan
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"FaultyPayloads({self._inner!r})"

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        rules = self._before("put", [name])
        if any(rule.fault in ("truncate", "flip") for rule in rules):
            data = bytearray().join(buffers)
            for rule in rules:
                data = self._damaged(rule, data)
            buffers = [memoryview(data)]
        self._inner.put(name, buffers)
        _after("put", rules)

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        rules = self._before("read", [name])
        if any(rule.fault == "missing" for rule in rules):
            return None
        count = self._inner.read(name, offset, into, size=size)
        _after("read", rules)
        if count and any(rule.fault in ("truncate", "flip") for rule in rules):
            data = bytearray().join(into)[:count]
            for rule in rules:
                data = self._damaged(rule, data)
            _spread(data, into)
            count = len(data)
        return count

    def tier(self, name: str, nbytes: int) -> Tier:
        return self._inner.tier(name, nbytes)

    def delete(self, names: Sequence[str]) -> int:
        rules = self._before("delete", names)
        count = self._inner.delete(names)
        _after("delete", rules)
        return count

    def list(self, prefix: str = "") -> Iterator[Listed]:
        self._before("list", [prefix])
        yield from self._inner.list(prefix)

    def ping(self) -> None:
        rules = self._before("ping", [""])
        self._inner.ping()
        _after("ping", rules)

    def close(self) -> None:
        self._inner.close()

    def _before(self, verb: Verb, names: Sequence[str]) -> Sequence[Rule]:
        rules = self._plan.draw(verb, names)
        for rule in rules:
            if rule.fault == "delay":
                self._sleep(rule.delay_s)
            elif rule.fault == "transient":
                raise TransientError(f"injected: {verb} failed")
            elif rule.fault == "permission":
                raise PermissionDenied(f"injected: {verb} refused")
            elif rule.fault == "no_space":
                raise CapacityExceeded(f"injected: no space for {verb}")
        return rules

    def _damaged(self, rule: Rule, data: bytearray) -> bytearray:
        if data and rule.fault == "flip":
            # Any other value will do; this one is never the same.
            data[self._plan.position(rule, len(data))] ^= 0xFF
        elif data and rule.fault == "truncate":
            del data[self._plan.position(rule, len(data)) :]
        return data


def _after(verb: Verb, rules: Sequence[Rule]) -> None:
    if any(rule.fault == "unanswered" for rule in rules):
        raise TransientError(f"injected: the answer to {verb} was lost")


def _spread(data: bytearray, into: Sequence[memoryview]) -> None:
    rest = memoryview(data)
    for view in into:
        part, rest = rest[: view.nbytes], rest[view.nbytes :]
        if part:
            view.cast("B")[: part.nbytes] = part
