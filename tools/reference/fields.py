"""A setting's type, bounds and default in words, as docs/settings.md gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, SecretStr
from pydantic.fields import FieldInfo

from schemas.base import model_of
from schemas.settings import parse_bytes


def kind(field: FieldInfo) -> str:
    """Returns a field's type with its bounds, in words."""
    if model_of(field.annotation) is not None:
        return "a URL, or the keys of two tiers"
    inner = _alternatives(field)[0]
    inner = get_args(inner)[0] if get_origin(inner) is Annotated else inner
    size = is_size(field)
    if get_origin(inner) is Literal:
        return "one of " + ", ".join(f"`{one}`" for one in get_args(inner))
    names = {bool: "`true` or `false`", int: "a whole number", float: "a number", str: "text"}
    names |= {SecretStr: "text, secret"}
    what = "a size" if size else "seconds" if _is_time(field) else names[inner]
    return f"{what} {_bounds(field, size)}".strip()


def _alternatives(field: FieldInfo) -> list[Any]:
    """Returns the types that a field may have, besides left out."""
    if get_origin(field.annotation) is Literal:
        return [field.annotation]
    return [one for one in get_args(field.annotation) if one is not type(None)] or [field.annotation]


def _bounds(field: FieldInfo, size: bool) -> str:
    given: dict[str, list[float]] = {}
    for one in _metadata(field):
        for name in ("ge", "gt", "le", "min_length", "max_length"):
            if (bound := getattr(one, name, None)) is not None:
                given.setdefault(name, []).append(bound)
    # A field's own bounds narrow those of its type.
    least, above, most = (pick(given[name]) if name in given else None for pick, name in _NARROWEST)
    shortest, longest = (given.get(name, [0])[-1] for name in ("min_length", "max_length"))
    if longest:
        return f"of {shortest} to {longest} characters"
    if least is not None and most is not None:
        return f"from {_amount(least, size)} to {_amount(most, size)}"
    if above is not None and most is not None:
        return f"above {_amount(above, size)}, up to {_amount(most, size)}"
    if above is not None:
        return f"above {_amount(above, size)}"
    # That a size isn't negative goes without saying.
    return f"from {_amount(least, size)}" if least is not None and (least or not size) else ""


_NARROWEST: tuple[tuple[Callable[[list[float]], float], str], ...] = ((max, "ge"), (max, "gt"), (min, "le"))


def _metadata(field: FieldInfo) -> Iterator[Any]:
    """Yields the metadata with a field's bounds; for an optional field also those of its alternatives."""
    yield from field.metadata
    for inner in _alternatives(field):
        for one in getattr(inner, "__metadata__", ()):
            yield from one.metadata if isinstance(one, FieldInfo) else [one]


def is_size(field: FieldInfo) -> bool:
    """Returns whether a field is a number of bytes, which may also be written as `512MiB`."""
    return any(isinstance(one, BeforeValidator) and one.func is parse_bytes for one in _metadata(field))


def _is_time(field: FieldInfo) -> bool:
    """Tells whether a field is of the type Seconds, the only one whose numbers may not be infinite."""
    return any(getattr(one, "allow_inf_nan", None) is False for one in _metadata(field))


def default(field: FieldInfo) -> str:
    """Returns a field's default, in units that people use."""
    if field.is_required():
        return "none; must be given"
    value = field.default
    if value is None:
        return "left out"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"{value:g} s{_longer(value)}" if _is_time(field) else f"`{value:g}`"
    if is_size(field):
        return _amount(value, True)
    return f"`{value}`"


def _longer(seconds: float) -> str:
    for name, size in (("day", 86400), ("hour", 3600)):
        count, rest = divmod(seconds, size)
        if count and not rest:
            return f" ({count:.0f} {name}{'s' if count > 1 else ''})"
    return ""


def _amount(value: float, size: bool) -> str:
    if size:
        for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value and not value % (1 << power):
                return f"{int(value) >> power} {unit}"
        return f"{value:g} byte{'s' if value != 1 else ''}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
