"""Signed and encrypted segments: golden files, the second implementation, keys, and that nothing which
somebody without the key has changed is ever taken for what it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import xxhash

from kvstore.errors import CorruptPayload, KVStoreError, NewerFormat, UnknownKey, UnsignedPayload
from kvstore.format import keyring as keyrings
from kvstore.format import segment as codec
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.format.segment import Slot
from kvstore.keys import NamespaceId, namespace_id, salt_id
from kvstore.verify.payloads import check_slots
from schemas.records import CODECS, Codec
from tests.format import second
from tests.format.test_codec import (
    GOLDEN,
    NAMESPACE,
    encode,
    float_slots,
    joined,
    plainly,
    small_slots,
)
from tests.format.test_codec import decode as decode_plain

KEY, OTHER, DATA_KEY = bytes(range(32)), bytes(32), bytes(range(32, 64))
SIGNS = Keyring({"golden": KEY}, key="golden")
ENCRYPTS = Keyring({"golden": KEY}, key="golden", encrypts=True)
WRITERS = {"signed": SIGNS, "encrypted": ENCRYPTS}

writers = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)


def decode(data: bytes, keyring: Keyring) -> list[Any]:
    """Every slot of a segment, as the store reads one: encrypted slots where they are."""
    header = codec.parse_header(data[: codec.header_length(data)], keyring=keyring)
    offset, out = header.part.data_start, []
    for number, (slot, size) in enumerate(zip(header.meta.slots, header.part.slot_sizes, strict=True)):
        stored = memoryview(bytearray(data[offset : offset + size]))
        into = memoryview(bytearray(slot.raw_bytes))
        plain = slot.codec == "none"
        codec.decode_slot(stored, slot, None if plain else into, header.opener(number))
        out.append((slot.key, slot.dtype, slot.shape, bytes(stored if plain else into)))
        offset += size
    return out


def resealed(data: bytes) -> bytes:
    """The same bytes under a right checksum, which needs no key."""
    length = codec.header_length(data)
    head = data[:33] + b"0" * 16 + data[49:length]
    return head[:33] + xxhash.xxh3_64_hexdigest(head).encode() + head[49:] + data[length:]


def rewritten(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The same data under a header whose JSON was changed, and a right checksum."""
    length = codec.header_length(data)
    document = json.loads(data[8:length])
    change(document)
    text = json.dumps(document, separators=(",", ":")).encode()
    assert len(text) <= length - 8
    return resealed(data[:8] + text.ljust(length - 8) + data[length:])


# Golden files, and the second implementation


@pytest.mark.parametrize(
    ("name", "salt", "how", "sha256"),
    [
        ("signed", "", "none", "ee45bde191c4e197b8d33a9137cea622c8952ac99751302ace1cb4b6686ea1b3"),
        ("signed", "tenant-a", "none", "5db361173b5ecb2076483df230eb6b5eb85e04e5116ba0df3bdc89dc4b1a7c76"),
        ("encrypted", "tenant-a", "lz4", "7244dbf4a5b6d164da4c7b50d64a7c181b1c1990289cb8a1b89e48c86d8587f7"),
        ("encrypted", "", "lz4", "d39f26a1e9354602006467becdd485f16a49f72c65c259a992d8bb46e44bbab0"),
    ],
)
def test_golden(name: str, salt: str, how: Codec, sha256: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyrings.os, "urandom", lambda count: DATA_KEY[:count])
    stored = (GOLDEN / f"segment-2-{name}{'-salted' if salt else ''}.safetensors").read_bytes()
    assert hashlib.sha256(stored).hexdigest() == sha256
    assert decode(stored, WRITERS[name]) == plainly(small_slots())
    assert joined(encode(small_slots(), how, salt=salt_id(salt), keyring=WRITERS[name])) == stored


def read_by_second(data: bytes, keys: Mapping[str, bytes], **more: Any) -> list[bytes]:
    header = second.read_header(data, keys=keys, **more)
    assert header.nbytes == len(data)
    return [second.decode(data[slot.start : slot.end], slot) for slot in header.slots]


@writers
@pytest.mark.parametrize("how", CODECS)
def test_ours_is_read_by_the_second(writer: Keyring, how: Codec) -> None:
    made = float_slots()
    data = joined(encode(made, how, keyring=writer))
    assert read_by_second(data, {"x": OTHER, "golden": KEY}) == [bytes(slot.data) for slot in made]
    for keys in ({"x": OTHER}, {}):
        if keys or writer.encrypts:
            with pytest.raises(second.Foreign):
                read_by_second(data, keys)
    with pytest.raises(second.Miss, match="another MAC"):
        read_by_second(data, {"golden": OTHER})
    if not writer.encrypts:
        assert read_by_second(data, {}) == [bytes(slot.data) for slot in made]
    with pytest.raises(second.Miss, match="not signed"):
        read_by_second(joined(encode(made, how)), {"golden": KEY})


