"""ls: the segments that the index lists. show: prints one namespace, one segment or one payload, and whether
index and payload agree.

A payload explains itself (its header names its namespace, segment, ranks and slots), so a payload
that the index has forgotten, or whose index is down, can be shown as well.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Literal

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.counting import summary_of_segment
from kvstore.admin.described import described
from kvstore.admin.inspect.namespaces import namespace
from kvstore.admin.inspect.reports import (
    ListReport,
    NamespaceReport,
    PartReport,
    SegmentReport,
    SlotReport,
    SortKey,
)
from kvstore.admin.reports import SegmentSummary
from kvstore.errors import CorruptPayload, KVStoreError, UnreadablePayload
from kvstore.format import segment as codec
from kvstore.index.maintenance import Listing
from kvstore.keys import NamespaceId, SegmentId, parse_payload_name, payload_name
from kvstore.payloads.port import Listed
from kvstore.rules.segments import staging_bytes
from kvstore.verify.payloads import check_slot, read_header, read_slots
from schemas.base import redact

_HEX = re.compile(r"[0-9a-f]{1,16}")
#: The most candidates that are named when a prefix is ambiguous.
_CANDIDATES = 6
_ORDER: dict[SortKey, Callable[[SegmentSummary], tuple[float, float]]] = {
    "last-use": lambda line: (line.last_use_s, line.created_s),
    "created": lambda line: (line.created_s, line.last_use_s),
    "bytes": lambda line: (line.stored_bytes, line.last_use_s),
}


@dataclass(frozen=True, slots=True)
class _Found:
    """A segment to show; `listing` is what the index says of it, None if it doesn't know it."""

    namespace: NamespaceId
    segment: SegmentId
    listing: Listing | None = None
    #: The rank that was asked for; None: all of them.
    rank: int | None = None


def show(cache: Cache, name: str, *, verify: bool, now_s: float) -> NamespaceReport | SegmentReport:
    """Returns the report of a namespace or segment by (the start of) its id, or of a payload by name or path.

    `verify` reads every slot. Raises UnknownName and what the payload store raises; what the index raises,
    too, unless `name` is a payload's.
    """
    named = _payload(cache, name)
    if named is not None:
        return _segment_report(cache, _look_up(cache, *named), verify=verify, now_s=now_s)
    prefix = name.lower()
    if not _HEX.fullmatch(prefix):
        raise UnknownName(
            f"{name!r} is no id (hex digits) and no payload (<namespace>/<2 digits>/<segment>.<rank>); "
            "`cache-admin namespaces` and `cache-admin ls` list ids"
        )
    known = cache.namespaces()
    spaces = [space for space in known if space.startswith(prefix)]
    if prefix in known:
        return namespace(cache, NamespaceId(prefix), now_s)
    found = _segments(cache, prefix, list(known))
    names = [f"namespace {space}" for space in spaces]
    names += [f"segment {each.segment.hex()}" for each in found]
    if len(names) > 1:
        more = " and more" if len(names) > _CANDIDATES else ""
        raise UnknownName(f"{name!r} is ambiguous: {', '.join(names[:_CANDIDATES])}{more}; give more digits")
    if spaces:
        return namespace(cache, spaces[0], now_s)
    if found:
        return _segment_report(cache, found[0], verify=verify, now_s=now_s)
    raise UnknownName(
        f"no namespace and no segment starts with {name!r}; `cache-admin namespaces` and `cache-admin ls` "
        "list what there is"
    )


def find_segment(cache: Cache, prefix: str, namespaces: Sequence[NamespaceId]) -> tuple[NamespaceId, Listing]:
    """Returns the only visible segment of these namespaces whose id starts with `prefix`.

    Raises UnknownName.
    """
    prefix = prefix.lower()
    known = _segments(cache, prefix, namespaces) if _HEX.fullmatch(prefix) else []
    found = [each for each in known if each.listing]
    if not found:
        raise UnknownName(f"no segment starts with {prefix!r}; `cache-admin ls` lists them")
    if len(found) > 1:
        names = ", ".join(each.segment.hex() for each in found[:_CANDIDATES])
        raise UnknownName(f"{prefix!r} is ambiguous: {names}; give more digits")
    assert found[0].listing is not None
    return found[0].namespace, found[0].listing


