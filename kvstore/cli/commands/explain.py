"""explain: where a prompt's chain stops in the cache, and why."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvstore.admin.explain import (
    explain_digest,
    explain_image,
    explain_request,
    explain_tokens,
)
from kvstore.admin.question import Question
from kvstore.cli import progress, render_explain
from kvstore.cli.call import Call, say, verb

#: A prompt of a million tokens is a few MB.
_MOST_BYTES = 256 << 20
_NUMBER = re.compile(r"\d{1,10}")


def add_to(app: typer.Typer) -> None:
    """Register this command."""
    verb(app.command())(explain)


def explain(
    call: Call,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A prompt's token ids, a JSON list or separated by blanks; - reads stdin."
        ),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="A request by the engine's name of it, or a part of that."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(metavar="IDENTIFIER", help="An encoder input: vLLM's hash of it, or the client's uuid."),
    ] = None,
    digest: Annotated[
        str | None, typer.Option(metavar="HEX", help="A digest, a block hash or a content key.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="In this namespace, by the start of its id. Default: the one that an "
            "engine registered last (--tokens), or all.",
        ),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --tokens: the engines' PYTHONHASHSEED, if they have one."),
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --tokens: the request's cache_salt, if it has one."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and verify the payloads that hold what is stored of it.")
    ] = False,
) -> None:
    """Explain why a prompt, a request, an image or a block is not served from the cache, or that it is.

    One of --tokens, --request, --image and --digest. Says where the chain stops and why: never stored,
    evicted (when and by which rule), in another namespace (and what differs), not admitted, being saved by
    another engine, not saved, not asked for because something was down or late, damaged, invalidated; and how
    far back the journal reaches that it knows this from.

    Token ids are hashed as vLLM does it. Prompts with images or adapters have more in their hashes: ask for
    those by --request or --digest. Exits with 3 if --verify finds damage.
    """
    given = {"--tokens": tokens, "--request": request, "--image": image, "--digest": digest}
    named = [option for option, value in given.items() if value is not None]
    if len(named) != 1:
        raise typer.BadParameter(f"give one of {', '.join(given)}; {', '.join(named) or 'none'} given")
    if tokens is None and (seed is not None or salt is not None):
        raise typer.BadParameter("--seed and --salt belong to --tokens")
    ids = read_tokens(tokens) if tokens is not None else []
    with call.cache() as cache, progress.shown() as shows:
        question = Question(cache, time.time(), verify=verify, progress=shows)
        if request is not None:
            report = explain_request(question, request, namespace=namespace)
        elif image is not None:
            report = explain_image(question, image, namespace=namespace)
        elif digest is not None:
            report = explain_digest(question, digest, namespace=namespace)
        else:
            report = explain_tokens(question, ids, namespace=namespace, seed=seed, salt=salt or "")
    call.print(report, render_explain.explain)
    for remark in report.remarks:
        say(remark)
    call.exit_by(report)


def read_tokens(name: str) -> list[int]:
    """Token ids from a file, or with - from stdin. Raises BadParameter of --tokens."""
    try:
        if name == "-":
            text = sys.stdin.read(_MOST_BYTES)
        else:
            with Path(name).open(encoding="utf-8") as file:
                text = file.read(_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"{name} can't be read: {exc}", param_hint="--tokens") from exc
    ids = _parse(text)
    if ids is None:
        raise typer.BadParameter(
            "token ids are numbers from 0 on: a JSON list such as [1, 15043], or separated by blanks",
            param_hint="--tokens",
        )
    return ids


def _parse(text: str) -> list[int] | None:
    """The numbers, or None if it is anything else."""
    if text.lstrip().startswith("["):
        try:
            made = json.loads(text)
        except (ValueError, RecursionError):
            return None
        words = [str(one) for one in made if type(one) is int]
        if len(words) != len(made):
            return None
    else:
        words = text.split()
    if not all(_NUMBER.fullmatch(word) for word in words):
        return None
    return [int(word) for word in words]