@pytest.mark.parametrize("data_key", [None, DATA_KEY], ids=["signed", "encrypted"])
def test_the_seconds_is_read_by_ours(data_key: bytes | None) -> None:
    made = [second.Tensor(slot.key, slot.dtype, slot.shape, bytes(slot.data)) for slot in small_slots()]
    data = second.write_segment(
        made,
        namespace=codec.parse_header(joined(encode(small_slots()))).meta.namespace,
        segment=bytes(8),
        created_s=1,
        signed=("golden", KEY),
        data_key=data_key,
    )
    assert decode(data, SIGNS) == plainly(small_slots())
    with pytest.raises(CorruptPayload, match="signature"):
        decode(data, Keyring({"golden": OTHER}, key="golden"))


def test_any_safetensors_reader_opens_a_signed_segment() -> None:
    from safetensors.numpy import load

    data = joined(encode([small_slots()[2]], keyring=SIGNS))
    [(name, array)] = load(data).items()
    assert name == small_slots()[2].key.hex() and array.tobytes() == bytes(small_slots()[2].data)


# Who is believed


@writers
@pytest.mark.parametrize("how", CODECS)
def test_what_is_written_is_read_and_takes_as_much_room(writer: Keyring, how: Codec) -> None:
    plain, made = encode(float_slots(), how), encode(float_slots(), how, keyring=writer)
    assert made.part.slot_sizes == plain.part.slot_sizes
    assert decode(joined(made), writer) == plainly(float_slots())
    header = codec.parse_header(made.buffers[0], keyring=writer)
    data = memoryview(b"".join(made.buffers[1:]))
    check_slots(header, data, decompress=True)
    assert data == b"".join(made.buffers[1:]), "what is verified may go on to somewhere else"


def test_a_slot_of_no_bytes_is_encrypted_too() -> None:
    empty = [Slot(small_slots()[0].key, memoryview(b""), "U8", (0,))]
    assert decode(joined(encode(empty, keyring=ENCRYPTS)), ENCRYPTS)[0][3] == b""


def test_no_two_payloads_have_one_data_key_and_none_shows_what_it_holds() -> None:
    first, again = (joined(encode(small_slots(), keyring=ENCRYPTS)) for _ in range(2))
    start = codec.header_length(first)
    assert first[start:] != again[start:]
    for slot in small_slots():
        assert bytes(slot.data) not in first


def test_unsigned_segments_are_what_they_were() -> None:
    assert joined(encode(small_slots(), keyring=NO_KEYS)) == joined(encode(small_slots()))


@writers
def test_keys_rotate(writer: Keyring) -> None:
    """Both keys everywhere, then the new one writes, then the old one goes."""
    old = joined(encode(small_slots(), keyring=writer))
    both = Keyring({"golden": KEY, "new": OTHER}, key="new", encrypts=writer.encrypts)
    new = joined(encode(small_slots(), keyring=both))
    assert decode(old, both) == decode(new, both) == plainly(small_slots())
    alone = Keyring({"new": OTHER}, key="new")
    assert decode(new, alone) == plainly(small_slots())
    with pytest.raises(UnknownKey, match="key golden; the keys here are new"):
        decode(old, alone)


def test_a_reader_without_keys_reads_what_is_not_encrypted() -> None:
    assert decode(joined(encode(small_slots(), keyring=SIGNS)), NO_KEYS) == plainly(small_slots())
    with pytest.raises(UnknownKey, match="no keys are configured here"):
        decode(joined(encode(small_slots(), keyring=ENCRYPTS)), NO_KEYS)
    header = codec.parse_header(joined(encode(small_slots(), keyring=ENCRYPTS)), keyring=ENCRYPTS)
    with pytest.raises(UnknownKey):
        codec.decode_slot(memoryview(bytearray(128)), header.meta.slots[0], None)


def test_unsigned_ones_are_refused_or_accepted() -> None:
    plain = joined(encode(small_slots()))
    with pytest.raises(UnsignedPayload):
        decode(plain, SIGNS)
    accepts = Keyring({"golden": KEY}, key="golden", accept_unsigned=True)
    assert decode(plain, accepts) == plainly(small_slots()) == decode_plain(plain)


def test_a_newer_format_is_refused_in_words_and_not_as_damage() -> None:
    def newer(document: dict[str, Any]) -> None:
        document["__metadata__"] |= {"format": "3", "novelty": "x"}

    with pytest.raises(NewerFormat, match="of format 3, and this version reads up to 2: upgrade") as info:
        decode(rewritten(joined(encode(small_slots())), newer), NO_KEYS)
    assert not isinstance(info.value, CorruptPayload)
    with pytest.raises(UnsignedPayload):
        decode(rewritten(joined(encode(small_slots())), newer), SIGNS)
    with pytest.raises(CorruptPayload, match="signature"):
        decode(rewritten(joined(encode(small_slots(), keyring=SIGNS)), newer), SIGNS)


# Attacks on one segment by somebody without the key


def forged() -> list[Slot]:
    return [
        Slot(slot.key, memoryview(bytes(slot.data.nbytes)), slot.dtype, slot.shape) for slot in small_slots()
    ]


STRANGER = Keyring({"golden": OTHER}, key="golden")


