"""Tiers for tests: the parts, and what looks at them from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.conformance.faulty import FaultyPayloads, Plan
from kvstore.payloads.local import LocalPayloads
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.payloads.tiered.ledger import Ledger
from kvstore.payloads.tiered.store import TieredPayloads
from kvstore.rules.tiers import Tier


def at_once(_nbytes: int, job: Callable[[], None]) -> bool:
    """A `later` that is now."""
    job()
    return True


class Queue:
    """A `later` whose jobs wait until a test runs them."""

    def __init__(self, room: int = 1 << 60) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.room = room

    def __call__(self, nbytes: int, job: Callable[[], None]) -> bool:
        if len(self.jobs) >= self.room:
            return False
        self.jobs.append(job)
        return True

    def run(self) -> int:
        """Everything, what the jobs queue included; how many there were."""
        done = 0
        while self.jobs:
            self.jobs.pop(0)()
            done += 1
        return done


class Watched(PayloadStore):
    """Passes calls on, counts them by (verb, name), and can hold up reads until a test lets them go."""

    def __init__(self, inner: PayloadStore) -> None:
        self.inner = inner
        self.calls: Counter[tuple[str, str]] = Counter()
        self.before: Callable[[str, str], object] = lambda verb, name: None

    def _note(self, verb: str, name: str) -> None:
        self.calls[verb, name] += 1
        self.before(verb, name)

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self._note("put", name)
        self.inner.put(name, buffers)

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        self._note("read", name)
        return self.inner.read(name, offset, into, size=size)

    def tier(self, name: str, nbytes: int) -> Tier:
        return self.inner.tier(name, nbytes)

    def delete(self, names: Sequence[str]) -> int:
        for name in names:
            self._note("delete", name)
        return self.inner.delete(names)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        return self.inner.list(prefix)

    def ping(self) -> None:
        self.inner.ping()

    def close(self) -> None:
        self.inner.close()


class Stepped:
    """Stands in for an object, and announces each call of its public methods before and after."""

    def __init__(self, inner: Any, label: str, step: Callable[[str], object]) -> None:
        self._inner = inner
        self._label = label
        self._step = step

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name.startswith("_") or not callable(found) or name in ("note", "list"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._step(f"before {self._label}.{name}")
            result = found(*args, **kwargs)
            self._step(f"after {self._label}.{name}")
            return result

        return call


class Died(BaseException):
    """The process is gone: nothing may catch this."""


class Clock:
    """Time that passes when a test says so, or something sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Rig:
    """A tier whose parts a test can reach. The shared store is a folder too, so that processes share it."""

    def __init__(self, root: Path, *, capacity: int = 1 << 20, **options: Any) -> None:
        self.folder, self.shared = root / "fast", root / "slow"
        self.counts: Counter[str] = Counter()
        self.fast_plan, self.slow_plan = Plan(), Plan()
        self.fast = Watched(FaultyPayloads(LocalPayloads(self.folder), self.fast_plan))
        self.slow = Watched(FaultyPayloads(LocalPayloads(self.shared), self.slow_plan))
        self.ledger = Ledger(self.folder, capacity, busy_timeout_s=options.pop("busy_timeout_s", 0.5))
        self.later = options.setdefault("later", at_once)
        self.tier = TieredPayloads(self.fast, self.slow, self.ledger, count=self._count, **options)

    def announce(self, step: Callable[[str], object]) -> None:
        """From now on every step that outlasts the process is announced."""
        tier, folder = self.tier, self.tier._folder
        ledger = Stepped(self.ledger, "ledger", step)
        markers = Stepped(folder.markers, "markers", step)
        folder.fast = folder._reconciler._fast = Stepped(self.fast, "fast", step)  # type: ignore[assignment]
        folder.ledger = folder._reconciler._ledger = ledger  # type: ignore[assignment]
        folder.markers = folder._reconciler._markers = tier._back._markers = markers  # type: ignore[assignment]
        slow = Stepped(self.slow, "slow", step)
        tier._slow = tier._back._slow = tier._fetcher._slow = slow  # type: ignore[assignment]

    def _count(self, name: str, amount: int) -> None:
        self.counts[name] += amount

    def die(self) -> None:
        """What the kernel does to a killed process: its locks go, nothing else happens."""
        self.ledger.locks.close()

    def tend(self) -> None:
        self.tier.housekeeping()

    def fast_files(self) -> dict[str, int]:
        return files_in(self.folder)

    def slow_files(self) -> dict[str, int]:
        return files_in(self.shared)


def files_in(folder: Path) -> dict[str, int]:
    """Payloads and temporary files below a folder, with their sizes, without the tier's own files."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if not name.startswith(".tier"):
            try:
                if path.is_file():
                    found[name] = path.stat().st_size
            except FileNotFoundError:
                pass
    return found


def check_ledger(ledger: Ledger, folder: Path) -> None:
    """Nothing is in the folder that the ledger doesn't account for, and its sums are right."""
    with ledger.file.reading("check") as db:
        entries = dict(db.execute("SELECT name, nbytes FROM entries").fetchall())
        reserved = db.execute("SELECT coalesce(sum(nbytes), 0) FROM reservations").fetchone()[0]
        dirty = db.execute("SELECT coalesce(sum(nbytes), 0), count(*) FROM entries WHERE dirty").fetchone()
        dirty_reserved = db.execute(
            "SELECT coalesce(sum(nbytes), 0) FROM reservations WHERE dirty"
        ).fetchone()[0]
        totals = db.execute("SELECT nbytes, payloads, dirty_bytes, dirty_payloads FROM totals").fetchone()
    assert totals[0] == sum(entries.values()) + reserved
    assert totals[1] == len(entries)
    assert (totals[2], totals[3]) == (dirty[0] + dirty_reserved, dirty[1])
    files = files_in(folder)
    unknown = {name: size for name, size in files.items() if entries.get(name) != size}
    assert sum(unknown.values()) <= reserved, (unknown, reserved)
    assert sum(files.values()) <= ledger.capacity_bytes
