"""The manifest of an archive: its text, what it says of prompts, and the signature of a pack's.

Signed is its canonical JSON: the members of each object sorted, no white space, ASCII alone, and `pack.mac`
empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError
from pydantic_core import from_json

from kvstore.admin.archive.reports import PackReport, PromptLine
from kvstore.admin.archive.tar import BadArchive, Member
from kvstore.admin.curate.prompts import StoredPrompt
from kvstore.format.keyring import Keyring
from kvstore.keys import NamespaceId, namespace_id_of_json
from schemas.archive import MANIFEST, Manifest
from schemas.namespace import Namespace
from schemas.pack import Pack

#: A manifest holds little but namespaces, a kB or two each, and 32 digits per block of a pack.
MAX_MANIFEST = 4 << 20
#: Most members of its objects: a validation collects an error for each.
_MOST_MEMBERS = 10_000


def read_manifest(members: Iterator[Member]) -> tuple[Manifest, int]:
    """Reads the first member, which is the manifest, and returns its size as well. Raises BadArchive."""
    member = next(members, None)
    if member is None or member.name != MANIFEST:
        raise BadArchive(f"no export of kvstore: its first member is not {MANIFEST}")
    if member.size > MAX_MANIFEST:
        raise BadArchive(f"{MANIFEST} is larger than any manifest")
    text = memoryview(bytearray(member.size))
    member.read_into(text)
    try:
        document = from_json(bytes(text))
        if any(len(each) > _MOST_MEMBERS for each in (document, document["namespaces"])):
            raise BadArchive(f"{MANIFEST} has more members than any manifest")
        manifest = Manifest.model_validate(document)
    except (ValidationError, ValueError, TypeError, KeyError) as exc:
        raise BadArchive(f"{MANIFEST} is not one that this version reads") from exc
    for name, namespace in manifest.namespaces.items():
        if not namespace.isascii() or namespace_id_of_json(namespace) != name:
            raise BadArchive(f"{MANIFEST}: namespace {name} is not the one that it describes")
    return manifest, member.size


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


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a pack, and the one namespace that they are of."""

    manifest: Manifest
    name: NamespaceId
    space: Namespace
    pack: Pack

    @classmethod
    def of(cls, manifest: Manifest) -> Self | None:
        """Returns the prompts of an archive, None if it is no pack. Raises BadArchive."""
        if manifest.pack is None:
            return None
        if len(manifest.namespaces) != 1:
            raise BadArchive("a pack is of one namespace")
        [(name, text)] = manifest.namespaces.items()
        try:
            space = Namespace.model_validate_json(text)
        except ValidationError as exc:
            raise BadArchive("the pack's namespace is not one that this version reads") from exc
        if space.kind != "kv":
            raise BadArchive("the pack's namespace holds encoder items, not prompts")
        return cls(manifest, NamespaceId(name), space, manifest.pack)

    def stored(self) -> list[StoredPrompt]:
        """Returns each prompt as a store is asked for it."""
        return [StoredPrompt(hashes=one.hashes) for one in self.pack.prompts]

    def report(self) -> PackReport:
        """Returns what the manifest says."""
        return PackReport(
            version=self.manifest.version,
            engine=self.pack.engine,
            created_s=self.manifest.created_s,
            namespace=self.name,
            tenant=self.space.tenant,
            model=self.space.model,
            weights=self.space.weights,
            dtype=self.space.dtype,
            kv_dtype=self.space.kv_dtype,
            tp=self.space.parallel.tp,
            pp=self.space.parallel.pp,
            key=self.pack.key,
            segments=self.manifest.segments,
            stored_bytes=self.manifest.payload_bytes,
            prompts=tuple(
                PromptLine(name=one.name, tokens=one.tokens, blocks=len(one.hashes))
                for one in self.pack.prompts
            ),
        )
