"""MemoryPayloads: payloads in a dictionary, for tests. They last as long as the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from kvstore.keys import parse_payload_name
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.rules.tiers import Tier

_Contents = dict[str, tuple[bytes, float]]

#: Every named store of this process. _LOCK guards them and their contents.
_STORES: dict[str, _Contents] = {}
_LOCK = threading.Lock()


class MemoryPayloads(PayloadStore):
    """The payloads of the process-wide store called `name`: two objects of one name share them."""

    def __init__(self, name: str, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._clock = clock
        with _LOCK:
            self._contents = _STORES.setdefault(name, {})

    def __repr__(self) -> str:
        return f"MemoryPayloads({self._name!r})"

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        _check(name)
        data = b"".join(buffers)
        with _LOCK:
            self._contents[name] = (data, self._clock())

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        _check(name)
        if offset < 0:
            raise ValueError(f"negative offset {offset}")
        with _LOCK:
            found = self._contents.get(name)
        if found is None:
            return None
        rest = memoryview(found[0])[offset:]
        ends = accumulate(view.nbytes for view in into)
        for view, end in zip(into, ends, strict=True):
            part = rest[end - view.nbytes : end]
            if part:
                view.cast("B")[: part.nbytes] = part
        return min(rest.nbytes, sum(view.nbytes for view in into))

    def tier(self, name: str, nbytes: int) -> Tier:
        return "memory"

    def delete(self, names: Sequence[str]) -> int:
        for name in names:
            _check(name)
        with _LOCK:
            return sum(self._contents.pop(name, None) is not None for name in names)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        with _LOCK:
            found = [
                Listed(name, len(data), modified_s)
                for name, (data, modified_s) in self._contents.items()
                if name.startswith(prefix)
            ]
        yield from found

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass


def _check(name: str) -> None:
    if parse_payload_name(name) is None:
        raise ValueError(f"not a payload name: {name!r}")
