"""How much staging memory an engine's rank takes where no setting says: as much as its steps fill.

On a GPU all saves of a step begin when its forward pass has been launched, and none can be written before it
has run; the next step is launched before that. So saves get what the batches in flight compute at most:

    max_num_batched_tokens x bytes per token on this rank x batches in flight

and room for `_LEAST_TOKENS` tokens in any case: a prompt that the engine's own cache has is saved in one
step, however little a step computes, and no save waits longer than its request runs.

Loads get twice what the reading threads hold at once: what is read waits for the step in which its blocks
were handed out, and as much can be read meanwhile. All ranks of a node, loads and saves together, take no
more than an eighth of its memory, or of its container's: then saves wait (connectors.kv.worker.writes).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from connectors.engine.layout import LocalGroup
from kvstore.rules.units import size
from schemas.settings import TransferSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Fewest tokens for which saves get room.
_LEAST_TOKENS: Final = 16_384
#: The share of a node's memory that staging takes at most, by default.
_SHARE: Final = 8
#: Files with the memory that a container may take, in cgroups of version 2 and 1.
_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Room:
    """The quantities that size the staging memory of one rank."""

    #: Bytes of KV that the batches in flight compute at most, or that one step finds computed.
    step_bytes: int = 0
    #: Number of threads that load.
    readers: int = 4
    #: Most bytes of loads and saves together; two pieces of each are taken in any case.
    most_bytes: int = 1 << 62

    def __str__(self) -> str:
        return (
            f"steps of {size(self.step_bytes)} on {self.readers} readers, of at most {size(self.most_bytes)}"
        )

    def split(self, piece_bytes: int) -> tuple[int, int]:
        """Returns the bytes of loads and of saves. `piece_bytes` is the most of one load or save."""
        least = 2 * piece_bytes
        loads = max(least, min(2 * self.readers * piece_bytes, self.most_bytes // 2))
        # A piece more than the steps fill, for what is left between chunks.
        saves = max(least, min(self.step_bytes + piece_bytes, self.most_bytes - loads))
        return loads, saves


def room_of(config: VllmConfig, groups: Sequence[LocalGroup], transfers: TransferSettings) -> Room:
    """Returns what sizes the staging of a rank that holds these groups."""
    tokens = max(config.max_in_flight_tokens, _LEAST_TOKENS)
    token_bytes = sum(group.slot_bytes / group.page.block_tokens for group in groups)
    parallel = config.parallel_config
    ranks = parallel.world_size // parallel.nnodes_within_dp * max(1, parallel.data_parallel_size_local)
    # One of the writing threads reads nothing.
    readers = transfers.read_threads + transfers.write_threads - 1
    return Room(int(tokens * token_bytes), readers, memory_bytes() // _SHARE // ranks)


def memory_bytes(limits: Sequence[str] = _LIMITS) -> int:
    """Returns the memory of this node, in bytes, or what this container may take of it if that is less."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in limits:
        try:
            # "max" where nothing is limited; older kernels say a huge number.
            most = min(most, int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return most
