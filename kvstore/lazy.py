"""A package's `__getattr__` (PEP 562), which imports a name of one of its modules when it is first used.

A package that imported its modules at once would import all of them for everybody who needs one: vLLM for the
planning of a connector, the whole store for its housekeeping, and itself in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def resolver(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of `package`; `names` maps each name to the module that defines it."""

    def resolve(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(names[name]), name)

    return resolve
