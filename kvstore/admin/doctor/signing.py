"""doctor's checks of signing: the keys, and whether what is stored can be believed with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvstore.admin.backends import Cache
from kvstore.admin.doctor.reports import Check
from kvstore.errors import ConfigError, CorruptPayload, UnreadablePayload, UnsignedPayload
from kvstore.format import segment as codec
from kvstore.keyfiles import exposed
from kvstore.keys import ContentKey, SegmentId, payload_name
from kvstore.verify.payloads import check_slots, read_header

_SAMPLE = 8


def check_signing(cache: Cache) -> Iterator[Check]:
    """Checks whether the keys can be read, who else may, and whether a payload made with them is believed."""
    signing = cache.settings.signing
    if signing.keys is None:
        return
    try:
        keyring = cache.keyring
        _round_trip(cache)
        seen = exposed(Path(signing.keys))
    except (ConfigError, CorruptPayload) as exc:
        yield Check(name="signing", state="problem", found=str(exc), advice="engines don't start like this")
        return
    how = "signs and encrypts" if keyring.encrypts else "signs"
    found = f"{how} with key {keyring.key}, believes {', '.join(keyring.ids)}"
    if seen:
        yield Check(
            name="signing",
            state="warning",
            found=f"{found}; every user of this machine, or a group, may read {', '.join(seen)}",
            advice=f"chmod 400 {signing.keys}/*, owned by the engines' user",
        )
    elif keyring.accepts_unsigned:
        yield Check(
            name="signing",
            state="warning",
            found=f"{found}; unsigned payloads are accepted",
            advice="whoever may write to the payloads can plant some: set signing.unsigned to refuse once "
            "every engine signs",
        )
    else:
        yield Check(name="signing", state="ok", found=f"{found}; unsigned payloads are refused")


def _round_trip(cache: Cache) -> None:
    """Makes a payload in memory and reads it. Raises CorruptPayload."""
    data = memoryview(bytes(range(256)))
    encoded = codec.encode(
        [codec.Slot(ContentKey(bytes(34)), data, "U8", (256,))],
        namespace_json="{}",
        kind="kv",
        segment=SegmentId(bytes(8)),
        writer="doctor",
        keyring=cache.keyring,
    )
    head, stored = encoded.buffers
    check_slots(codec.parse_header(head, keyring=cache.keyring), stored, decompress=True)


def check_signatures(cache: Cache) -> Iterator[Check]:
    """Checks whether a sample of the index's segments can be believed with the keys that are here."""
    if cache.index is None:
        return
    unsigned, unreadable, looked = 0, Counter[str](), 0
    for name in cache.namespaces():
        for listing in islice(cache.index.segments(name), _SAMPLE):
            payload, size = payload_name(name, listing.segment, 0), listing.record.parts[0].nbytes
            looked += 1
            try:
                read_header(cache.payloads, cache.keyring, payload, size, name)
            except UnsignedPayload:
                unsigned += 1
            except UnreadablePayload as exc:
                unreadable[str(exc)] += 1
            except CorruptPayload:
                pass  # what fsck is for
    for why, count in unreadable.items():
        yield Check(
            name="signatures",
            state="problem",
            found=f"{count} of {looked} sampled segments can't be used here: {why}",
            advice="give this process the key (signing.keys) or the version that wrote them; they are left "
            "alone meanwhile",
        )
    if unsigned:
        yield Check(
            name="signatures",
            state="warning",
            found=f"{unsigned} of {looked} sampled segments are not signed, and are refused",
            advice="loads evict them. To keep them set signing.unsigned to accept until they have aged out, "
            "if nobody else can write to the payloads",
        )
