"""The keys that prove who wrote a payload and keep others from reading it, and what is done with them.

A signed header names a key and carries a MAC of itself, at fixed places so that it is checked before anything
is parsed:

    49   `","mac":"`  MAC of the whole header, 64 hex digits, with them and those of `xxh3` as zeros
    122  `","key":"`  id of the key, then `"`

The MAC covers the slots because the header has a BLAKE3 digest of each, or the tag of its AES-GCM. Three keys
are derived from each configured key: for MACs, for wrapping data keys, and for the manifests of packs. So no
use says anything about another.

Why these: BLAKE3 is keyed by design and hashes at memory speed with the interpreter's lock released; vLLM
depends on it. AES-GCM and RFC 3394 are what auditors expect, and `cryptography` runs them on the processor's
AES instructions, also without the lock (trials/benchmarks/bench_signing.py, docs/adr/0028).
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.errors import CorruptPayload, UnknownKey, UnsignedPayload

#: Bytes of a configured key, and of a payload's data key.
KEY_BYTES: Final = 32
#: Pattern of a key's id. It is shorter than any spelling of a key, so that a key in its place is refused.
KEY_ID: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}"

_CONTEXT_MAC: Final = "kvstore segment 2 header MAC"
_CONTEXT_WRAP: Final = "kvstore segment 2 data key wrapping"
_CONTEXT_PACK: Final = "kvstore pack 1 manifest MAC"
#: Places in a signed header: of the checksum's digits, of the MAC's, and of the key's id.
_XXH3, _MAC, _KEY = slice(33, 49), slice(58, 122), 131
_BEFORE_MAC, _BEFORE_KEY = b'","mac":"', b'","key":"'
_ID = re.compile(rf'({KEY_ID})"'.encode())
_TAG_BYTES = 16
_NONCE_BYTES = 12


class _Key:
    """The keys derived from one configured key."""

    __slots__ = ("mac", "pack", "wrap")

    def __init__(self, secret: bytes) -> None:
        from blake3 import blake3

        self.mac = blake3(secret, derive_key_context=_CONTEXT_MAC).digest()
        self.wrap = blake3(secret, derive_key_context=_CONTEXT_WRAP).digest()
        self.pack = blake3(secret, derive_key_context=_CONTEXT_PACK).digest()


class PayloadCipher:
    """Encrypts and decrypts the slots of one payload with its data key. Safe for threads."""

    __slots__ = ("_bound", "_key")

    def __init__(self, data_key: bytes, bound: str) -> None:
        self._key = data_key
        self._bound = bound.encode()

    def encrypt(self, number: int, described: str, plain: memoryview) -> tuple[memoryview, bytes]:
        """Returns the stored form of slot `number`, in a buffer of its own, and its tag."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        nonce = number.to_bytes(_NONCE_BYTES, "big")
        encryptor = Cipher(algorithms.AES(self._key), modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(self._bound + described.encode())
        stored = memoryview(bytearray(plain.nbytes))
        encryptor.update_into(plain, stored)
        encryptor.finalize()
        return stored, encryptor.tag

    def decrypt(self, number: int, described: str, tag: bytes, data: memoryview) -> None:
        """Decrypts the stored bytes of slot `number` where they are. Raises CorruptPayload; `data` may then
        hold anything and must not be used.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        nonce = number.to_bytes(_NONCE_BYTES, "big")
        decryptor = Cipher(algorithms.AES(self._key), modes.GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(self._bound + described.encode())
        decryptor.update_into(data, data)
        try:
            decryptor.finalize()
        except InvalidTag as exc:
            raise CorruptPayload("tag of an encrypted slot differs") from exc


class Keyring:
    """The keys of one process, which never change. Safe for threads; shows no key's bytes anywhere.

    Without keys signatures are not looked at: a signed payload is as good as its checksums.
    """

    def __init__(
        self,
        keys: Mapping[str, bytes] | None = None,
        *,
        key: str | None = None,
        accept_unsigned: bool = False,
        encrypts: bool = False,
    ) -> None:
        """`keys` are the valid keys by id, `key` is the id of the one that signs what this process writes."""
        self._keys = {name: _Key(secret) for name, secret in (keys or {}).items()}
        #: Id of the key that signs; None: nothing is signed.
        self.key: Final = key
        self.accepts_unsigned: Final = accept_unsigned or not self._keys
        self.encrypts: Final = encrypts and key is not None

    def __repr__(self) -> str:
        return f"Keyring({sorted(self._keys)}, key={self.key!r}, encrypts={self.encrypts})"

    @property
    def ids(self) -> Sequence[str]:
        """The ids of all valid keys."""
        return sorted(self._keys)

    def sign(self, head: bytes) -> bytes:
        """Returns a header with its MAC by the key that it names, in the place of any other."""
        return head[: _MAC.start] + _mac(self._key(_named(head) or "").mac, head) + head[_MAC.stop :]

    def check(self, head: memoryview | bytes) -> str | None:
        """Checks who wrote a whole header whose checksum is right; returns the id of its key, None if it is
        not signed.

        Raises UnsignedPayload, UnknownKey, or CorruptPayload if the MAC is another.
        """
        name = _named(head)
        if name is None:
            if not self.accepts_unsigned:
                raise UnsignedPayload("it is not signed, and signing.unsigned is refuse")
            return None
        if self._keys and not hmac.compare_digest(_mac(self._key(name).mac, head), bytes(head[_MAC])):
            raise CorruptPayload(f"its signature is not one of key {name}")
        return name

    def mac_of(self, name: str, text: bytes) -> str:
        """Returns the MAC of a pack's manifest by the key of that id, in hex. Raises UnknownKey."""
        from blake3 import blake3

        return blake3(text, key=self._key(name).pack).hexdigest()

    def check_manifest(self, name: str, mac: str, text: bytes) -> None:
        """Checks who wrote a pack's manifest; `name` is "" if it is not signed.

        As `check` of headers it raises UnsignedPayload, UnknownKey, or CorruptPayload.
        """
        if not name and not self.accepts_unsigned:
            raise UnsignedPayload("the pack is not signed, and signing.unsigned is refuse")
        if name and self._keys and not hmac.compare_digest(self.mac_of(name, text), mac):
            raise CorruptPayload(f"the pack's signature is not one of key {name}")

    def new_cipher(self, bound: str) -> tuple[PayloadCipher, str]:
        """Returns a cipher with a fresh data key, and that key as the header carries it, in hex. `bound` says
        which payload it is for.
        """
        from cryptography.hazmat.primitives.keywrap import aes_key_wrap

        data_key = os.urandom(KEY_BYTES)
        return PayloadCipher(data_key, bound), aes_key_wrap(self._key(self.key or "").wrap, data_key).hex()

    def cipher(self, name: str, wrapped: str, bound: str) -> PayloadCipher:
        """Returns the cipher of a payload from what its header carries. Raises UnknownKey, CorruptPayload."""
        from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap

        try:
            return PayloadCipher(aes_key_unwrap(self._key(name).wrap, bytes.fromhex(wrapped)), bound)
        except InvalidUnwrap as exc:
            raise CorruptPayload(f"its data key was not wrapped with key {name}") from exc

    def _key(self, name: str) -> _Key:
        try:
            return self._keys[name]
        except KeyError:
            here = f"the keys here are {', '.join(self.ids)}" if self._keys else "no keys are configured here"
            raise UnknownKey(f"it was written with key {name}; {here}") from None


#: The keyring of a process without keys.
NO_KEYS: Final = Keyring()


def slot_digest(stored: memoryview, described: str) -> str:
    """Returns the digest of a signed slot's stored bytes in hex, good under its description only."""
    from blake3 import blake3

    return blake3(stored, key=blake3(described.encode()).digest()).hexdigest()


def _named(head: memoryview | bytes) -> str | None:
    """Returns the id of the key that a header names at its place, or None if the header is not signed."""
    if head[_XXH3.stop : _MAC.start] != _BEFORE_MAC or head[_MAC.stop : _KEY] != _BEFORE_KEY:
        return None
    found = _ID.match(head, _KEY)
    return None if found is None else str(bytes(found[1]), "ascii")


def _mac(key: bytes, head: memoryview | bytes) -> bytes:
    from blake3 import blake3

    hasher = blake3(key=key)
    hasher.update(head[: _XXH3.start])
    hasher.update(b"0" * 16)
    hasher.update(head[_XXH3.stop : _MAC.start])
    hasher.update(b"0" * 64)
    hasher.update(head[_MAC.stop :])
    return hasher.hexdigest().encode()
