"""Brings the tensor-parallel ranks of a v0 engine to one decision.

Each rank asks the store by itself, and answers differ: a payload is late on one node, damaged on another. If
one rank then left out the forward pass and another ran it, the second would wait in its first all-reduce for
ever. v0 has no scheduler's half that could decide for all ranks. So the ranks ask each other on the engine's
own CPU group, once per prefill step and direction. Every rank of a group makes the same calls in the same
order.
"""

from __future__ import annotations

from typing import Any, Protocol


class Peers(Protocol):
    """The ranks that must decide alike. Called on the engine's thread."""

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values; waits for all of them."""


class Alone:
    """The peers of a rank that decides alone."""

    def least(self, value: int) -> int:
        """Returns `value`."""
        return value


class GroupPeers:
    """The ranks of a torch.distributed group that can reduce CPU tensors (gloo)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values. Raises what torch.distributed raises if a rank is gone."""
        import torch

        held = torch.tensor([value], dtype=torch.int64)
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return int(held.item())


def tensor_parallel_peers() -> GroupPeers:
    """Returns this worker's peers in an engine. Raises ImportError or AssertionError where there is none."""
    from vllm.distributed.parallel_state import get_tp_group

    return GroupPeers(get_tp_group().cpu_group)