def _payload(cache: Cache, name: str) -> tuple[NamespaceId, SegmentId, int] | None:
    """Returns namespace, segment and rank from a payload's name or path; None if `name` is neither."""
    if parsed := parse_payload_name(name):
        return parsed
    if name.startswith("s3://"):
        parsed = parse_payload_name("/".join(name.split("/")[-3:]))
        if parsed is None or cache.location(payload_name(*parsed)) != name:
            raise UnknownName(f"{name!r} is not a payload of {redact(cache.settings.origin)}")
        return parsed
    if cache.folder is None or "/" not in name:
        return None
    path = Path(name).absolute()
    parsed = parse_payload_name("/".join(path.parts[-3:]))
    if parsed is not None and path.parent.parent.parent.resolve() != cache.folder.resolve():
        raise UnknownName(
            f"{name!r} is not in the payload folder {cache.folder}; give `--payloads file://"
            f"{path.parent.parent.parent}`"
        )
    return parsed


def _look_up(cache: Cache, namespace: NamespaceId, segment: SegmentId, rank: int) -> _Found:
    listing = None
    # If the index can't be asked the report says so, and the payload is shown without it.
    with suppress(KVStoreError):
        listing = cache.index.get(namespace, [segment])[0] if cache.index is not None else None
    return _Found(namespace, segment, listing, rank)


def _segments(cache: Cache, prefix: str, known: Sequence[NamespaceId]) -> list[_Found]:
    """Returns a few segments at most whose ids start with `prefix`.

    A whole id costs one call per namespace.
    """
    found = []
    for space in known:
        for listing in _listings(cache, space, prefix):
            found.append(_Found(space, listing.segment, listing))
            if len(found) > _CANDIDATES:
                return found
    if not found and len(prefix) == 16:
        segment = SegmentId(bytes.fromhex(prefix))
        found = [_Found(space, segment) for space in known if _payloads(cache, space, segment)]
    return found


def _listings(cache: Cache, space: NamespaceId, prefix: str) -> Iterator[Listing]:
    assert cache.index is not None, "a namespace is known, so there is an index"
    if len(prefix) == 16:
        yield from (each for each in cache.index.get(space, [SegmentId(bytes.fromhex(prefix))]) if each)
    else:
        yield from (each for each in cache.index.segments(space) if each.segment.hex().startswith(prefix))


def _payloads(cache: Cache, space: NamespaceId, segment: SegmentId) -> dict[int, Listed]:
    """Returns the segment's payloads by rank."""
    stem = payload_name(space, segment, 0).removesuffix("0")
    parsed = ((listed, parse_payload_name(listed.name)) for listed in cache.payloads.list(stem))
    return {name[2]: listed for listed, name in parsed if name}


def _segment_report(cache: Cache, found: _Found, *, verify: bool, now_s: float) -> SegmentReport:
    stored = _payloads(cache, found.namespace, found.segment)
    promised = range(len(found.listing.record.parts)) if found.listing else ()
    ranks = sorted({*stored, *promised}) if found.rank is None else [found.rank]
    if found.listing is None and not any(rank in stored for rank in ranks):
        where = payload_name(found.namespace, found.segment, found.rank or 0)
        raise UnknownName(f"there is no payload {where}; `cache-admin ls` lists segments")
    read = [_read_part(cache, found, rank, stored.get(rank), verify=verify) for rank in ranks]
    headers = [header for _, header in read]
    kind, model = _described(cache, found, headers)
    salts = [header.meta.salt or "" for header in headers if header]
    return SegmentReport(
        at_s=now_s,
        segment=found.segment.hex(),
        namespace=found.namespace,
        model=model,
        kind=kind,
        salt=found.listing.record.salt.hex() if found.listing else salts[0] if salts else "",
        record=summary_of_segment(found.namespace, found.listing) if found.listing else None,
        index=cache.index_state(),
        verified=verify,
        parts=tuple(part for part, _ in read),
    )


def _described(cache: Cache, found: _Found, headers: list[codec.Header | None]) -> tuple[str, str]:
    """Returns kind and model from the segment's own header, or else from the index."""
    texts = [header.meta.namespace for header in headers if header]
    if not texts and found.listing:
        texts = [cache.namespaces().get(found.namespace, "")]
    return described(texts[0] if texts else None)


