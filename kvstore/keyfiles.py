"""The folder of signing keys: one file per key, whose name is the key's id (settings: `signing.keys`).

A mounted Kubernetes Secret is such a folder. Its files are links into a folder whose name begins with a dot,
as everything does that is no key.
"""

from __future__ import annotations

import base64
import binascii
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.format.keyring import KEY_BYTES, KEY_ID, Keyring
from schemas.settings import SigningSettings

#: Most keys of a folder, and most bytes of a file that can be one.
_MOST_KEYS = 64
_MOST_BYTES = 1024
_MAKE_ONE = "`openssl rand -hex 32` makes a key"


def open_keyring(settings: SigningSettings) -> Keyring:
    """Returns the keyring of these settings; reads the folder, if one is given. Raises ConfigError, which
    never shows a key.
    """
    if settings.keys is None:
        return Keyring()
    keys = _read(Path(settings.keys))
    if settings.key not in keys:
        raise ConfigError(
            f"signing.key: there is no key {settings.key} in {settings.keys}; there are "
            f"{', '.join(sorted(keys))}"
        )
    return Keyring(
        keys,
        key=settings.key,
        accept_unsigned=settings.unsigned == "accept",
        encrypts=settings.encrypt,
    )


def exposed(folder: Path) -> list[str]:
    """Returns the ids of keys that other users of this machine may read.

    None of a mounted Secret: who may read that is the pod's own affair. Raises OSError.
    """
    if (folder / "..data").is_symlink():
        return []
    return [path.name for path in _files(folder) if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))


def _read(folder: Path) -> Mapping[str, bytes]:
    keys: dict[str, bytes] = {}
    try:
        for path in _files(folder):
            if not re.fullmatch(KEY_ID, path.name):
                raise ConfigError(
                    f"signing.keys: a file of {folder} has a name that is no key's id: 1 to 32 letters, "
                    "digits, '.', '_' and '-'"
                )
            if len(keys) == _MOST_KEYS:
                raise ConfigError(f"signing.keys: {folder} has more than {_MOST_KEYS} keys; remove old ones")
            if not path.is_file():
                raise ConfigError(f"signing.keys: {folder}/{path.name} is not a file; one file is one key")
            with path.open("rb") as file:
                keys[path.name] = _key(file.read(_MOST_BYTES + 1), f"{folder}/{path.name}")
    except OSError as exc:
        raise ConfigError(f"signing.keys: {exc.filename or folder}: {exc.strerror}") from None
    if not keys:
        raise ConfigError(f"signing.keys: there is no key in {folder}; {_MAKE_ONE}")
    return keys


def _key(text: bytes, place: str) -> bytes:
    """Returns the key that a file holds. Raises ConfigError, which says nothing of what is in it."""
    text = text.strip()
    try:
        key = (
            bytes.fromhex(text.decode())
            if len(text) == 2 * KEY_BYTES
            else base64.b64decode(text, validate=True)
        )
    except (ValueError, binascii.Error):
        raise ConfigError(f"signing.keys: {place} is neither hex nor base64; {_MAKE_ONE}") from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"signing.keys: {place} holds {len(key)} bytes, not {KEY_BYTES}; {_MAKE_ONE}")
    return key
