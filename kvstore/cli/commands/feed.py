"""feed: the index's events as the KV events that routers read."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from kvstore.admin.feed.reports import FeedReport
from kvstore.admin.serve.exposed import exposed
from kvstore.cli.call import Call, say
from kvstore.cli.exits import ExitCode, of_report
from kvstore.cli.running import logged, place, until_told
from kvstore.cli.verbs import verb
from kvstore.errors import ConfigError

_PORT = 9465


@verb(
    "feed",
    section="Maintain",
    examples=(
        "cache-admin feed --publish 'tcp://*:5557' --replay 'tcp://*:5558'",
        "cache-admin feed --model meta-llama/Llama-3.1-8B --engine tcp://engine-0:5557 --engine tcp://engine-1:5557",
        "cache-admin feed --topic kv@kvstore@meta-llama/Llama-3.1-8B --listen 0.0.0.0:9465",
        "cache-admin feed --once --json | jq .blocks",
    ),
    see_also=("events", "serve"),
)
def _feed(
    call: Call,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model, as its namespaces name it; needed if there are several."
        ),
    ] = None,
    publish: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where routers subscribe: a ZeroMQ address to bind.")
    ] = "tcp://127.0.0.1:5557",
    replay: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Where routers ask for what they missed. Default: nowhere."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where an engine publishes its own KV events, of which tokens and parents are taken; may be "
            "given more than once. One with a * is bound, for engines that connect.",
        ),
    ] = None,
    topic: Annotated[
        str, typer.Option(metavar="TEXT", help="The topic of all messages: kv@NAME@MODEL for llm-d.")
    ] = "",
    hashes: Annotated[
        str,
        typer.Option(
            metavar="int|bytes",
            help="How engines name blocks: bytes if they run with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.",
        ),
    ] = "int",
    ownership: Annotated[
        bool,
        typer.Option(
            "--ownership/--no-ownership",
            help="Name the namespace as the owner of its blocks. Dynamo 1.6 drops events that name one.",
        ),
    ] = True,
    blocks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most blocks that are announced and remembered.")
    ] = 1_000_000,
    every: Annotated[
        float, typer.Option(min=0.01, max=5.0, metavar="SECONDS", help="How often the index is asked.")
    ] = 0.2,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where /metrics and /healthz are served. Default: nowhere."),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Read everything, print what would be announced, and end; tells nobody."),
    ] = False,
) -> None:
    """Tell routers what the store holds, as KV events like an engine's own, until it is stopped.

    Blocks of the store belong to no engine: any that serves the namespace can load them. Events carry vLLM's
    hashes, so that a router can join them with engines' events; tokens and parents, which the index doesn't
    know, are taken from engines' events (--engine). A router that starts late, or missed something, is sent
    what it missed or a snapshot. Needs the extra `feed`: pyzmq and msgspec, which vLLM brings.
    """
    if hashes not in ("int", "bytes"):
        raise typer.BadParameter(f"{hashes!r} is neither int nor bytes", param_hint="--hashes")
    try:
        # ZeroMQ is for this verb alone.
        from kvstore.admin.feed.feed import Choice, RouterFeed
        from kvstore.admin.feed.metrics import metrics_of
        from kvstore.admin.feed.sockets import Sockets
    except ImportError as exc:
        raise ConfigError(f"{exc.name} is not installed: the extra `feed` is pyzmq and msgspec") from exc
    choice = Choice(model, hashes == "bytes", ownership, blocks)
    with call.cache() as cache, logged():
        if once:
            looked = RouterFeed(cache, choice, None)
            looked.turn(0)
            _end(call, looked.last)
            return
        sockets = Sockets(publish, replay, engine or (), topic=topic)
        with until_told() as stop, ExitStack() as open_, RouterFeed(cache, choice, sockets) as running:
            where = sockets.addresses
            if listen is not None:
                listener = exposed(*place(listen, _PORT), lambda: metrics_of(running.last), running.turning)
                open_.callback(listener.close)
                where.append(listener.url)
            say(f"publishing at {', '.join(where)}")
            while not stop.is_set():
                running.turn(every)
        _end(call, running.last)


def _end(call: Call, report: FeedReport) -> None:
    call.print(report)
    call.end(report)


@of_report.register
def _of_feed(report: FeedReport) -> ExitCode:
    return ExitCode.UNREACHABLE if report.problem else ExitCode.OK
