"""The base of every pydantic model here, and the one way a bad value is reported."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Closed(BaseModel):
    """Frozen, closed model: unknown keys are refused, defaults are validated too."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        # pydantic's own messages quote the input, which for a URL may hold a password.
        hide_input_in_errors=True,
        ser_json_bytes="base64",
    )


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence per problem: the key, the value (never a secret's), and what is allowed."""
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"]) or "(the whole)"
        if item["type"] == "extra_forbidden":
            known = _keys_at(model, item["loc"][:-1])
            lines.append(f"unknown key {path!r}; allowed here: {', '.join(known) or 'nothing'}")
            continue
        value = item.get("input")
        message = item["msg"].removeprefix("Value error, ")
        if isinstance(value, str | int | float | bool) and not _is_secret(path):
            lines.append(f"{path} = {redact(value)!r}: {message}")
        else:
            lines.append(f"{path}: {message}")
    return lines


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in path:
        field = current.model_fields.get(part) if hasattr(current, "model_fields") else None
        if field is None:
            return []
        current = field.annotation
    return sorted(getattr(current, "model_fields", {}))


def _is_secret(path: str) -> bool:
    return any(word in path.lower() for word in ("password", "secret", "token", "credential"))


def redact(value: Any) -> Any:
    """`value` fit for a log: the user information and query of a URL are replaced by ***."""
    if not isinstance(value, str) or "://" not in value:
        return value
    scheme, _, rest = value.partition("://")
    authority, slash, tail = rest.partition("/")
    if "@" in authority:
        authority = "***@" + authority.rpartition("@")[2]
    path, question, _query = tail.partition("?")
    return f"{scheme}://{authority}{slash}{path}{'?***' if question else ''}"