def with_forged_slots(writer: Keyring) -> bytes:
    """The signed header over forged bytes, with every checksum and digest in it made right."""
    data = joined(encode(small_slots(), keyring=writer))
    start = codec.header_length(data)
    header = codec.parse_header(data, keyring=writer)
    theirs = codec.parse_header(joined(encode(forged(), keyring=STRANGER)), keyring=STRANGER)

    def change(document: dict[str, Any]) -> None:
        slots = json.loads(document["__metadata__"]["slots"])
        for slot, fake in zip(slots, theirs.meta.slots, strict=True):
            slot["xxh3"] = fake.xxh3
            if "blake3" in slot:
                slot["blake3"] = fake.blake3
        document["__metadata__"]["slots"] = json.dumps(slots, separators=(",", ":"))

    return rewritten(data[:start] + bytes(header.part.nbytes - start), change)


def stripped(data: bytes) -> bytes:
    """What was signed, as an unsigned segment."""

    def change(document: dict[str, Any]) -> None:
        meta = document["__metadata__"]
        for name in ("mac", "key", "data_key"):
            meta.pop(name, None)
        slots = json.loads(meta["slots"])
        for slot in slots:
            slot.pop("blake3", None)
            slot.pop("tag", None)
        meta |= {"format": "1", "slots": json.dumps(slots, separators=(",", ":"))}

    return rewritten(data, change)


@writers
def test_forgeries_are_refused(writer: Keyring) -> None:
    good = joined(encode(small_slots(), keyring=writer))
    accepts = Keyring({"golden": KEY}, key="golden", accept_unsigned=True)
    attacks = {
        "signed with another key under this id": joined(encode(forged(), keyring=STRANGER)),
        "other slots, right checksums": with_forged_slots(writer),
        "unsigned": joined(encode(forged())),
        "signature taken off": stripped(good),
        "format 1 with a signature": rewritten(good, lambda d: d["__metadata__"].update(format="1")),
        "another MAC": resealed(good[:58] + b"0" * 64 + good[122:]),
        "another id": resealed(good.replace(b'"key":"golden"', b'"key":"goldem"', 1)),
    }
    for what, data in attacks.items():
        with pytest.raises(KVStoreError):
            decode(data, writer)
            pytest.fail(what)
    # Where unsigned payloads are accepted these are good, as the settings say; nothing else is.
    taken = {what for what, data in attacks.items() if _accepted(data, accepts)}
    # Without its tags an encrypted one is noise under right checksums.
    assert taken == {"unsigned", "signature taken off"}


def _accepted(data: bytes, keyring: Keyring) -> bool:
    try:
        decode(data, keyring)
    except KVStoreError:
        return False
    return True


@writers
def test_slots_swapped_within_and_between_payloads_are_refused(writer: Keyring) -> None:
    """Slots of equal size and description, under headers of one writer."""
    same = [Slot(slot.key, slot.data, "U8", (128,)) for slot in small_slots()[:2]]
    data = joined(encode(same, keyring=writer))
    other = joined(encode(same, keyring=writer, rank=0))
    start = codec.header_length(data)
    for swapped in (
        data[:start] + data[start + 128 :] + data[start : start + 128],
        data[:start] + other[start:] if writer.encrypts else data[: start + 128] + data[start : start + 128],
    ):
        with pytest.raises(CorruptPayload):
            decode(swapped, writer)
        with pytest.raises(CorruptPayload):
            decode(resealed(swapped), writer)


@writers
def test_a_payload_is_good_in_its_namespace_only(writer: Keyring) -> None:
    data = joined(encode(small_slots(), keyring=writer))
    assert codec.parse_header(data, namespace=namespace_id(NAMESPACE), keyring=writer)
    with pytest.raises(CorruptPayload):
        codec.parse_header(data, namespace=NamespaceId("0" * 16), keyring=writer)


@writers
def test_no_changed_bit_is_ever_accepted(writer: Keyring) -> None:
    """Every bit of header and data, with the checksum as it was and made right again."""
    slots = [Slot(slot.key, slot.data[:16], "U8", (16,)) for slot in small_slots()[:2]]
    data = joined(encode(slots, keyring=writer))
    accepted = []
    for at in range(8 * len(data)):
        bad = bytearray(data)
        bad[at // 8] ^= 1 << at % 8
        for attempt in (bytes(bad), _resealed_or_same(bytes(bad))):
            # The checksum's own digits can be repaired, and then nothing has changed.
            if attempt != data and _accepted(attempt, writer):
                accepted.append(at)
    assert accepted == []


def _resealed_or_same(data: bytes) -> bytes:
    try:
        return resealed(data)
    except CorruptPayload:
        return data


# Keys are shown nowhere


def test_a_keyring_shows_ids_only() -> None:
    shown = f"{ENCRYPTS!r} {ENCRYPTS} {vars(ENCRYPTS)}"
    assert "golden" in shown
    derived = [getattr(ENCRYPTS._keys["golden"], name) for name in ("mac", "wrap")]
    for secret in (KEY, *derived):
        assert secret.hex() not in shown and repr(secret) not in shown
