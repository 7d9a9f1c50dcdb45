"""evict, pin, unpin, quota: what stays and what goes. Each only says what it would do, until --apply."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvstore import admin
from kvstore.cli import progress, render_upkeep
from kvstore.cli.call import Call, byte_count, say, seconds_of, verb
from kvstore.cli.commands.explain import read_tokens
from schemas.upkeep import PinReport, QuotaReport

Segments = Annotated[
    list[str] | None,
    typer.Argument(metavar="SEGMENT...", help="Segments, by the start of their ids (`cache-admin ls`)."),
]
Within = Annotated[
    str | None,
    typer.Option("--namespace", metavar="ID", help="Only of this namespace, by the start of its id."),
]
Apply = Annotated[bool, typer.Option("--apply", help="Do it. Without this nothing is changed.")]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    for command in (evict, pin, unpin):
        verb(app.command())(command)
    below = typer.Typer(help="Show what the store, tenants and namespaces may hold, and what of it is used.")
    verb(below.callback(invoke_without_command=True))(quota)
    verb(below.command("set"))(quota_set)
    verb(below.command("clear"))(quota_clear)
    app.add_typer(below, name="quota")


def evict(
    call: Call,
    segments: Segments = None,
    namespace: Within = None,
    unused_for: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="All that was not used for so long, such as 90m, 12h or 7d."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What goes first, until at most so much is left, such as 50GiB."),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned segments as well.")] = False,
    apply: Apply = False,
) -> None:
    """Evict segments: these, or what was not used for a time, or down to a size.

    What is evicted can't be matched from that moment on. Its payload is deleted after grace_s, by an engine
    that saves or by `cache-admin serve`. What is used between the plan and its turn is spared, unless it was
    named. Of one prompt's blocks the last ones go first, so that what is left is of use; with segments that
    are named, seeing to that is left to you. To forget everything at once: `cache-admin invalidate`.
    """
    if sum((bool(segments), unused_for is not None, keep is not None)) != 1:
        raise typer.BadParameter("say what is to go: SEGMENT..., or --unused-for TIME, or --keep SIZE")
    if keep is not None and pinned:
        raise typer.BadParameter("--keep leaves pinned segments alone; unpin them", param_hint="--pinned")
    unused_for_s = None if unused_for is None else seconds_of("--unused-for", unused_for)
    keep_bytes = None if keep is None else byte_count("--keep", keep)
    now = time.time()
    with call.cache() as cache, progress.shown() as shows:
        if segments:
            plan = admin.plan_segments(cache, segments, namespace, pinned=pinned)
        elif unused_for_s is not None:
            plan = admin.plan_unused(cache, namespace, unused_for_s=unused_for_s, pinned=pinned, now_s=now)
        else:
            assert keep_bytes is not None, "it is one of the three"
            plan = admin.plan_keep(cache, namespace, keep_bytes=keep_bytes, now_s=now)
        report = admin.evict(cache, plan, applied=apply, now_s=now, progress=shows)
    call.print(report, render_upkeep.evict)
    if report.problem:
        say(report.problem)
    _remind(applied=apply, anything=report.planned.segments > 0)
    call.exit_by(report)


def pin(
    call: Call,
    segments: Segments = None,
    namespace: Within = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --namespace: all that begins within the first N blocks of its chain, where shared "
            "prompts are.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --namespace: all that holds this prompt's blocks, given as token ids, a JSON list or "
            "separated by blanks; - reads stdin.",
        ),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --tokens: the engines' PYTHONHASHSEED, if they have one."),
    ] = None,
    salt: Annotated[
        str, typer.Option(metavar="TEXT", help="With --tokens: the requests' cache_salt, if they have one.")
    ] = "",
    apply: Apply = False,
) -> None:
    """Keep segments from being evicted by a quota; without arguments, list what is pinned.

    At most eviction.pinned_share of every quota that bounds a namespace can be pinned; what is beyond that is
    left out, tails first, and the exit code is 4, or 3 if nothing remains. `evict --pinned`, `invalidate` and
    a repair remove pinned segments all the same.
    """
    now = time.time()
    ways = sum((bool(segments), depth is not None, tokens is not None))
    if ways > 1:
        raise typer.BadParameter("give one of SEGMENT..., --depth and --tokens")
    if (depth is not None or tokens is not None) and namespace is None:
        raise typer.BadParameter("--depth and --tokens go with --namespace ID")
    if tokens is None and (seed is not None or salt):
        raise typer.BadParameter("--seed and --salt belong to --tokens")
    if not ways:
        if apply:
            raise typer.BadParameter(
                "say what to pin: SEGMENT..., or --namespace ID with --depth or --tokens"
            )
        with call.cache() as cache:
            found = admin.pins(cache, namespace, now)
        call.print(found, render_upkeep.pins)
        return
    ids = read_tokens(tokens) if tokens is not None else []
    with call.cache() as cache:
        if tokens is not None and namespace is not None:
            chosen = admin.choose_prompt(cache, namespace, ids, seed=seed, salt=salt)
        else:
            chosen = admin.choose(cache, segments or [], namespace, depth)
        report = admin.pin(cache, chosen, applied=apply, now_s=now)
    _end_pin(call, report)


def unpin(
    call: Call,
    segments: Segments = None,
    namespace: Within = None,
    every: Annotated[
        bool, typer.Option("--all", help="All that is pinned, in all namespaces or the one given.")
    ] = False,
    apply: Apply = False,
) -> None:
    """Let quotas evict segments again, by their last use."""
    if bool(segments) == every:
        raise typer.BadParameter("say what to unpin: SEGMENT..., or --all")
    now = time.time()
    with call.cache() as cache:
        if every:
            chosen = admin.pinned(cache, namespace)
        else:
            chosen = admin.choose(cache, segments or [], namespace, None)
        report = admin.unpin(cache, chosen, applied=apply, now_s=now)
    _end_pin(call, report)


def _end_pin(call: Call, report: PinReport) -> None:
    call.print(report, render_upkeep.pinned)
    if report.problem:
        say(report.problem)
    _remind(applied=report.applied, anything=report.planned.segments > 0)
    call.exit_by(report)


def quota(call: Call) -> None:
    """Show what the store, tenants and namespaces may hold, and what of it is used.

    A quota counts bytes of payload, and is the settings' (capacity_bytes, eviction.tenant_bytes,
    eviction.namespace_bytes) until one is set with `quota set`, which all engines and janitors obey.
    """
    with call.cache() as cache:
        report = admin.quotas(cache, time.time())
    call.print(report, render_upkeep.quotas)


Scope = Annotated[
    str,
    typer.Argument(metavar="SCOPE", help="store, tenant/NAME, or namespace/ID by the start of the id."),
]


def quota_set(
    call: Call,
    scope: Scope,
    nbytes: Annotated[str, typer.Argument(metavar="SIZE", help="Bytes of payload, such as 200GiB.")],
    apply: Apply = False,
) -> None:
    """Set the quota of a scope, over whatever the settings say.

    Nothing is evicted by this itself: engines do when they save, and `cache-admin serve` in its next round.
    """
    most = byte_count("SIZE", nbytes)
    with call.cache() as cache:
        report = admin.set_quota(cache, scope, most, applied=apply, now_s=time.time())
    _end_quota(call, report)


def quota_clear(call: Call, scope: Scope, apply: Apply = False) -> None:
    """Forget the quota that was set for a scope: the settings' holds again."""
    with call.cache() as cache:
        report = admin.set_quota(cache, scope, None, applied=apply, now_s=time.time())
    _end_quota(call, report)


def _end_quota(call: Call, report: QuotaReport) -> None:
    call.print(report, render_upkeep.quota)
    _remind(applied=report.applied, anything=True)


def _remind(*, applied: bool, anything: bool) -> None:
    if not applied and anything:
        say("nothing was changed; --apply does it")
