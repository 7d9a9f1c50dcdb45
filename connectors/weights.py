"""Names an engine's weights once they have changed in place.

The weights that an engine starts with are digested from their files. Weights that a trainer puts in their
place have no files; after a reset (connectors.kv.namespace) they have a name that no other engine uses, until
the trainer names them, on the same path on which it updates them:

    vllm serve ... --worker-extension-cls connectors.weights.NamedWeights

    llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)     or pause, or sleep
    llm.collective_rpc("update_weights", ...)
    llm.collective_rpc("name_weights", args=("step-1200",))

The reset raises while a hand-off or a load is under way, whose blocks it can't free (docs/pd.md). Call it
again after `kv.handoff_wait_s`.

Engines whose weights have the same name share blocks, including engines that were started with
`identity.weights` set to that name. An empty name stands for the weights that the engine was started with,
for use after a sleep that kept them.

Requests can't name weights: else a client could make an engine store its blocks under the name of other
weights.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: Prefix of the names of unnamed weights.
UNNAMED = "unnamed-"
_NAME = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")


def unnamed() -> str:
    """Returns a name that no other engine has and that this one has not had before."""
    return UNNAMED + secrets.token_hex(12)


def check_name(name: str) -> None:
    """Raise ValueError if `name` can't be a name of weights. The empty name can."""
    if name and (not _NAME.fullmatch(name) or name.startswith(UNNAMED)):
        raise ValueError(
            f"expected a name of at most 128 printable ASCII characters, and not {UNNAMED}...; got {name!r}"
        )


@cache
def this_machine() -> str:
    """Returns a name of this boot of this machine, whose processes have one steady clock; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Naming:
    """The name that one rank got for its weights, and when."""

    name: str
    #: Nanoseconds by the steady clock of the rank's machine, which says nothing to other machines.
    at_ns: int
    machine: str

    @classmethod
    def now(cls, name: str) -> Naming:
        """Returns a naming that happened just now. Raises ValueError as check_name does."""
        check_name(name)
        return cls(name, time.monotonic_ns(), this_machine())


@dataclass(frozen=True, slots=True)
class AgreedName:
    """The name that all ranks got. `at_ns` is when the first rank on this machine got it, or None without a
    rank here. One call names all ranks' weights, so ranks on other machines got the name at the same time."""

    name: str
    at_ns: int | None


def agreed(namings: Mapping[int, Naming], ranks: int) -> AgreedName | None:
    """Returns the name on which all ranks agree, or None while some rank has none or another."""
    names = {one.name for one in namings.values()}
    if len(namings) < ranks or len(names) != 1:
        return None
    here = [one.at_ns for one in namings.values() if one.machine == this_machine() != ""]
    return AgreedName(names.pop(), min(here, default=None))


class NamedWeights:
    """Adds `name_weights` to the workers, as vLLM's `worker_extension_cls`."""

    def name_weights(self, name: str) -> int:
        """Name the weights that this worker has now. To be called after the reset and the update.

        Returns how many KVStoreConnectors got the name; they act on it after the next step. Raises ValueError
        if `name` can't be one.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        check_name(name)
        return _tell(get_kv_transfer_group(), name) if has_kv_transfer_group() else 0


def _tell(connector: Any, name: str) -> int:
    """Tell the name to a connector, or to those that MultiConnector holds; returns how many took it."""
    inner = getattr(connector, "sub_connectors", None)
    if inner is not None:
        return sum(_tell(one, name) for one in inner)
    told = getattr(connector, "name_weights", None)
    if told is None:
        return 0
    told(name)
    return 1
