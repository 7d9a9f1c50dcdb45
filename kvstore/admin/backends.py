"""Settings and backends for a tool that people run: it creates nothing, and no breaker stands in front of
them.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.admin.fast_tier import FastTier, open_tier
from kvstore.admin.operators import written
from kvstore.admin.reports import BackendState, FastBackend
from kvstore.build import (
    PREFIX,
    load_settings,
    open_evidence,
    open_index,
    open_payloads,
    settings_keys,
)
from kvstore.errors import KVStoreError
from kvstore.format.keyring import Keyring
from kvstore.index.maintenance import Account, FullIndex, Listing
from kvstore.keyfiles import open_keyring
from kvstore.keys import NamespaceId
from kvstore.metrics import Counters
from kvstore.payloads.evidence import Evidence
from kvstore.payloads.port import PayloadStore
from kvstore.store.backends import Backends
from kvstore.store.store import Store
from kvstore.threads.transfers import Transfers
from schemas.base import redact
from schemas.settings import Settings
from schemas.urls import local_path, s3_location

if TYPE_CHECKING:
    from typing import Self

_TIERS = f"{PREFIX}PAYLOADS__"
#: A name that no payload has: asking for it shows whether the store answers.
_NO_PAYLOAD = f"{'0' * 16}/00/{'0' * 16}.0"


class Refused(KVStoreError):
    """Something prevents what was asked for; the message says what would remove it."""

    reason = "refused"


class UnknownName(KVStoreError):
    """The name that a person gave is unknown or ambiguous; the message says what to run next."""

    reason = "unknown"


@dataclass(frozen=True, slots=True)
class Sources:
    """The places that settings come from: the command line, the file that it names, and the environment."""

    file: str | None = None
    index: str | None = None
    payloads: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    def settings(self) -> Settings:
        """Returns the settings, merged in the order above. Raises ConfigError."""
        merged = dict(self.environ)
        if self.index is not None:
            merged[f"{PREFIX}INDEX"] = self.index
        if self.payloads is not None:
            # The option also replaces tiers, which have variables of their own.
            merged = {name: text for name, text in merged.items() if not name.startswith(_TIERS)}
            merged[f"{PREFIX}PAYLOADS"] = self.payloads
        return load_settings({"settings": self.file} if self.file is not None else None, merged)

    def describe(self) -> str:
        """Returns the names of the sources that set anything, without the values."""
        options = [f"--{name}" for name in ("index", "payloads") if getattr(self, name) is not None]
        variables = {f"{PREFIX}{key}" for key in settings_keys()} & set(self.environ)
        named = [f"file {file}"] if (file := self.file or self.environ.get(f"{PREFIX}SETTINGS")) else []
        return ", ".join(options + sorted(variables) + named)


class Cache:
    """The index and the payloads of one settings tree, each opened when it is first asked for."""

    def __init__(self, settings: Settings, by: str = "") -> None:
        """`by` names whoever changes something here (kvstore.admin.operators)."""
        self.settings = settings
        self._by = by

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # Closes only what was opened: a cached property that was never read is not in __dict__.
        for name in ("index", "payloads", "brief_payloads", "evidence", "brief_evidence", "fast"):
            if (backend := self.__dict__.get(name)) is not None:
                backend.close()

    @property
    def folder(self) -> Path | None:
        """The payloads' folder, if they are files."""
        url = self.settings.origin
        return Path(local_path(url)) if url.startswith("file:") else None

    def location(self, name: str) -> str:
        """Returns the path or URL under which another tool can open the payload `name`."""
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
    def index(self) -> FullIndex | None:
        """The index, or None if it is absent. Raises what opening it raises."""
        return None if self.index_absent else open_index(self.settings, by=self._by)

    @cached_property
    def payloads(self) -> PayloadStore:
        """The payload store."""
        return open_payloads(self.settings)

    @cached_property
    def brief_payloads(self) -> PayloadStore:
        """The payload store for a janitor, which comes again: it waits no longer than an engine."""
        return open_payloads(self.settings, patient=False)

    @cached_property
    def evidence(self) -> Evidence:
        """What may not be served and is kept for people, beside the payloads."""
        return open_evidence(self.settings)

    @cached_property
    def brief_evidence(self) -> Evidence:
        """The same, in the manner of brief_payloads."""
        return open_evidence(self.settings, patient=False)

    @cached_property
    def keyring(self) -> Keyring:
        """The keys by which payloads are believed. Raises ConfigError."""
        return open_keyring(self.settings.signing)

    @cached_property
    def fast(self) -> FastTier:
        """This node's fast tier. Raises ConfigError if the settings have none."""
        return open_tier(self.settings)

    def made_index(self) -> FullIndex:
        """Returns the index, and creates it if it is absent."""
        self.__dict__["index"] = index = self.index or open_index(self.settings, by=self._by)
        return index

    def record(self, verb: str, what: str) -> None:
        """Records who is about to do what. Creates the index if it is absent.

        Comes before the first change. Raises what the index raises: then nothing may be changed.
        """
        self.made_index().record_operation(verb, written(what))

    def saving(self) -> Store:
        """Returns a store over the same backends, for a verb that saves. Creates the index if it is absent.

        The store's backends are closed with this cache.
        """
        index = self.made_index()
        return Store(
            Backends(
                settings=self.settings,
                payloads=self.payloads,
                index=index,
                maintenance=index,
                transfers=Transfers(self.settings.transfers),
                counters=Counters(),
                evidence=self.evidence,
                keyring=self.keyring,
            )
        )

    def accounts(self, chosen: NamespaceId | None = None) -> list[Account]:
        """Returns the accounts of all namespaces, or of the chosen one; none without an index."""
        found = [] if self.index is None else self.index.accounts()
        return [account for account in found if chosen in (None, account.namespace)]

    def quotas(self) -> dict[str, int]:
        """Returns the quotas that operators have set, by scope; none without an index."""
        return {} if self.index is None else self.index.quotas()

    def segments(self, name: NamespaceId) -> Iterator[Listing]:
        """Yields the segments that the index lists of a namespace; none without an index."""
        return iter(()) if self.index is None else self.index.segments(name)

    def namespaces(self) -> dict[NamespaceId, str]:
        """Returns the canonical JSON of every registered namespace, by its id."""
        return {} if self.index is None else self.index.namespaces()

    def namespace(self, prefix: str) -> NamespaceId:
        """Returns the only namespace whose id starts with `prefix`. Raises UnknownName."""
        found = [name for name in self.namespaces() if name.startswith(prefix.lower())]
        if prefix and len(found) == 1:
            return found[0]
        if prefix and found:
            raise UnknownName(f"{len(found)} namespaces start with {prefix!r}: {', '.join(found)}")
        raise UnknownName(f"no namespace starts with {prefix!r}; `cache-admin namespaces` lists them")

    def index_state(self) -> BackendState:
        """Returns whether the index answers a read, as a report has it."""
        url = redact(self.settings.index_url)
        try:
            self.namespaces()
        except KVStoreError as exc:
            return BackendState(url=url, state="unreachable", problem=str(exc))
        if self.index_absent:
            return BackendState(url=url, state="absent", problem="the first engine that saves will make it")
        return BackendState(url=url, state="ok")

    def payloads_state(self) -> BackendState:
        """Returns whether the payload store answers a read, as a report has it."""
        url = redact(self.settings.origin)
        try:
            self.payloads.read(_NO_PAYLOAD, 0, [])
        except KVStoreError as exc:
            return BackendState(url=url, state="unreachable", problem=str(exc))
        if self.folder is not None and not exists(self.folder):
            return BackendState(url=url, state="absent", problem="the first engine that saves will make it")
        return BackendState(url=url, state="ok")

    def fast_state(self) -> FastBackend | None:
        """Returns the fast tier and how full it is; None if there is none."""
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
    """Whether something is at `path`, or may be: if it can't be looked at, whatever opens it reports why."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
