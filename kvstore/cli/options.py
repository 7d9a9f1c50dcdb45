"""Options that several verbs take, and words of the command line as values."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kvstore.rules.text import readable
from schemas.settings import parse_bytes

Namespace = Annotated[
    str | None,
    typer.Argument(metavar="NAMESPACE", help="The start of a namespace's id. Default: all of them."),
]
Namespaces = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAMESPACE...", help="Starts of namespaces' ids. Default: all of them."),
]
Segments = Annotated[
    list[str] | None,
    typer.Argument(metavar="SEGMENT...", help="Segments, by the start of their ids (`cache-admin ls`)."),
]
Apply = Annotated[bool, typer.Option("--apply", help="Do it. Default: only say what would be done.")]
MaxBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="At most so much, such as 50GiB: the most recently used."),
]
PromptSalt = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="With --tokens: the requests' cache_salt, if they have one, as `erase --salt-file` takes it.",
    ),
]

#: A prompt of a million tokens is a few MB.
_MOST_BYTES = 256 << 20
#: A salt is a word; servers take 128 characters.
_MOST_SALT = 1 << 20
_HASH = re.compile(r"(?:[0-9a-fA-F]{2}){16,32}")
_NUMBER = re.compile(r"\d{1,10}")


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    """Returns `value`, which must be one of those. Raises BadParameter."""
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}", param_hint=option)
    return value


def byte_count(option: str, text: str) -> int:
    """Returns a size such as 50GiB in bytes. Raises BadParameter."""
    try:
        nbytes = parse_bytes(text)
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is {exc}", param_hint=option) from exc
    assert isinstance(nbytes, int), "of a string it makes a number"
    if not 0 < nbytes <= 1 << 60:
        wrong = "less than one byte" if nbytes < 1 else "more than 1 EiB"
        raise typer.BadParameter(f"{text!r} is no size here: {wrong}", param_hint=option)
    return nbytes


_TIME = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([smhdw]?)")
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds_of(option: str, text: str) -> float:
    """Returns a time such as 30m, 12h or 1w in seconds. Raises BadParameter."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time such as 30m, 12h, 7d or 1w", param_hint=option)
    return float(match[1]) * _UNITS_S[match[2]]


def moment_of(option: str, text: str, now_s: float) -> float:
    """Returns a time such as 24h (ago) or 2026-11-01T08:00 (UTC, unless it says otherwise) in unix seconds.
    Raises BadParameter."""
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        return now_s - seconds_of(option, text)
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def read_tokens(name: str) -> list[int]:
    """Reads token ids from a file, or with - from stdin. Raises BadParameter of --tokens."""
    ids = _parse(read_text("--tokens", name))
    if ids is None:
        raise typer.BadParameter(
            "token ids are numbers from 0 on: a JSON list such as [1, 15043], separated by blanks, or the "
            "answer of an engine's /tokenize",
            param_hint="--tokens",
        )
    return ids


def read_hashes(name: str) -> list[bytes]:
    """Reads block hashes from a file, or with - from stdin. Raises BadParameter of --hashes."""
    words = re.findall(r"[^\s\[\],\"]+", read_text("--hashes", name))
    if not words or not all(_HASH.fullmatch(word) for word in words):
        raise typer.BadParameter(
            "block hashes are of 32 to 64 hex digits each: a JSON list, or separated by blanks",
            param_hint="--hashes",
        )
    return [bytes.fromhex(word) for word in words]


def read_text(option: str, name: str) -> str:
    """Reads a file's text, or with - that of stdin. Raises BadParameter of the option."""
    try:
        if name == "-":
            return sys.stdin.read(_MOST_BYTES)
        with Path(name).open(encoding="utf-8") as file:
            return file.read(_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"{readable(name)} can't be read: {exc}", param_hint=option) from exc


def read_prompt(tokens: str | None, seed: str | None, salt_file: str | None) -> tuple[list[int], str]:
    """Returns the token ids and the salt of a prompt, none without `tokens`. Raises BadParameter.

    A salt comes in a file: what stands on the command line, everybody on the machine can read.
    """
    if tokens is None and (seed is not None or salt_file is not None):
        raise typer.BadParameter("--seed and --salt-file belong to --tokens")
    if tokens == salt_file == "-":
        raise typer.BadParameter("--tokens and --salt-file can't both be on stdin")
    return [] if tokens is None else read_tokens(tokens), "" if salt_file is None else read_salt(salt_file)


def read_salt(name: str) -> str:
    """Reads a salt from a file, or with - from stdin, less one newline at its end. Raises BadParameter of
    --salt-file, which never quotes what was read.
    """
    try:
        if name == "-":
            read = sys.stdin.buffer.read(_MOST_SALT + 1)
        else:
            with Path(name).open("rb") as file:
                read = file.read(_MOST_SALT + 1)
        text = read.removesuffix(b"\n").decode("utf-8", "surrogatepass")
    except OSError as exc:
        raise typer.BadParameter(
            f"{readable(name)} can't be read: {exc.strerror or type(exc).__name__}", param_hint="--salt-file"
        ) from exc
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{readable(name)} is not in UTF-8", param_hint="--salt-file") from None
    if not text or len(read) > _MOST_SALT:
        wrong = "holds no salt" if not text else f"holds more than {_MOST_SALT} bytes"
        raise typer.BadParameter(f"{readable(name)} {wrong}", param_hint="--salt-file")
    return text


def _parse(text: str) -> list[int] | None:
    """Returns the numbers, or None if it is anything else."""
    if text.lstrip().startswith(("[", "{")):
        try:
            made = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if isinstance(made, dict):
            made = made.get("tokens")
        if not isinstance(made, list):
            return None
        words = [str(one) for one in made if type(one) is int]
        if len(words) != len(made):
            return None
    else:
        words = text.split()
    if not all(_NUMBER.fullmatch(word) for word in words):
        return None
    return [int(word) for word in words]
