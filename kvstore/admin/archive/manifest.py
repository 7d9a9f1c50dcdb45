"""The manifest of an archive as text, and the signature of a pack's.

Signed is its canonical JSON: the members of each object sorted, no white space, ASCII alone, and `pack.mac`
empty.
"""

from __future__ import annotations

import json
from typing import Any

from kvstore.format.keyring import Keyring
from schemas.archive import Manifest


def document_of(manifest: Manifest) -> bytes:
    """Returns the manifest as an archive holds it."""
    return manifest.model_dump_json(indent=1, exclude_none=True).encode()


def signed(manifest: Manifest, keyring: Keyring) -> Manifest:
    """Returns a pack's manifest with its signature, if there is a key to sign with; others as they are."""
    if manifest.pack is None or keyring.key is None:
        return manifest
    named = _with(manifest, key=keyring.key, mac="")
    return _with(named, mac=keyring.mac_of(keyring.key, _canonical(named)))


def check_signed(manifest: Manifest, keyring: Keyring) -> None:
    """Checks who wrote a pack's manifest. Raises UnsignedPayload, UnknownKey, and CorruptPayload if the
    signature is another.
    """
    assert manifest.pack is not None, "only packs are signed"
    keyring.check_manifest(manifest.pack.key, manifest.pack.mac, _canonical(_with(manifest, mac="")))


def _with(manifest: Manifest, **changes: Any) -> Manifest:
    assert manifest.pack is not None, "only packs are signed"
    return manifest.model_copy(update={"pack": manifest.pack.model_copy(update=changes)})


def _canonical(manifest: Manifest) -> bytes:
    document = manifest.model_dump(mode="json", exclude_none=True)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
