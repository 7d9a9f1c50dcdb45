"""Script, and the port through which the index reaches what runs scripts and commands."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol, Self, TypeVar

Word = bytes | str | int | float
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: the chunks it shares with others, then its own file."""

    name: str
    source: str
    sha: str

    @classmethod
    def load(cls, name: str, *shared: str) -> Self:
        """Reads `lua/<name>.lua`, with keys.lua and the `shared` chunks before it."""
        folder = resources.files("kvstore.index.scripted") / "lua"
        files = [folder / f"{chunk}.lua" for chunk in ("keys", *shared, name)]
        source = "\n".join(file.read_text(encoding="ascii") for file in files)
        return cls(name, source, hashlib.sha1(source.encode("ascii"), usedforsecurity=False).hexdigest())


class Client(Protocol):
    """Runs scripts and commands, each within a deadline. Raises the errors of kvstore.errors; DamagedIndex
    where a key holds what it should not. Safe for threads."""

    @property
    def name(self) -> str:
        """The kind of index and its place, for messages."""

    def run(self, script: Script, key: str, *args: Word) -> Any:
        """Runs a script on one namespace; `key` is its KEYS[1]."""

    def command(self, *words: Word, name: str = "") -> Any:
        """Runs one command; answers as redis-py does under RESP2. `name` stands in messages."""

    def many(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Runs independent commands. The answer to a command whose key is damaged is a DamagedIndex."""

    def by_node(self, keys: Mapping[_T, str]) -> list[list[_T]]:
        """Groups items by what fails together: the node that has their keys."""

    def close(self) -> None:
        """Closes every connection. Idempotent."""
