"""A first look at a store when an engine starts: a wrong setting is in the log before a request meets it.

All questions are asked on one thread of the store's, once per process and store, and an engine never waits
for an answer. Each request has a deadline. An index that doesn't answer is told by whoever registers the
namespace (kvstore.store.space).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.build import open_probe
from kvstore.errors import KVStoreError
from kvstore.keys import NamespaceId, SegmentId, canonical_json, namespace_id, payload_name
from kvstore.rules.text import readable
from kvstore.rules.units import size
from kvstore.store.store import Store
from schemas.namespace import Namespace
from schemas.settings import Settings
from schemas.urls import local_path

if TYPE_CHECKING:
    from kvstore.admin.inspect.reports import Difference

log = logging.getLogger(__name__)

#: Most namespaces of an index that are compared with an engine's.
_MOST = 1000
#: Most fields that are named of two that differ.
_FIELDS = 4
#: Fields that name what must never be shared, or is another thing altogether.
_APART = ("format", "kind", "tenant", "model")
#: A payload that nobody has.
_NO_PAYLOAD = payload_name(NamespaceId("0" * 16), SegmentId(bytes(8)), 0)
#: What this process has looked at: engines with two connectors look once.
_looked: set[tuple[int, str, str]] = set()


def look(store: Store, namespace: Namespace, *, saves: bool) -> None:
    """Begins the look, and warns of settings that can hardly be meant. No I/O on this thread.

    Of an engine that never `saves`, payloads are only read: its role may allow no more.
    """
    for name, text in too_small(store.settings).items():
        log.warning("%s: each save evicts the one before. Raise %s", text, name)
    store.transfers.errand(0, partial(_look, store, namespace, saves))


def too_small(settings: Settings) -> dict[str, str]:
    """Returns the quotas of the settings that hold less than one segment, by name, each in words."""
    least, eviction = settings.segment.target_bytes, settings.eviction
    quotas = {
        "capacity_bytes": settings.capacity_bytes,
        "eviction.namespace_bytes": eviction.namespace_bytes,
        "eviction.tenant_bytes": eviction.tenant_bytes,
        "eviction.salt_bytes": eviction.salt_bytes,
    }
    return {
        name: f"{name} ({size(nbytes)}) is less than one segment (segment.target_bytes, {size(least)})"
        for name, nbytes in quotas.items()
        if nbytes is not None and nbytes < least
    }


def _look(store: Store, namespace: Namespace, saves: bool) -> None:
    settings = store.settings
    began = time.perf_counter()
    answers = _index_answers(store, namespace)
    place = (os.getpid(), settings.index_url, settings.origin)
    if place in _looked:
        return
    _looked.add(place)
    if problem := payload_problem(settings, saves=saves):
        log.warning("%s. Until then this engine computes what it could load", problem)
    elif answers:
        log.info("index and payloads answered in %.0f ms", (time.perf_counter() - began) * 1e3)


def _index_answers(store: Store, namespace: Namespace) -> bool:
    try:
        store.maintenance.ping()
        if text := sibling(namespace, store.maintenance.namespaces()):
            log.info("%s", text)
    except KVStoreError as exc:
        log.debug("no first look at the index: %s", exc)
        return False
    return True


def payload_problem(settings: Settings, *, saves: bool) -> str:
    """Returns what is wrong with the payloads and what to do about it, "" if a probe came back."""
    # Their imports would delay an engine's start.
    from kvstore.admin.doctor.payloads import advice_on, to_be_made

    if settings.origin.startswith("file:") and not (folder := Path(local_path(settings.origin))).is_dir():
        check = to_be_made("payloads", folder, "the payload folder")
        return f"{check.found}; {check.advice}" if check.state == "problem" else ""
    try:
        with open_probe(settings) as probe:
            if saves:
                probe.ping()
            else:
                probe.read(_NO_PAYLOAD, 0, [])
    except KVStoreError as exc:
        advice = advice_on(settings, exc)
        return f"{exc}; {advice}" if advice else str(exc)
    return ""


def sibling(namespace: Namespace, texts: Mapping[NamespaceId, str]) -> str:
    """Returns a sentence about the namespace of the same model that is most like this one, "" if there is
    none. It names the fields in which they differ, and the setting that would share them."""
    from kvstore.admin.described import fields_of
    from kvstore.admin.inspect.namespaces import differences

    own, own_id = json.loads(canonical_json(namespace)), namespace_id(namespace)
    others = [
        (name, fields)
        for name, fields in ((name, fields_of(text)) for name, text in list(texts.items())[:_MOST])
        if name != own_id and all(fields.get(key) == own.get(key) for key in _APART)
    ]
    if not others:
        return ""
    found = [(differences(own, fields), name) for name, fields in others]
    nearest, name = min(found, key=lambda one: len(one[0]))
    shown = nearest[:_FIELDS]
    told = ", ".join(f"{each.path} ({_short(each.b)}, here {_short(each.a)})" for each in shown)
    how = "; ".join(dict.fromkeys(_ends(shown)))
    return (
        f"namespace {own_id} shares nothing with {readable(name)} of the same model: it differs in {told}. "
        f"{how}. `cache-admin namespaces diff` says more"
    )


def _short(value: object) -> str:
    # It comes from the index, where anything may be.
    return readable(repr(value), 60)


def _ends(found: Iterable[Difference]) -> Iterator[str]:
    """Yields, for each difference, what would end it, or what the field is."""
    for each in found:
        top = each.path.split(".")[0]
        if each.path == "parallel.tp" or each.path.endswith(".shards"):
            yield "identity.any_tp: true on all engines ends a difference in tensor parallelism"
        elif top == "page_format" and _but_release(each.a) == _but_release(each.b):
            yield "identity.any_vllm: true on all engines ends a difference in vLLM's release"
        else:
            yield f"{each.path}: {each.meaning}"


def _but_release(page_format: object) -> str:
    """Returns a page format without the release of vLLM that it begins with."""
    first, slash, rest = str(page_format).partition("/")
    return rest if slash and first.startswith("vllm") else str(page_format)