def _read_part(
    cache: Cache, found: _Found, rank: int, listed: Listed | None, *, verify: bool
) -> tuple[PartReport, codec.Header | None]:
    name = payload_name(found.namespace, found.segment, rank)
    header: codec.Header | None = None
    unreadable = False
    slots: tuple[SlotReport, ...] = ()
    if listed is None:
        problems = ["the payload is missing"]
    else:
        try:
            header = read_header(cache.payloads, cache.keyring, name, listed.nbytes, found.namespace)
            problems = _disagreements(found, rank, header, listed)
            slots = tuple(_slots(cache, name, header, listed.nbytes if verify else None))
            problems += [
                f"slot {slot.slot} is {slot.check}: its bytes "
                + ("are not there" if slot.check == "missing" else "fail their checksum")
                for slot in slots
                if slot.check in ("bad", "missing")
            ]
        except (CorruptPayload, UnreadablePayload) as exc:
            problems, unreadable = [str(exc)], isinstance(exc, UnreadablePayload)
    state: Literal["ok", "missing", "damaged", "unreadable"] = "ok"
    if problems:
        state = "missing" if listed is None else "unreadable" if unreadable else "damaged"
    report = PartReport(
        rank=rank,
        payload=name,
        location=cache.location(name),
        state=state,
        problems=tuple(problems),
        stored_bytes=listed.nbytes if listed else None,
        modified_s=listed.modified_s if listed else None,
        data_start=header.part.data_start if header else None,
        writer=header.meta.writer if header else "",
        key=header.meta.key if header else None,
        encrypted=header is not None and header.cipher is not None,
        slots=slots,
    )
    return report, header


def _disagreements(found: _Found, rank: int, header: codec.Header, listed: Listed) -> list[str]:
    """Returns a sentence for each point in which a payload's name, size or record contradicts its header."""
    meta = header.meta
    pairs = [
        ("segment id", found.segment.hex(), meta.segment, "its name"),
        ("rank", rank, meta.rank, "its name"),
        ("size", listed.nbytes, header.part.nbytes, "the store"),
    ]
    if found.listing is not None:
        record = found.listing.record
        raw = sum(slot.raw_bytes for slot in meta.slots) if meta.ranks == 1 else 0
        pairs += [
            ("number of ranks", len(record.parts), meta.ranks, "the index"),
            ("number of slots", record.slots, len(meta.slots), "the index"),
            ("codec", record.codec, meta.codec, "the index"),
            ("creation time", record.created_s, meta.created_s, "the index"),
            ("depth", record.depth, meta.depth, "the index"),
            ("raw size", record.raw_bytes, raw, "the index"),
            ("salt id", record.salt.hex() or "none", meta.salt or "none", "the index"),
        ]
        if rank < len(record.parts) and record.parts[rank] != header.part:
            pairs.append(("layout", "another", "its own", "the index"))
    return [
        f"{what}: {theirs} by {whose}, {own} by its header"
        for what, theirs, own, whose in pairs
        if theirs != own
    ]


def _slots(cache: Cache, name: str, header: codec.Header, stored: int | None) -> Iterator[SlotReport]:
    """Yields the slots; verified, where `stored` is the payload's size."""
    checks: Iterable[str] = repeat("unchecked")
    sizes = header.part.slot_sizes
    if stored is not None:
        read = read_slots(cache.payloads, name, header, stored=stored)
        most = max(staging_bytes(cache.settings.kv), cache.settings.ec.staging_bytes)
        checks = (
            _check(data, header, i, size, most)
            for i, ((_, data), size) in enumerate(zip(read, sizes, strict=True))
        )
    for i, (slot, size, check) in enumerate(zip(header.meta.slots, sizes, checks, strict=False)):
        yield SlotReport.model_validate(
            {
                "slot": i,
                "key": slot.key,
                "dtype": slot.dtype,
                "shape": slot.shape,
                "raw_bytes": slot.raw_bytes,
                "stored_bytes": size,
                "codec": slot.codec,
                "checksum": slot.xxh3,
                "check": check,
            }
        )


def _check(stored: memoryview, header: codec.Header, number: int, size: int, most: int) -> str:
    """Returns what is wrong with a slot. One of more than `most` bytes is not decompressed."""
    if len(stored) < size:
        return "missing"
    try:
        check_slot(stored, header, number, decompress=header.meta.slots[number].raw_bytes <= most)
    except CorruptPayload:
        return "bad"
    return "ok"


def ls(cache: Cache, prefix: str | None, *, limit: int, sort: SortKey, now_s: float) -> ListReport:
    """Returns the `limit` (0: all) most recent or largest segments, of one namespace or of all.

    Holds no more than `limit` of them at once. Raises UnknownName and what the index raises.
    """
    chosen = None if prefix is None else cache.namespace(prefix)
    found = 0

    def counted() -> Iterator[SegmentSummary]:
        nonlocal found
        for name in cache.namespaces() if chosen is None else [chosen]:
            for listing in cache.segments(name):
                found += 1
                yield summary_of_segment(name, listing)

    order = _ORDER[sort]
    if limit:
        segments = heapq.nlargest(limit, counted(), key=order)
    else:
        segments = sorted(counted(), key=order, reverse=True)
    return ListReport(
        at_s=now_s, namespace=chosen, sort=sort, limit=limit, found=found, segments=tuple(segments)
    )
