"""What the rows with an engine are run on: an engine with both connectors over a store, one without any store
beside it, and the store from another side.

The model has an image encoder, so every row is about KV blocks and encoder outputs at once. Prompts are the
same in all rows; each round of a row salts them anew, which makes other blocks and items of them, and the
same tokens.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.admin.backends import Cache
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.build import load_settings
from kvstore.keys import payload_name
from tests.e2e.engine import ROOT, Engine, Result, random_image
from tests.e2e.sharing import check_store, prompt, scheduler_counters, worker_counters
from tests.waiting import PATIENCE_S
from tools.models import build
from trials.faults import kept

#: Tokens that each request decodes.
TOKENS = 8
Prompt = dict[str, Any]

_WORDS = " ".join(f"w{number}" for number in range(40, 240))
_IMAGES = [random_image(seed) for seed in (1, 2)]
#: Stored before a fault, and hit by those that damage something.
VICTIMS: list[Prompt] = [
    prompt(320, 100),
    prompt(416, 101),
    {"prompt": f"<image> {_WORDS}", "images": [_IMAGES[0]]},
]
#: Stored before a fault as well, and spared by those.
SPARED: list[Prompt] = [prompt(384, 102), {"prompt": f"w30 <image> {_WORDS}", "images": [_IMAGES[1]]}]
#: Stored before a fault, and not asked for before it is over.
UNTOUCHED: list[Prompt] = [prompt(288, 103)]
#: Asked for the first time during the fault; the last one brings an image whose encoder output is stored.
FRESH: list[Prompt] = [prompt(352, 200), {"prompt": f"w50 w51 <image> {_WORDS}", "images": [_IMAGES[0]]}]
#: Tells whether the store works again.
PROBE = prompt(64, 300)

#: How long an engine waits for a writer of its SQLite index, in seconds.
BUSY_S = 1.0
#: What a bed's engine is given besides its URLs. Every bound of the matrix is computed from these. Those of
#: the index are the defaults; a bucket's are shorter, so that a row takes seconds.
SETTINGS: dict[str, Any] = {
    "kv": {"match_deadline_s": 0.5, "load_deadline_s": 2.0, "match_ttl_s": 2.0, "audit_every": 0},
    "ec": {"fetch_deadline_s": 1.0, "absent_ttl_s": 0.1},
    "redis": {"timeout_s": 1.0, "connect_timeout_s": 0.5},
    "sqlite": {"busy_timeout_s": BUSY_S},
    "s3": {
        "connect_timeout_s": 0.5,
        "stall_timeout_s": 1.0,
        "read_timeout_s": 2.0,
        "write_timeout_s": 2.0,
        "attempts": 2,
        "backoff_s": 0.05,
        "max_backoff_s": 0.5,
    },
    "breaker": {"failures": 3, "backoff_s": 0.2, "max_backoff_s": 1.0},
    "claim_ttl_s": 2.0,
    "grace_s": 4.0,
}


#: What the tools that look from another side may take.
PATIENT: dict[str, Any] = {
    "redis": {"timeout_s": 20.0, "connect_timeout_s": 20.0},
    "sqlite": {"busy_timeout_s": 20.0},
    "s3": {"stall_timeout_s": 20.0, "read_timeout_s": 20.0, "write_timeout_s": 20.0},
}


@dataclass(frozen=True)
class Answer:
    """A request's tokens, how many of the prompt's the store gave, and how long it took."""

    result: Result
    seconds: float

    @property
    def served(self) -> int:
        """Tokens of the prompt that the connector promised."""
        return self.result.external_tokens


@dataclass
class Bed:
    """An engine over a store, and what rows do with both. `direct` are settings that lead around proxies."""

    engine: Engine
    alone: Engine
    direct: Mapping[str, Any]
    #: The payloads' folder, or one that holds nothing where they are in a bucket.
    folder: Path
    #: Whether that is a file system of its own, which can be full and read-only.
    mounted: bool = False
    #: What stands behind the engine and can be hurt: servers and proxies, by name.
    parts: dict[str, Any] = field(default_factory=dict)
    #: Whether something was stored that rows leave alone.
    begun: bool = False
    #: The tokens of each prompt, by an engine without a store.
    _right: dict[int, list[int]] = field(default_factory=dict)

    def ask(self, one: Prompt, salt: str) -> Answer:
        """One request, from empty caches of the engine."""
        self.forget(self.engine)
        return self._timed(self.engine, one, salt)

    def ask_alone(self, one: Prompt) -> Answer:
        """The same without a store."""
        self.forget(self.alone)
        answer = self._timed(self.alone, one, "alone")
        assert self.right(one) == answer.result.token_ids, "the engine without a store disagrees with itself"
        return answer

    def right(self, one: Prompt) -> list[int]:
        """The tokens that any answer must have."""
        if id(one) not in self._right:
            self.forget(self.alone)
            [result] = self.alone.generate([one], max_tokens=TOKENS)
            self._right[id(one)] = result.token_ids
        return self._right[id(one)]

    def batch_alone(self, prompts: Sequence[Prompt]) -> float:
        """Seconds that all of them take at once, without a store."""
        self.forget(self.alone)
        began = time.monotonic()
        self.alone.generate(prompts, max_tokens=TOKENS)
        return time.monotonic() - began

    @staticmethod
    def _timed(engine: Engine, one: Prompt, salt: str) -> Answer:
        began = time.monotonic()
        [result] = engine.generate([one], max_tokens=TOKENS, cache_salt=salt)
        return Answer(result, time.monotonic() - began)

    @staticmethod
    def forget(engine: Engine) -> None:
        """Empties an engine's own caches."""
        end = time.monotonic() + PATIENCE_S
        while not engine.reset_prefix_cache():
            assert time.monotonic() < end, "blocks are in use"
            engine.idle(0.05)
        engine.reset_mm_cache()

    def counters(self) -> Counter[str]:
        """What both halves of both connectors have counted."""
        total: Counter[str] = Counter()
        for kind in ("kv", "ec"):
            total.update(worker_counters(self.engine, kind))
            total.update(scheduler_counters(self.engine, kind))
        return total

    def held(self) -> dict[str, int]:
        """What the engine holds when all is quiet, by kind."""
        source = f"__import__('tests.e2e.storm', fromlist=['x']).at_rest(served, {str(self.folder)!r})"
        return dict(self.engine.evaluate(source, within_s=5 * PATIENCE_S))

    # ---- the store from another side --------------------------------------------------------------

    @contextlib.contextmanager
    def cache(self) -> Iterator[Cache]:
        """What cache-admin works with."""
        with Cache(load_settings(self.direct, environ={}), by="faults") as cache:
            yield cache

    def names(self) -> set[str]:
        """The payloads that there are."""
        with self.cache() as cache:
            return {one.name for one in cache.payloads.list()}

    def rebuild(self) -> None:
        """As `cache-admin rebuild --apply`."""
        with self.cache() as cache:
            report = rebuild(cache, apply=True)
            assert report.ended == "complete", report.problem

    def mend(self) -> None:
        """As `cache-admin rebuild --apply` and `fsck --apply --read-data 100%`: for what nobody wrote."""
        self.rebuild()
        with self.cache() as cache:
            report = fsck(cache, apply=True, depth=Depth(percent=100))
            assert report.ended == "complete", report.problem

    def strays(self) -> int:
        """Payloads and other objects that nothing names, and that `cache-admin fsck --list --apply` leaves
        when the grace time is over and two hours seem to have passed. What the index names must be there,
        whole and right."""
        end = time.monotonic() + 5 * SETTINGS["grace_s"]
        while (left := self._collect()) and time.monotonic() < end:
            time.sleep(0.5)
        check_store(self.direct)
        return left

    def _collect(self) -> int:
        later = time.time() + 7200
        with self.cache() as cache:
            report = fsck(cache, depth=Depth(only_list=True), apply=True, clock=lambda: later)
            assert report.ended == "complete", report.problem
            assert cache.index is not None
            named = {
                payload_name(namespace, one.segment, rank)
                for namespace in cache.index.namespaces()
                for one in cache.index.segments(namespace)
                for rank in range(len(one.record.parts))
            }
            rest = fsck(cache, depth=Depth(only_list=True), clock=lambda: later).waste
            assert rest is not None
        strays = sum(kind.old.objects for kind in rest.strays if kind.kind != "foreign")
        return len(self.names() - named) + strays

    def close_cleanly(self) -> None:
        """For a bed whose engine is dead: the next row gets another one."""
        kept.let_go("bed")


