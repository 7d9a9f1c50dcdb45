"""Digests of multimodal items: what an item is, whatever a client calls it.

vLLM names an item by its identifier: a hash of the media that it was given, or a client's `uuid` verbatim.
The encoder gets the processed input, `feature.data`, and vLLM's scheduler has that of every item. Where the
API server doesn't send it again, the engine core takes it from its own cache. (With
`--mm-processor-cache-type shm` only the workers can read it.) So the digest is made of the processed input.
An identifier never decides what is looked up in the store, or what is stored.

A consumer's request may bring a description only (connectors.engine.media). The digest then comes from the
producer, which has seen the media, with the request's `ec_transfer_params`. A client can forge it but gains
nothing: it would need the digest of media that it could as well have sent.

Everything here belongs to the scheduler's thread.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from blake3 import blake3

from connectors.engine.media import Media
from connectors.engine.step import RequestView
from kvstore.keys import CONTENT_BYTES

log = logging.getLogger(__name__)

#: The key in an item's `ec_transfer_params` under which a producer tells the digest, in hex.
HANDLE: Final = "kvstore_item"
#: Longest identifier of an item that is cached at all, in characters. vLLM takes any from a client.
MOST_NAME: Final = 1024
#: Size from which on a digest is made by several threads: of a video.
_VIDEO_BYTES: Final = 64 << 20


class Contents:
    """Knows the digest of each item that one engine is given; it is made once per object of vLLM's."""

    def __init__(self, media: Media) -> None:
        self._media = media
        #: id of an item's data -> the data, weakly, and its digest.
        self._known: dict[int, tuple[weakref.ref[Any], bytes]] = {}
        self._warned = False

    def __len__(self) -> int:
        return len(self._known)

    def of(self, request: RequestView, index: int) -> bytes | None:
        """Returns the digest of a request's item `index`, or None if the item's content can't be known."""
        feature = request.mm_features[index]
        if len(feature.identifier) > MOST_NAME:
            return None
        if self._media.is_here(feature):
            return self._digest(feature)
        return _told(request.ec_transfer_params, feature.identifier)

    def _digest(self, feature: Any) -> bytes | None:
        data = feature.data
        found = self._known.get(id(data))
        if found is not None and found[0]() is data:
            return found[1]
        if "address" in data:
            # As vLLM tells it: what is here says where the workers find it.
            self._warn("lies in shared memory; use --mm-processor-cache-type lru")
            return None
        try:
            made = content_digest(feature.modality, {name: element.data for name, element in data.items()})
        except TypeError as exc:
            self._warn(f"holds a {exc}")
            return None
        key = id(data)
        self._known[key] = (weakref.ref(data, lambda _: self._known.pop(key, None)), made)
        return made

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("kvstore: a multimodal item is not cached, since its processed input %s", why)


def content_digest(modality: str, data: Mapping[str, Any]) -> bytes:
    """Returns the digest of one item's processed input: BLAKE3 of its modality and of the names, dtypes,
    shapes and bytes of its fields, each framed by its kind and length. Raises TypeError, with its type's
    name, for a value of a kind that it doesn't know.
    """
    size = sum(getattr(value, "nbytes", 0) for value in data.values())
    # On a busy machine waiting for other threads takes longer than a picture does.
    hasher = blake3(max_threads=blake3.AUTO if size >= _VIDEO_BYTES else 1)
    _feed(hasher.update, ["kvstore content 1", modality])
    _feed(hasher.update, {name: data[name] for name in sorted(data)})
    digest: bytes = hasher.digest()
    return digest


def _feed(update: Callable[[Any], Any], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        shape, dtype = tuple(value.shape), str(value.dtype)
        flat = value.detach().cpu().contiguous().reshape(-1)
        _frame(update, b"t", dtype.encode(), *map(_integer, shape))
        _frame(update, b"d", flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        _frame(update, b"a", array.dtype.str.encode(), *map(_integer, np.shape(value)))
        _frame(update, b"d", array.tobytes())
    elif isinstance(value, Mapping):
        _frame(update, b"m", _integer(len(value)))
        for name, one in value.items():
            _feed(update, name)
            _feed(update, one)
    elif isinstance(value, str):
        _frame(update, b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        _frame(update, b"y", value)
    elif isinstance(value, Sequence):
        _frame(update, b"l", _integer(len(value)))
        for one in value:
            _feed(update, one)
    elif isinstance(value, float):
        _frame(update, b"f", struct.pack("<d", value))
    elif value is None or isinstance(value, int):
        _frame(update, b"i", repr(value).encode())
    else:
        raise TypeError(type(value).__name__)


def _frame(update: Callable[[Any], Any], kind: bytes, *parts: Any) -> None:
    update(kind + _integer(len(parts)))
    for part in parts:
        update(_integer(len(part)))
        update(part)


def _integer(value: int) -> bytes:
    return struct.pack("<Q", value)


def _told(params: Mapping[str, Any], identifier: str) -> bytes | None:
    """Returns the digest that a producer has told of an item. A client can send anything in `params`."""
    entry = params.get(identifier)
    text = entry.get(HANDLE) if isinstance(entry, dict) else None
    if not isinstance(text, str) or len(text) != 2 * CONTENT_BYTES:
        return None
    try:
        content = bytes.fromhex(text)
    except ValueError:
        return None
    return content if len(content) == CONTENT_BYTES else None  # it skips blanks


# ---- what the encoder caches hold -------------------------------------------------------------------


class LoadListener(Protocol):
    """A scheduler half that wants to know which outputs another connector puts into the encoder caches."""

    def loaded(self, identifier: str, content: bytes) -> None:
        """The output of the item with this digest is put there under this identifier."""


_listeners: weakref.WeakSet[LoadListener] = weakref.WeakSet()


def listen(one: LoadListener) -> None:
    """Register `one` for every later load, for as long as it lives."""
    _listeners.add(one)


def loaded(identifier: str, content: bytes) -> None:
    """Tell all listeners of a load. Runs on the scheduler's thread."""
    for one in list(_listeners):
        one.loaded(identifier, content)
