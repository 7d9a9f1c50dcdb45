"""The base of every pydantic model of the project, and the one way in which bad values are reported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

#: Bound of sizes in bytes, dimensions and counts that come from outside. A larger number is surely wrong, and
#: arithmetic with it could take for ever.
MAX_NUMBER = 1 << 40


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys and validates defaults too."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        # pydantic's own messages quote the input, which for a URL may hold a password.
        hide_input_in_errors=True,
        ser_json_bytes="base64",
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # repr() and str() end up in logs and tracebacks, and some fields are URLs with credentials.
        return [(name, redact(value)) for name, value in super().__repr_args__()]


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Returns a sentence per problem: the key, the value (never a secret's), and what is allowed."""
    lines = []
    for item in error.errors(include_url=False):
        # The tag of a union's member is not a key that anyone has written.
        path = ".".join(str(part) for part in item["loc"] if not str(part).startswith("<"))
        if item["type"] == "extra_forbidden":
            known = _keys_at(model, item["loc"][:-1])
            lines.append(f"unknown key {path!r}; allowed here: {', '.join(known) or 'nothing'}")
            continue
        value = item.get("input")
        message = item["msg"].removeprefix("Value error, ")
        if not path:
            lines.append(message)
        elif isinstance(value, str | int | float | bool) and not _is_secret(path):
            lines.append(f"{path} = {redact(value)!r}: {message}")
        else:
            lines.append(f"{path}: {message}")
    return lines


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in path:
        if current is not None and not str(part).startswith("<"):
            field = current.model_fields.get(str(part))
            current = None if field is None else model_of(field.annotation)
    return [] if current is None else sorted(current.model_fields)


def model_of(annotation: Any) -> type[BaseModel] | None:
    """Returns the model that a field's type is or has as an alternative, or None if there is none."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for arg in get_args(annotation) if (found := model_of(arg))), None)


def _is_secret(path: str) -> bool:
    # A value that stands under `signing` by mistake may be a key itself.
    return any(word in path.lower() for word in ("password", "secret", "token", "credential", "signing."))


#: A scheme and its "://"; anything else before that could be part of a password.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}://")
_QUERY = re.compile(r"[?#]")
#: The query of an s3 URL, if it holds nothing but the place.
_PLAIN = re.compile(r"(?:(?:^|&)(?:endpoint=https?(?::|%3[Aa])//[\w.:-]+/?|region=[\w-]+))+")


def redact(value: Any) -> Any:
    """Returns `value` fit for a log: the user information, query and fragment of a URL become ***.

    Works on a text that was merely meant as a URL, too: a password may hold a character that should have been
    escaped, or a colon or slash may be missing. Every part that isn't surely harmless is hidden.
    """
    if not isinstance(value, str):
        return value
    match = _SCHEME.match(value)
    if match is None and "@" not in value:
        return value
    scheme = match[0] if match else ""
    rest = value[len(scheme) :]
    mark = _QUERY.search(rest)
    head, tail = (rest[: mark.start()], rest[mark.end() :]) if mark else (rest, "")
    if "@" in tail:
        # A password with a "?", or a query with an "@": no telling which part is the host.
        return f"{scheme}***"
    _, user, place = head.rpartition("@")
    host, slash, path = place.partition("/")
    if mark and scheme == "s3://" and not user and _PLAIN.fullmatch(tail):
        return value
    return f"{scheme}{'***@' if user else ''}{_shown(host)}{slash}{path}{mark[0] + '***' if mark else ''}"


def _shown(place: str) -> str:
    """Returns one host, or several with commas between; hides what isn't surely a port, and all after it."""
    hosts = place.split(",")
    for number, host in enumerate(hosts):
        name, colon, port = host.rpartition(":")
        plain = port.isdecimal() or port.endswith("]") or not port
        # The second half of a password with a comma and without its "@" looks like a host without a port.
        if not (plain if colon else number == 0 or ":" not in hosts[number - 1]):
            return ",".join([*hosts[:number], f"{name}:***" if colon else "***"])
    return place
