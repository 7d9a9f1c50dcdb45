"""advise: whether a cache pays, or a larger one, and what to set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from pydantic import ValidationError

from kvstore.admin.advise.advise import advise
from kvstore.admin.advise.remembered import remembered
from kvstore.admin.advise.reports import Policy, PriceList
from kvstore.admin.advise.traces import Assumed
from kvstore.admin.advise.worth import Question
from kvstore.cli import progress
from kvstore.cli.call import Call, say
from kvstore.cli.options import byte_count, moment_of, one_of
from kvstore.cli.text import advise as advise_text
from kvstore.cli.verbs import verb
from kvstore.rules.text import readable
from schemas.base import explain
from schemas.settings import Settings

_INDEX, _PAYLOADS = "redis://redis:6379/0", "s3://my-bucket/kvstore"
#: The names of prices as options have them, with the defaults.
_PRICES = {
    name.replace("_", "-"): default for name, default in PriceList().model_dump(exclude={"assumed"}).items()
}
_COMPARED = get_args(Policy)[2:]


@verb(
    "advise",
    section="Understand",
    examples=(
        "cache-admin advise /var/log/kvstore-trace --price gpu-hour=2.50 --html advice.html",
        "cache-admin advise /var/log/kvstore-trace --since 24h --bandwidth 2GiB --json",
        "cache-admin advise trace.jsonl --block-bytes 64MiB --prefill-tokens-s 10000 --gpus 4",
        "cache-admin advise trace.jsonl --capacity 1TiB,2TiB --compare told-ends,lru,optimum",
        "cache-admin advise --capacity 1TiB,2TiB",
    ),
    see_also=("bench", "stats", "quota set", "vllm-config"),
)
def _advise(
    call: Call,
    recordings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECORDING...",
            help="Files that engines have recorded (settings: kv.observe, trace), or of Mooncake's form; or "
            "folders of *.jsonl. Default: what the index remembers.",
        ),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE,...",
            help="Capacities to try; may be repeated. Default: a dozen, from 1% of the bytes of different "
            "blocks to all of them; without a RECORDING, the present one to three times as much.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY,...",
            help="Policies beside this store's own: told (with what the trace says of sessions), told-ends "
            "(as if it said which request is a session's last), lru and fifo (of single blocks), optimum "
            "(knows what will be asked for). Default: lru,optimum.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only requests from then on, such as 24h, 7d or 2026-11-01."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,...",
            help="Prices that you pay; may be repeated. Default: "
            + ", ".join(f"{name}={default:g}" for name, default in _PRICES.items())
            + ".",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 14,
            metavar="N",
            help="GPUs of an engine. Default: as it was recorded, or else as many as hold a block.",
        ),
    ] = None,
    prefill_tokens_s: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="N",
            help="Tokens of prompts that an engine computes in a second. Default: as it was recorded.",
        ),
    ] = None,
    encode_ms: Annotated[
        float | None,
        typer.Option(min=0, metavar="N", help="Milliseconds that encoding an item takes."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Bytes that a node reads in a second, such as 1GiB (`cache-admin bench`)."
        ),
    ] = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes of a block, of all ranks together. Default: what the trace says; where it doesn't, "
            "128 KiB a token (Llama-3-8B in bf16).",
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            metavar="N",
            help="Tokens of a block in traces of Mooncake's form. Default: 512.",
        ),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a page of HTML, whole by itself.", show_default=False),
    ] = None,
) -> None:
    """Say whether a shared cache pays, how large it should be, and what to set.

    With a recording, weighs the GPU time that hits save against storage, requests and transfer, at your
    prices, by capacity; gives the hit ratio of other policies; says from which bandwidth on loading is faster
    than computing, how large Redis must be, and the settings to paste, or why not. That needs no cache:
    --index and --payloads go into those settings, and settings of segments, admission and sessions count.

    Without one, estimates what more capacity would have brought, from what the index remembers of evicted
    segments.
    """
    sizes = [byte_count("--capacity", one) for text in capacity or () for one in text.split(",")]
    if recordings:
        index, payloads = _pasted(call.sources.index or _INDEX, call.sources.payloads or _PAYLOADS)
        question = Question(
            settings=replace(call.sources, index="memory://advice", payloads="memory://advice").settings(),
            prices=_prices(price or ()),
            index=index,
            payloads=payloads,
            gpus=gpus,
            prefill_tokens_s=prefill_tokens_s,
            encode_s=None if encode_ms is None else encode_ms / 1000,
            bandwidth=None if bandwidth is None else byte_count("--bandwidth", bandwidth),
            capacities=sizes,
            compare=_policies(compare or "lru,optimum"),
        )
        assumed = Assumed(
            None if block_bytes is None else byte_count("--block-bytes", block_bytes), block_tokens or 512
        )
        from_s = None if since is None else moment_of("--since", since, time.time())
        with progress.shown() as shows:
            report = advise([Path(one) for one in recordings], assumed, question, shows, since_s=from_s)
    elif any(
        (compare, since, price, gpus, prefill_tokens_s, encode_ms, bandwidth, block_bytes, block_tokens)
    ):
        raise typer.BadParameter("--capacity and --html alone count without a RECORDING")
    else:
        with call.cache() as cache:
            report = remembered(cache, sizes)
    if html is not None:
        _write(html, advise_text.page(report))
    call.print(report, advise_text.advise)


def _prices(texts: Sequence[str]) -> PriceList:
    given: dict[str, Any] = {}
    for one in ",".join(texts).split(",") if texts else ():
        name, _, amount = one.partition("=")
        given[one_of("--price", name.strip(), tuple(_PRICES)).replace("-", "_")] = amount
    try:
        return PriceList(**given, assumed=tuple(sorted({*PriceList.model_fields} - {*given, "assumed"})))
    except ValidationError as exc:
        raise typer.BadParameter("; ".join(explain(exc, PriceList)), param_hint="--price") from None


def _policies(text: str) -> Sequence[Policy]:
    return cast(
        "Sequence[Policy]", [one_of("--compare", name.strip(), _COMPARED) for name in text.split(",")]
    )


def _pasted(index: str, payloads: str) -> tuple[str, str]:
    """Returns the URLs as the settings to paste have them, which are shown and mailed: without who logs in.
    Refuses what settings would refuse, before a recording is read."""
    try:
        Settings.model_validate({"index": index, "payloads": payloads})
    except ValidationError as exc:
        hint = "--index, --payloads"
        raise typer.BadParameter("; ".join(explain(exc, Settings)), param_hint=hint) from None
    return _anonymous(index), _anonymous(payloads)


def _anonymous(url: str) -> str:
    """Returns a valid URL, of which nothing but the user information is secret, without that."""
    scheme, mark, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    _, at, host = authority.rpartition("@")
    return f"{scheme}{mark}{'***@' if at else ''}{host}{slash}{path}"


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise typer.BadParameter(f"{readable(path)}: {exc.strerror}", param_hint="--html") from exc
    say(f"page written to {path}")
