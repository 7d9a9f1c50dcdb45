"""advise: whether a cache pays, which, and what to set."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from kvstore.admin.advise import advise
from kvstore.admin.advise.reports import PriceList, ReadSpeed
from kvstore.admin.advise.worth import Given
from kvstore.admin.bench.reports import BenchReport
from kvstore.admin.simulate.traces import Assumed
from kvstore.cli import progress
from kvstore.cli.call import Call, say
from kvstore.cli.options import byte_count, moment_of
from kvstore.cli.text import advise as advise_text
from kvstore.cli.verbs import verb
from kvstore.rules.text import readable
from schemas.base import explain
from schemas.settings import Settings

#: A report of bench is some KB.
_MOST_REPORT = 16 << 20
#: List prices of S3 Standard in us-east-1, and a GPU hour of nobody in particular (docs/production.md).
ASSUMED = {
    "gpu_hour": 3.0,
    "gb_month": 0.023,
    "put_1000": 0.005,
    "get_1000": 0.0004,
    "upload_gb": 0.0,
    "download_gb": 0.0,
}
_INDEX, _PAYLOADS = "redis://redis:6379/0", "s3://my-bucket/kvstore"


@verb(
    "advise",
    section="Understand",
    examples=(
        "cache-admin advise /var/log/kvstore-trace --gpu-hour 2.50 --html advice.html",
        "cache-admin advise trace.jsonl --prefill-tokens-s 10000 --gpus 4 --bench bench.json",
        "cache-admin advise /var/log/kvstore-trace --json",
        "cache-admin advise /var/log/kvstore-trace --since 24h --gpu-hour 2.50",
    ),
    see_also=("simulate", "bench", "vllm-config"),
)
def _advise(
    call: Call,
    recordings: Annotated[
        list[str],
        typer.Argument(
            metavar="RECORDING...",
            help="Files that engines have recorded (settings: kv.observe, trace), or of Mooncake's form; or "
            "folders of *.jsonl.",
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only requests from then on, such as 24h, 7d or 2026-11-01."),
    ] = None,
    gpu_hour: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Of one GPU for an hour. Default: 3.")
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
    gb_month: Annotated[
        float | None,
        typer.Option(min=0, metavar="PRICE", help="Of storage, per GB and month. Default: 0.023."),
    ] = None,
    put_1000: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Of 1,000 PUTs. Default: 0.005.")
    ] = None,
    get_1000: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Of 1,000 GETs. Default: 0.0004.")
    ] = None,
    upload_gb: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Of a GB uploaded. Default: 0.")
    ] = None,
    download_gb: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Of a GB downloaded. Default: 0.")
    ] = None,
    bench: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What `cache-admin bench --json` has measured here."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes that a node reads in a second, such as 1GiB."),
    ] = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of a block, of all ranks together, as for `simulate`."),
    ] = None,
    block_tokens: Annotated[
        int,
        typer.Option(min=1, max=1 << 20, metavar="N", help="Tokens of a block in traces of Mooncake's form."),
    ] = 512,
    points: Annotated[int, typer.Option(min=2, max=100, metavar="N", help="Capacities that are tried.")] = 12,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a page of HTML, whole by itself.", show_default=False),
    ] = None,
) -> None:
    """Say from a recording of requests whether a shared cache pays, how large it should be, and what to set.

    Weighs the GPU time that hits save against storage, requests and transfer, at your prices, for capacities
    up to all that was asked for; says from which bandwidth on loading is faster than computing, how large
    Redis must be, and the settings to paste, or why not. Needs no cache; --index and --payloads go into those
    settings.
    """
    from_s = None if since is None else moment_of("--since", since, time.time())
    given = {
        "gpu_hour": gpu_hour,
        "gb_month": gb_month,
        "put_1000": put_1000,
        "get_1000": get_1000,
        "upload_gb": upload_gb,
        "download_gb": download_gb,
    }
    known = {name: value for name, value in given.items() if value is not None}
    prices = PriceList(**(ASSUMED | known), assumed=tuple(sorted(ASSUMED.keys() - known)))
    index, payloads = _pasted(call.sources.index or _INDEX, call.sources.payloads or _PAYLOADS)
    question = advise.Question(
        settings=replace(call.sources, index="memory://advice", payloads="memory://advice").settings(),
        given=Given(prices, gpus, prefill_tokens_s, None if encode_ms is None else encode_ms / 1000),
        index=index,
        payloads=payloads,
        reads=[*_measured(bench), *_said(bandwidth)],
        points=points,
    )
    assumed = Assumed(None if block_bytes is None else byte_count("--block-bytes", block_bytes), block_tokens)
    with progress.shown() as shows:
        report = advise.advise([Path(one) for one in recordings], assumed, question, shows, since_s=from_s)
    if html is not None:
        _write(html, advise_text.page(report))
    call.print(report, advise_text.advise)


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


def _said(bandwidth: str | None) -> list[ReadSpeed]:
    if bandwidth is None:
        return []
    return [ReadSpeed(tier="as given", bytes_s=byte_count("--bandwidth", bandwidth))]


def _measured(path: str | None) -> list[ReadSpeed]:
    """Returns what bench has measured of each tier."""
    if path is None:
        return []
    try:
        with Path(path).open("rb") as file:
            report = BenchReport.model_validate_json(file.read(_MOST_REPORT))
    except OSError as exc:
        raise typer.BadParameter(f"{readable(path)}: {exc.strerror}", param_hint="--bench") from exc
    except ValidationError:
        what = "is no report of `cache-admin bench --json` of this release"
        raise typer.BadParameter(f"{readable(path)} {what}", param_hint="--bench") from None
    return [ReadSpeed(tier=one.tier, bytes_s=one.bytes_s) for one in report.speeds if one.operation == "get"]


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise typer.BadParameter(f"{readable(path)}: {exc.strerror}", param_hint="--html") from exc
    say(f"page written to {path}")
