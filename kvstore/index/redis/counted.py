"""Refuses a reply of more elements than any of ours has, before memory is made ready for them.

hiredis makes a list as soon as it is told how long it will be: `*1000000000` costs a server 13 bytes, and
whoever believes it 8 GB and seconds in which no other thread runs.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from typing import Any

import redis

#: The heads, each after the end of a line, of replies and of parts of them that have a million elements or
#: more. What is asked for in pages has some thousands.
_HEAD = re.compile(rb"\n[*~>%|][1-9][0-9]{6,}\r\n")
#: The end of what has come, if it may become a head; a head has at most so many bytes.
_UNFINISHED = re.compile(rb"\n([*~>%|][0-9]{0,19}\r?)\Z")
_UNFINISHED_BYTES = 22


@functools.cache
def counting(parser: Any) -> Any:
    """Returns a class of redis-py's parsers that reads as `parser` does, through a CountedReader."""

    class Counting(parser):  # type: ignore[misc]
        _reader: Any

        def on_connect(self, connection: Any, **options: Any) -> None:
            super().on_connect(connection, **options)
            self._reader = CountedReader(self._reader)

    return Counting


class CountedReader:
    """What redis-py's parser asks of a reader of hiredis', which it wraps."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._nothing = reader.gets()
        self._whole: deque[Any] = deque()
        self._held = b""

    def gets(self, *args: Any) -> Any:
        """Returns the next reply, or what says that it isn't whole."""
        return self._whole.popleft() if self._whole else self._reader.gets(*args)

    def has_data(self) -> bool:
        """Returns whether something has come that `gets` has not returned."""
        return bool(self._whole or self._held or self._reader.has_data())

    def feed(self, buffer: Any, start: int, size: int) -> None:
        """Takes bytes as they come. Raises redis.InvalidResponse."""
        data = b"".join((b"\n", self._held, memoryview(buffer)[start : start + size]))
        unfinished = _UNFINISHED.search(data, max(0, len(data) - _UNFINISHED_BYTES))
        end = len(data) if unfinished is None else unfinished.start(1)
        data, self._held = data[:end], data[end:]
        fed = 1
        for head in _HEAD.finditer(data):
            at = head.start() + 1
            self._reader.feed(data[fed:at])
            fed = at
            while (reply := self._reader.gets()) is not self._nothing:
                self._whole.append(reply)
            # It is a string's own if that one isn't whole: of that, hiredis keeps all.
            if not self._reader.has_data():
                raise redis.InvalidResponse(f"an answer of {head[0][2:-2].decode('ascii')} elements")
        self._reader.feed(data[fed:])