@contextlib.contextmanager
def bed(
    parts: Mapping[str, Any],
    settings: Mapping[str, Any],
    direct: Mapping[str, Any],
    folder: Path,
    *,
    mounted: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Bed]:
    """A bed over these servers, with an engine of its own, in whose `environment` there is more."""
    config = merged(SETTINGS, settings)
    model = build(ROOT / ".cache" / "models", "image", 0)
    alone = kept.keep("alone", lambda: _alone(model))
    with tempfile.TemporaryDirectory(prefix="kvs-logs-") as logs:
        engine = Engine(model, kv=config, ec=config, log_path=Path(logs) / "engine.log", env=environment)
        with _ended(engine):
            yield Bed(engine, alone, merged(config, direct), folder, mounted, dict(parts))


@contextlib.contextmanager
def _alone(model: Path) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="kvs-logs-") as logs:
        with Engine(model, log_path=Path(logs) / "alone.log") as engine:
            yield engine


@contextlib.contextmanager
def _ended(engine: Engine) -> Iterator[None]:
    """The engine runs meanwhile. A dead one is not asked to end."""
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: engine.close() if engine.alive else engine.kill())
        engine.wait_ready()
        yield


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `more`."""
    made = dict(base)
    for name, value in more.items():
        inner = made.get(name)
        both = isinstance(inner, dict) and isinstance(value, dict)
        made[name] = merged(dict(inner or {}), value) if both else value
    return made


def the_bed(key: str, make: Any) -> Bed:
    """The bed `key`, made by `make()` if it is not the one that is there: there is one at a time."""
    made: tuple[str, Bed] = kept.keep("bed", lambda: _named(key, make))
    if made[0] != key or not made[1].engine.alive:
        kept.let_go("bed")
        made = kept.keep("bed", lambda: _named(key, make))
    return made[1]


@contextlib.contextmanager
def _named(key: str, make: Any) -> Iterator[tuple[str, Bed]]:
    inner: AbstractContextManager[Bed] = make()
    with inner as made:
        yield key, made
