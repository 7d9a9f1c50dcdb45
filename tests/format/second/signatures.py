"""Signed and encrypted segments: who wrote a header, digests of slots, slots encrypted and decrypted."""

from __future__ import annotations

import re
from collections.abc import Mapping

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from tests.format.second.basics import Miss, need


class Foreign(Miss):
    """What this reader can't judge, and must leave alone."""


def mac_key(key: bytes) -> bytes:
    return blake3(key, derive_key_context="kvstore segment 2 header MAC").digest()


def wrapping_key(key: bytes) -> bytes:
    return blake3(key, derive_key_context="kvstore segment 2 data key wrapping").digest()


def header_mac(head: bytes, key: bytes) -> str:
    return blake3(head[:33] + b"0" * 16 + head[49:58] + b"0" * 64 + head[122:], key=mac_key(key)).hexdigest()


def signer(head: bytes) -> str | None:
    """The id of the key that a header is signed with, at its place."""
    found = re.match(rb'","mac":"[0-9a-f]{64}","key":"([A-Za-z0-9][A-Za-z0-9._-]{0,31})"', head[49:])
    return found[1].decode() if found else None


def check(head: bytes, keys: Mapping[str, bytes], *, unsigned: bool) -> str | None:
    """The id of the key of a header that is to be believed."""
    name = signer(head)
    if name is None:
        need(unsigned or not keys, "not signed")
    elif keys:
        if name not in keys:
            raise Foreign(f"signed with {name}")
        need(head[58:122].decode() == header_mac(head, keys[name]), "another MAC")
    return name


def slot_digest(stored: bytes, described: str) -> str:
    return blake3(stored, key=blake3(described.encode()).digest()).hexdigest()


def unwrap(data_key: str, name: str, keys: Mapping[str, bytes]) -> bytes:
    if name not in keys:
        raise Foreign(f"encrypted with {name}")
    try:
        return aes_key_unwrap(wrapping_key(keys[name]), bytes.fromhex(data_key))
    except InvalidUnwrap as exc:
        raise Miss("a data key that was wrapped otherwise") from exc


def wrap(data_key: bytes, key: bytes) -> str:
    return aes_key_wrap(wrapping_key(key), data_key).hex()


def encrypt(plain: bytes, data_key: bytes, number: int, associated: str) -> tuple[bytes, str]:
    made = AESGCM(data_key).encrypt(number.to_bytes(12, "big"), plain, associated.encode())
    return made[:-16], made[-16:].hex()


def decrypt(stored: bytes, tag: str, data_key: bytes, number: int, associated: str) -> bytes:
    try:
        return AESGCM(data_key).decrypt(
            number.to_bytes(12, "big"), stored + bytes.fromhex(tag), associated.encode()
        )
    except InvalidTag as exc:
        raise Miss("tag of a slot") from exc
