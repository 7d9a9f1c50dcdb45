"""Holds the memory that a rank copies between: vLLM's paged KV caches, one per group, and staging."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from connectors.engine.layout import LocalGroup
from connectors.engine.tensors import Blocks, Chunk, Copied, PagedCache, Staging
from connectors.kv.worker.room import Room
from kvstore.errors import ConfigError
from kvstore.rules.units import size
from kvstore.threads.transfers import Transfers

log = logging.getLogger(__name__)


class KVMemory:
    """One rank's memory. Loads and saves have separate staging, so that neither can starve the other."""

    def __init__(
        self,
        groups: Sequence[LocalGroup],
        segment_blocks: Sequence[int],
        room: int | Room,
    ) -> None:
        """`segment_blocks` is how many blocks a segment of each group has at most; `room` how many bytes
        loads have, and saves, or what sizes them."""
        #: This rank's groups.
        self.groups = groups
        self._segment_blocks = segment_blocks
        self._room = room
        #: Bytes of the largest piece that is loaded or saved at once.
        self.piece_bytes = 0
        #: The groups' paged caches, once registered.
        self.caches: list[PagedCache] = []
        self._loads: Staging | None = None
        self._saves: Staging | None = None

    def register(self, tensors: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """Take the layers' paged tensors. Raises ConfigError, before anything could be stored, if they aren't
        laid out as the configuration says."""
        made = views(self.groups, tensors, num_blocks)
        pin = made[0].device.type == "cuda"
        wanted = zip(made, self._segment_blocks, strict=True)
        piece = max(blocks * cache.slot_bytes for cache, blocks in wanted)
        loads, saves = (self._room,) * 2 if isinstance(self._room, int) else self._room.split(piece)
        least = max(cache.slot_bytes for cache in made)
        try:
            self._loads = Staging(loads, least, pin=pin)
            self._saves = Staging(saves, least, pin=pin)
        except ValueError as exc:
            raise ConfigError(f"kvstore: kv.{exc}") from None
        self.piece_bytes = min(piece, self._loads.size_bytes, self._saves.size_bytes)
        log.info(
            "kvstore staging: %s for saves, %s for loads%s, %s",
            size(saves), size(loads), ", page-locked" if pin else "",
            "as kv.staging_bytes says" if isinstance(self._room, int) else f"for {self._room}",
        )  # fmt: skip
        self.caches = made
        for cache in made:
            self._canary(cache)

    @property
    def loads(self) -> Staging:
        """Returns the staging of loads."""
        assert self._loads is not None, "register_kv_caches has not been called"
        return self._loads

    @property
    def saves(self) -> Staging:
        """Returns the staging of saves."""
        assert self._saves is not None, "register_kv_caches has not been called"
        return self._saves

    @property
    def used_bytes(self) -> dict[str, int]:
        """Returns how many bytes of staging loads and saves have in use now."""
        staging = {"load": self._loads, "save": self._saves}
        return {name: 0 if one is None else one.used_bytes for name, one in staging.items()}

    @property
    def saving(self) -> bool:
        """Returns whether saves hold staging now."""
        return self._saves is not None and self._saves.used_bytes > 0

    def gather(
        self,
        transfers: Transfers,
        group: int,
        blocks: Blocks,
        slots: int,
        job: Callable[[Chunk, Copied], None],
    ) -> bool:
        """Copy paged blocks of a group to a chunk of `slots` slots in the staging of saves, and queue `job`
        for when they are there.

        The job gets the chunk, which it must release, and the copy, whose `wait` says if it has failed.
        Returns False if there is no room. For the engine's thread.
        """
        staging = self.saves
        nbytes = slots * self.caches[group].slot_bytes
        if not transfers.takes_staged():
            return False
        if (chunk := staging.try_acquire(nbytes)) is None:
            return False
        try:
            copied = self.caches[group].gather(blocks, chunk)
        except Exception:
            staging.release(chunk)
            raise
        after = copied.wait if copied.under_way else None
        if transfers.write_staged(nbytes, lambda: job(chunk, copied), after):
            return True

        def discard() -> None:
            copied.wait()
            staging.release(chunk)

        # The copy may still be under way on a side stream, and the chunk is free when it is done. In a store
        # that is closed it never is: this thread is the engine's, and doesn't wait.
        if copied.under_way:
            transfers.in_turn(discard)
        else:
            discard()
        return False

    def _canary(self, cache: PagedCache) -> None:
        """Write a pattern to one slot's blocks, read it back, and compare each layer's own tensor with it.

        No request owns a block yet. The test shows that the strides are understood; `register` compares the
        dimensions, and the namespace says what fills a page. Raises ConfigError if the bytes differ.
        """
        chunk = self.loads.acquire(cache.slot_bytes, time.monotonic() + 1.0)
        blocks = cache.first_blocks()
        try:
            slot = chunk.tensor[: cache.slot_bytes]
            cache.gather(blocks, chunk).wait()
            before = slot.clone()
            pattern = torch.arange(slot.numel(), dtype=torch.int64).remainder_(251).to(torch.uint8)
            slot.copy_(pattern)
            cache.scatter(blocks, chunk, cache.mark()).wait()
            slot.zero_()
            cache.gather(blocks, chunk).wait()
            if not torch.equal(slot, pattern) or not cache.layers_hold(blocks, pattern):
                raise ConfigError(
                    "kvstore: a block written to the KV cache reads back differently; layout not understood"
                )
            slot.copy_(before)
            cache.scatter(blocks, chunk, cache.mark()).wait()
        finally:
            self.loads.release(chunk)


def views(
    groups: Sequence[LocalGroup], tensors: Mapping[str, torch.Tensor], num_blocks: int
) -> list[PagedCache]:
    """Returns views of the groups' paged caches. Raises ConfigError if the layers' tensors aren't laid out as
    the configuration says."""
    made = []
    for group in groups:
        tables = {table: [tensors[name] for name in names] for table, names in group.tables}
        try:
            cache = PagedCache(tables, num_blocks)
        except ValueError as exc:
            raise ConfigError(f"kvstore: {exc}") from None
        if (cache.shape, cache.dtype_name) != (group.shape, group.page.dtype):
            raise ConfigError(
                f"kvstore: the engine's KV blocks are {cache.dtype_name}{list(cache.shape)}, its "
                f"configuration says {group.page.dtype}{list(group.shape)}; layout not understood"
            )
        made.append(cache)
    return made
