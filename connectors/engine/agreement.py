"""The agreement of an engine's ranks at the start, which completes its namespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from connectors.engine.identity import hash_tokens, kv_namespace, with_release
from connectors.engine.layout import Group, LocalGroup, merge
from kvstore.errors import ConfigError
from schemas.namespace import Namespace
from schemas.settings import Settings


class RankPages(Protocol):
    """A worker's pages, as it reports them."""

    page_format: str
    groups: list[LocalGroup]


@dataclass(frozen=True, slots=True)
class Agreed:
    """An engine's KV blocks as all of its ranks have them."""

    namespace: Namespace
    groups: list[Group]
    #: The groups of each pipeline stage's ranks.
    stages: Sequence[list[LocalGroup]]
    #: Number of tokens that a block hash stands for.
    hash_tokens: int


def agree(
    ranks: Mapping[tuple[int, int], RankPages], config: Any, kv_cache_config: Any, settings: Settings
) -> Agreed:
    """Returns what follows from what the ranks, by pipeline stage and number, tell at the start.

    Raises ConfigError if they tell nothing, or different things."""
    if not ranks:
        raise ConfigError(
            "kvstore: the workers' pages are not known: another connector's handshake came in their "
            "place. Name KVStoreConnector first in MultiConnector's list"
        )
    formats = {one.page_format for one in ranks.values()}
    if len(formats) != 1:
        raise ConfigError(f"kvstore: ranks differ in their page format: {', '.join(sorted(formats))}")
    stages = [ranks[stage, 0].groups for stage in sorted({stage for stage, _ in ranks})]
    for (stage, rank), one in ranks.items():
        if one.groups != stages[stage]:
            raise ConfigError(f"kvstore: rank {rank} of stage {stage} has other pages than rank 0")
    groups = merge(stages, any_tp=settings.identity.any_tp)
    tokens = hash_tokens(config, kv_cache_config, [group.rule for group in groups])
    filled = with_release(formats.pop(), settings)
    specs = [group.spec for group in groups]
    namespace = kv_namespace(config, specs, settings, hash_tokens=tokens, page_format=filled)
    return Agreed(namespace, groups, stages, tokens)
