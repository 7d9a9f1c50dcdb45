"""Settings and backends for a tool that people run: nothing is created, nothing is behind a breaker.

Where a setting comes from, later ones winning:
    1. its default
    2. the file that `--settings` names, or else KVSTORE_SETTINGS
    3. KVSTORE_<KEY> in the environment, as for the connectors
    4. `--index` and `--payloads`
The command line wins because a person who types a URL means that one, whatever the pod's environment
says. It is done by giving the two options to `load_settings` as the variables that they outrank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.admin.tier import FastTier, open_tier
from kvstore.build import PREFIX, load_settings, open_index, open_payloads, settings_keys
from kvstore.errors import KVStoreError
from kvstore.index.redis import RedisIndex
from kvstore.index.sqlite import SqliteIndex
from kvstore.keys import NamespaceId
from kvstore.metrics import Counters
from kvstore.ports import PayloadStore
from kvstore.store import Store
from kvstore.transfers import Transfers
from schemas.base import redact
from schemas.reports import Backend, FastBackend
from schemas.settings import Settings
from schemas.urls import local_path, s3_location

if TYPE_CHECKING:
    from typing import Self

_TIERS = f"{PREFIX}PAYLOADS__"
#: A name that no payload has: asking for it shows whether the store answers.
_NO_PAYLOAD = f"{'0' * 16}/00/{'0' * 16}.0"


class UnknownName(KVStoreError):
    """What a person named is not there, or is ambiguous; the message says what to run next."""

    reason = "unknown"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the settings come from: what the command line said, and the environment."""

    file: str | None = None
    index: str | None = None
    payloads: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    def settings(self) -> Settings:
        """The settings, in the order above. Raises ConfigError."""
        merged = dict(self.environ)
        if self.index is not None:
            merged[f"{PREFIX}INDEX"] = self.index
        if self.payloads is not None:
            # Instead of tiers as well, which have variables of their own.
            merged = {name: text for name, text in merged.items() if not name.startswith(_TIERS)}
            merged[f"{PREFIX}PAYLOADS"] = self.payloads
        return load_settings({"settings": self.file} if self.file is not None else None, merged)

    def describe(self) -> str:
        """Which sources say anything, without what they say."""
        options = [f"--{name}" for name in ("index", "payloads") if getattr(self, name) is not None]
        variables = {f"{PREFIX}{key}" for key in settings_keys()} & set(self.environ)
        named = [f"file {file}"] if (file := self.file or self.environ.get(f"{PREFIX}SETTINGS")) else []
        return ", ".join(options + sorted(variables) + named)


class Cache:
    """The index and the payloads of one settings tree, each opened when it is first asked for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # Only what was opened: a cached property that was never read is not in __dict__.
        for name in ("index", "payloads", "fast"):
            if (backend := self.__dict__.get(name)) is not None:
                backend.close()

    @property
    def folder(self) -> Path | None:
        """The payloads' folder, if they are files."""
        url = self.settings.origin
        return Path(local_path(url)) if url.startswith("file:") else None

    def location(self, name: str) -> str:
        """Where to open a payload with another tool."""
        if self.folder is not None:
            return str(self.folder / name)
        url = self.settings.origin
        if url.startswith("s3://"):
            place = s3_location(url)
            return f"s3://{place.bucket}/{place.root}{name}"
        return name

    @property
    def fast_folder(self) -> Path | None:
        """The fast tier's folder, if there are two tiers."""
        tiers = self.settings.tiers
        return Path(local_path(tiers.fast)) if tiers is not None else None

    @property
    def index_file(self) -> Path | None:
        """The SQLite file, if the index is one."""
        url = self.settings.index_url
        return Path(url.removeprefix("sqlite://")) if url.startswith("sqlite://") else None

    @property
    def index_absent(self) -> bool:
        """Whether the index is a file that nobody has made yet; opening it would make it."""
        return self.index_file is not None and not exists(self.index_file)

    @cached_property
    def index(self) -> RedisIndex | SqliteIndex | None:
        """The index, or None if it is absent. Raises what opening it raises."""
        return None if self.index_absent else open_index(self.settings)

    @cached_property
    def payloads(self) -> PayloadStore:
        """The payload store."""
        return open_payloads(self.settings)

    @cached_property
    def fast(self) -> FastTier:
        """This node's fast tier. Raises ConfigError if the settings have none."""
        return open_tier(self.settings)

    def made_index(self) -> RedisIndex | SqliteIndex:
        """The index, which this makes if it is absent."""
        self.__dict__["index"] = index = self.index or open_index(self.settings)
        return index

    def saving(self) -> Store:
        """A store over the same backends, for a verb that saves: this makes the index if it is absent.

        Closed with this cache.
        """
        index = self.made_index()
        return Store(
            settings=self.settings,
            payloads=self.payloads,
            index=index,
            catalogue=index,
            transfers=Transfers(self.settings.transfers),
            counters=Counters(),
        )

    def namespaces(self) -> dict[NamespaceId, str]:
        """Every registered namespace: id -> canonical JSON."""
        return {} if self.index is None else self.index.namespaces()

    def namespace(self, prefix: str) -> NamespaceId:
        """The one namespace whose id starts so. Raises UnknownName."""
        found = [name for name in self.namespaces() if name.startswith(prefix.lower())]
        if prefix and len(found) == 1:
            return found[0]
        if prefix and found:
            raise UnknownName(f"{len(found)} namespaces start with {prefix!r}: {', '.join(found)}")
        raise UnknownName(f"no namespace starts with {prefix!r}; `cache-admin namespaces` lists them")

    def index_state(self) -> Backend:
        """Whether the index answers a read."""
        url = redact(self.settings.index_url)
        try:
            self.namespaces()
        except KVStoreError as exc:
            return Backend(url=url, state="unreachable", problem=str(exc))
        if self.index_absent:
            return Backend(url=url, state="absent", problem="the first engine that saves will make it")
        return Backend(url=url, state="ok")

    def payloads_state(self) -> Backend:
        """Whether the payload store answers a read."""
        url = redact(self.settings.origin)
        try:
            self.payloads.read(_NO_PAYLOAD, 0, [])
        except KVStoreError as exc:
            return Backend(url=url, state="unreachable", problem=str(exc))
        if self.folder is not None and not exists(self.folder):
            return Backend(url=url, state="absent", problem="the first engine that saves will make it")
        return Backend(url=url, state="ok")

    def fast_state(self) -> FastBackend | None:
        """The fast tier and how full it is; None if there is none."""
        tiers, folder = self.settings.tiers, self.fast_folder
        if tiers is None or folder is None:
            return None
        state = FastBackend(url=redact(tiers.fast), state="absent", capacity_bytes=tiers.fast_capacity)
        if not exists(folder):
            return state
        try:
            usage = self.fast.usage()
        except KVStoreError as exc:
            return state.model_copy(update={"state": "unreachable", "problem": str(exc)})
        found = {"used_bytes": usage.nbytes, "payloads": usage.payloads, "dirty_bytes": usage.dirty_bytes}
        return state.model_copy(update={"state": "ok", **found})


def exists(path: Path) -> bool:
    """Whether there is something at `path`, or may be: what can't be looked at is for its user to report."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
