"""A leaf of which some shards are down, or at which somebody else comes in between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.errors import TransientError
from kvstore.index.sharding.leaf import ShardLeaf
from kvstore.keys import namespace_id
from schemas.namespace import Namespace


class FlakyLeaf:
    """Passes each call on, after `between` was told of it; calls to what is `down` fail."""

    def __init__(self, leaf: ShardLeaf) -> None:
        self.leaf = leaf
        self.down: set[str] = set()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        #: What answers calls of a verb to a place, which are not passed on.
        self.instead: dict[tuple[str, Any], Callable[[], Any]] = {}
        self.between: Callable[[str, Any], None] = lambda verb, name: None

    def __getattr__(self, verb: str) -> Any:
        call = getattr(self.leaf, verb)
        if not callable(call):
            return call

        def passed(*args: Any, **options: Any) -> Any:
            self.calls.append((verb, args))
            self.between(verb, args[0] if args else None)
            where = args[0] if args else None
            if (namespace_id(where) if isinstance(where, Namespace) else where) in self.down:
                raise TransientError(f"{verb}: {where} is down")
            instead = self.instead.get((verb, where)) if isinstance(where, str) else None
            return instead() if instead else call(*args, **options)

        return passed
