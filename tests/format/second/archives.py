"""Archives of cache-admin export."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

from blake3 import blake3

from tests.format.second.basics import need


def manifest_mac(manifest: dict[str, Any], key: bytes) -> str:
    """The MAC of a pack's manifest by a configured key."""
    unsigned = manifest | {"pack": manifest["pack"] | {"mac": ""}}
    text = json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()
    return blake3(
        text, key=blake3(key, derive_key_context="kvstore pack 1 manifest MAC").digest()
    ).hexdigest()


def read_archive(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest, and the payloads by name."""
    need(data.endswith(bytes(1024)), "cut short")
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        first, *others = tar.getmembers()
        need(first.name == "kvstore-export.json", "no manifest")
        read = {one.name: tar.extractfile(one) for one in (first, *others)}
        contents = {name: stream.read() for name, stream in read.items() if stream is not None}
    manifest = json.loads(contents.pop("kvstore-export.json"))
    need(manifest["format"] == 1, "another format")
    return manifest, contents


def write_archive(
    namespaces: dict[str, str],
    payloads: dict[str, bytes],
    created_s: int,
    manifest: dict[str, Any] | None = None,
) -> bytes:
    """One with these payloads, and another manifest if given; `namespaces` are canonical JSON by id."""
    manifest = manifest or {
        "format": 1, "version": "second/1", "created_s": created_s, "namespaces": namespaces,
        "segments": len({name.rpartition(".")[0] for name in payloads}), "payloads": len(payloads),
        "payload_bytes": sum(map(len, payloads.values())),
    }  # fmt: skip
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in {"kvstore-export.json": json.dumps(manifest).encode(), **payloads}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()
