"""A janitor in a process of its own, whose every deletion is on record, and which dies where it is told to:
`python -m tests.janitor.child`, with a Plan as JSON in JANITOR_CHILD. Ends by SIGTERM.

In its folder the file `armed` holds a point and a signal as JSON: the first child that comes to that point
takes the file away and gets the signal. What it writes there, as `<holder>.<what>`:
    state     its JanitorState, after every round
    deletes   a line of [time, name] for each payload, before it is deleted
    buried    a line of [time, segment], after the index has forgotten it
    visible   a line of [time, name] for each payload that the index named when it was to be deleted
    died      where it got the signal, just before it did
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.build import load_settings, open_evidence, open_index, open_payloads
from kvstore.janitor import janitor as janitors
from kvstore.janitor import scrub as scrubbing
from kvstore.janitor.janitor import Janitor
from kvstore.keys import parse_payload_name
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.rules.tiers import Tier


@dataclass(frozen=True)
class Plan:
    """What a child is to do."""

    folder: str
    holder: str
    settings: dict[str, Any]


class Diary:
    """What it writes down, whole lines at a time, and what it is told."""

    def __init__(self, plan: Plan) -> None:
        self._mine = Path(plan.folder, plan.holder)
        self._armed = Path(plan.folder, "armed")

    def write(self, what: str, *lines: object) -> None:
        with self._mine.with_suffix(f".{what}").open("a") as out:
            out.write("".join(json.dumps(line) + "\n" for line in lines))

    def point(self, name: str) -> None:
        """Perhaps the last one that this process comes to."""
        try:
            at, by = json.loads(self._armed.read_text())
            if at == name:
                self._armed.rename(self._mine.with_suffix(".armed"))
                self.write("died", name)
                os.kill(os.getpid(), signal.Signals[by])
        except FileNotFoundError:
            pass


class Recorded(PayloadStore):
    """A payload store that writes down what it deletes."""

    def __init__(self, inner: PayloadStore, index: Any, diary: Diary) -> None:
        self._inner, self._index, self._diary = inner, index, diary

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        raise AssertionError("a janitor puts nothing")

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        self._diary.point("read")
        return self._inner.read(name, offset, into, size=size)

    def tier(self, name: str, nbytes: int) -> Tier:
        return self._inner.tier(name, nbytes)

    def delete(self, names: Sequence[str]) -> int:
        self._diary.point("before delete")
        half = len(names) // 2
        count = self._delete(names[:half])
        self._diary.point("in delete")
        count += self._delete(names[half:])
        self._diary.point("after delete")
        return count

    def _delete(self, names: Sequence[str]) -> int:
        now = time.time()
        for name in names:
            parsed = parse_payload_name(name)
            assert parsed is not None
            if self._index.states(parsed[0], [parsed[1]]) == ["visible"]:
                self._diary.write("visible", [now, name])
        self._diary.write("deletes", *([now, name] for name in names))
        return self._inner.delete(names)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        return self._inner.list(prefix)

    def ping(self) -> None:
        self._inner.ping()

    def close(self) -> None:
        self._inner.close()


def main() -> None:
    plan = Plan(**json.loads(os.environ["JANITOR_CHILD"]))
    settings = load_settings(plan.settings, environ={})
    diary, index, stop = Diary(plan), open_index(settings), threading.Event()
    # As often as a test can wait for.
    janitors._COOL_S = 0.5
    scrubbing._DAY_S = 3.0

    def watched(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            diary.point(f"before {name}")
            answer = inner(*args, **more)
            if name == "reaped":
                diary.write("buried", *([time.time(), segment.hex()] for segment in args[1]))
            if answer or answer is None:
                diary.point(f"after {name}")
            return answer

        return call

    for name in ("reachable", "cull", "drain", "reaped", "sweep", "cool", "reconcile", "evict", "erase"):
        setattr(index, name, watched(name, getattr(index, name)))
    payloads = Recorded(open_payloads(settings), index, diary)
    janitor = Janitor(index, payloads, open_evidence(settings), settings)
    inner, shown = janitor.round, Path(plan.folder, f"{plan.holder}.state")

    def one_round() -> None:
        inner()
        fresh = shown.with_suffix(".new")
        fresh.write_text(janitor.state().model_dump_json())
        fresh.rename(shown)

    janitor.round = one_round  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    janitor.run(stop)
    index.close()


def plan_json(plan: Plan) -> str:
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    sys.exit(main())
