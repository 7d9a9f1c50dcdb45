"""A cheap, honest digest of a model's weights: which bytes made these embeddings and KV blocks?

It covers each weight file's name, size and, for safetensors, its header and three samples of every
tensor; for other formats, samples spread over the file. Reading all bytes of a large model would
take minutes; samples of every tensor notice any training step, since one changes nearly every
element, and a swapped, truncated or re-quantised file anyway. File times are left out on purpose:
they differ between nodes that hold the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from kvstore.errors import ConfigError

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
#: Bytes per sample.
_SAMPLE = 64
#: Samples of a file that isn't safetensors, besides its end.
_SPREAD = 64
_MAX_HEADER = 64 << 20


def weights_digest(folder: str | Path) -> str:
    """Returns 32 hex digits for the weight files in `folder` (or for one file).

    Raises ConfigError if there are none, or they can't be read.
    """
    root = Path(folder)
    files = [root] if root.is_file() else sorted(p for p in root.glob("*") if p.suffix in SUFFIXES)
    if not files:
        raise ConfigError(
            f"no weight files ({', '.join(SUFFIXES)}) in {root}; "
            "set identity.weights to a label that changes with the weights"
        )
    digest = hashlib.sha256()
    for file in files:
        try:
            _add(digest, file)
        except OSError as exc:
            raise ConfigError(f"cannot read weight file {file}: {exc.strerror}") from exc
    return digest.hexdigest()[:32]


def _add(digest: hashlib._Hash, file: Path) -> None:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        header = _safetensors_header(fd, size) if file.suffix == ".safetensors" else None
        if header is None:
            spans = [(0, size)]
            points = [size * i // _SPREAD for i in range(_SPREAD)] + [max(0, size - _SAMPLE)]
        else:
            digest.update(header)
            spans = _tensor_spans(header, size)
            points = [point for start, end in spans for point in (start, (start + end) // 2, end - _SAMPLE)]
        for point in points:
            digest.update(os.pread(fd, _SAMPLE, max(0, point)))
    finally:
        os.close(fd)


def _safetensors_header(fd: int, size: int) -> bytes | None:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER):
        return None
    return os.pread(fd, length, 8)


def _tensor_spans(header: bytes, size: int) -> list[tuple[int, int]]:
    """Returns (start, end) of every tensor in the file, in the order of the data."""
    base = 8 + len(header)
    try:
        entries = json.loads(header)
        spans = sorted(
            (base + int(entry["data_offsets"][0]), base + int(entry["data_offsets"][1]))
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return [(base, size)]
    return [(start, end) for start, end in spans if start < end <= size]
