"""What an engine's weights are called once they have changed in place.

The weights that an engine starts with are digested from their files. What a trainer puts in their place has
no files; after a reset (connectors.kv_epochs) it has a name that nobody else has, until somebody who knows
says what it is called. That somebody is whoever updates the weights, over the way that updates them:

    vllm serve ... --worker-extension-cls connectors.weights.NamedWeights

    llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)     or pause, or sleep
    llm.collective_rpc("update_weights", ...)
    llm.collective_rpc("name_weights", args=("step-1200",))

Engines whose weights have the same name share, those started with `identity.weights` set to it too. An empty
name stands for the weights that the engine was started with, for after a sleep that kept them.

Nothing in a request can name weights: a client could make an engine store its blocks under others' name.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: What starts the names of weights that nobody has named.
UNNAMED = "unnamed-"
_NAME = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")


def unnamed() -> str:
    """A name that no other engine has, nor this one had before."""
    return UNNAMED + secrets.token_hex(12)


def check_name(name: str) -> None:
    """Raise ValueError for what can't be a name of weights. The empty name is one."""
    if name and (not _NAME.fullmatch(name) or name.startswith(UNNAMED)):
        raise ValueError(
            f"name of weights: at most 128 printable ASCII characters, and not {UNNAMED}...; not {name!r}"
        )


@dataclass(frozen=True, slots=True)
class Naming:
    """One rank was told what its weights are called."""

    name: str
    #: Unix time, by the rank's clock.
    at_s: float

    @classmethod
    def now(cls, name: str) -> Naming:
        """Raises ValueError, see check_name."""
        check_name(name)
        return cls(name, time.time())


def agreed(namings: Mapping[int, Naming], ranks: int) -> Naming | None:
    """The name that all ranks were told, with the earliest of their times; None while some differ."""
    if len(namings) < ranks or len({one.name for one in namings.values()}) != 1:
        return None
    return min(namings.values(), key=lambda one: one.at_s)


class NamedWeights:
    """For vLLM's `worker_extension_cls`: adds `name_weights` to the workers."""

    def name_weights(self, name: str) -> int:
        """The weights that this worker has now are called so. To be called after the reset and the update.

        How many KVStoreConnectors were told; they act on it after the next step. Raises ValueError for what
        can't be a name.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        check_name(name)
        return _tell(get_kv_transfer_group(), name) if has_kv_transfer_group() else 0


def _tell(connector: Any, name: str) -> int:
    """Tell a connector, or those that MultiConnector holds."""
    inner = getattr(connector, "sub_connectors", None)
    if inner is not None:
        return sum(_tell(one, name) for one in inner)
    told = getattr(connector, "name_weights", None)
    if told is None:
        return 0
    told(name)
    return 1
