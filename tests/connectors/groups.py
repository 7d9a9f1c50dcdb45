"""The group of tests.store.world as the two halves of the KV connector have it."""

from __future__ import annotations

from connectors.engine.layout import Group, LocalGroup, Page
from kvstore.rules.prefix import PrefixRule
from tests.store.world import GROUP, SHAPE, SLOT_BYTES

TOKENS = GROUP.block_tokens
#: The layers' names, in slot order.
LAYERS = ("layers.0", "layers.1")

SCHEDULERS = [
    Group(GROUP, PrefixRule("prefix", TOKENS), (0,), offered=False, writers=1, part_bytes=SLOT_BYTES)
]
WORKERS = [
    LocalGroup(
        Page("full", TOKENS, 0, "BF16", SHAPE[1], SHAPE[2], SHAPE[3], shards=1, offered=False),
        ((0, LAYERS),),
    )
]
