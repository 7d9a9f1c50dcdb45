"""Followers that fail (connectors.engine.guard)."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any, Literal

#: A follower fails in all its methods whenever it is called, or in each of them the first time.
How = Literal["always", "once"]


class Planted(Exception):
    """What a broken follower raises."""


def methods(cls: type) -> dict[str, Any]:
    """The public methods and properties of a class, by name: all that is called of a follower."""
    named = {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("_")}
    return {name: one for name, one in named.items() if isinstance(one, property) or inspect.isfunction(one)}


def break_follower(follower: Any, how: How) -> Counter[str]:
    """Breaks a follower; returns how often each of its methods has raised."""
    cls, raised = type(follower), Counter[str]()

    def broken(name: str, member: Any) -> Any:
        function = member.fget if isinstance(member, property) else member

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if how == "always" or not raised[name]:
                raised[name] += 1
                raise Planted(f"{cls.__name__}.{name}")
            return function(self, *args, **kwargs)

        return property(call) if isinstance(member, property) else call

    follower.__class__ = type(
        cls.__name__, (cls,), {name: broken(name, one) for name, one in methods(cls).items()}
    )
    return raised
