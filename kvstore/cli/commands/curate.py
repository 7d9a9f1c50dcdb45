"""pin, unpin, quota, sessions: what stays; warm: what is near.

What keeps something, or lets it go, only says what it would do, until --apply.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal, cast, get_args

import typer

from kvstore.admin.curate import pin, plan, quota, sessions, warm
from kvstore.admin.curate.prompts import StoredPrompt, plan_prompt
from kvstore.admin.curate.reports import PinReport, PromptFound, QuotaReport, SessionLine, WarmReport
from kvstore.cli import progress
from kvstore.cli.call import Call, remind
from kvstore.cli.commands.archive import of_moved
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.options import (
    Apply,
    MaxBytes,
    Namespaces,
    PromptSalt,
    Segments,
    Within,
    byte_count,
    one_of,
    read_hashes,
    read_prompt,
    read_salt,
    seconds_of,
)
from kvstore.cli.text import curate as curate_text
from kvstore.cli.verbs import verb
from kvstore.index.sessions import LONGEST_RETAINED_S, SessionState
from kvstore.keys import NO_SALT, salt_id, session_id

#: Sessions that are listed, unless more or fewer are asked for.
_LISTED = 50

Scope = Annotated[
    str,
    typer.Argument(
        metavar="SCOPE",
        help="store, tenant/NAME, namespace/ID by the start of the id, or salt/ID, in each namespace.",
    ),
]
SessionId = Annotated[
    str | None, typer.Argument(metavar="ID", help="The session, by its id or the start of it.")
]
SessionName = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="The session, by the name that its client gives it."),
]
SessionSalt = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="With --name: the requests' cache_salt, if they have one, as `erase --salt-file` takes it.",
    ),
]


@verb(
    "pin",
    section="Maintain",
    examples=(
        "cache-admin pin",
        "cache-admin pin --namespace 8a74e0fa --depth 64 --apply",
        "cache-admin pin --namespace 8a74e0fa --tokens system-prompt.json --apply",
        "cache-admin top --json | jq -r '.hottest[].segment' | xargs cache-admin pin --apply",
    ),
    see_also=("unpin", "top", "quota"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _pin(
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
    salt_file: PromptSalt = None,
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
    ids, salt = read_prompt(tokens, seed, salt_file)
    if not ways:
        if apply:
            raise typer.BadParameter(
                "say what to pin: SEGMENT..., or --namespace ID with --depth or --tokens"
            )
        with call.cache() as cache:
            found = pin.pins(cache, namespace, now)
        call.print(found)
        return
    with call.cache() as cache:
        if tokens is not None and namespace is not None:
            chosen = pin.choose_prompt(cache, namespace, ids, seed=seed, salt=salt)
        else:
            chosen = pin.choose(cache, segments or [], namespace, depth)
        report = pin.pin(cache, chosen, applied=apply, now_s=now)
    _end_pin(call, report)


@verb(
    "unpin",
    section="Maintain",
    examples=("cache-admin unpin cdf5c6c46cc04768 --apply", "cache-admin unpin --all --namespace 8a74e0fa"),
    see_also=("pin", "evict"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _unpin(
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
            chosen = pin.pinned(cache, namespace)
        else:
            chosen = pin.choose(cache, segments or [], namespace, None)
        report = pin.unpin(cache, chosen, applied=apply, now_s=now)
    _end_pin(call, report)


def _end_pin(call: Call, report: PinReport) -> None:
    call.print(report)
    remind(applied=report.applied, anything=report.planned.segments > 0)
    call.end(report)


@verb(
    "quota",
    section="Maintain",
    examples=("cache-admin quota", "cache-admin quota --json | jq '.quotas[] | select(.state != \"ok\")'"),
    see_also=("quota set", "quota clear", "status"),
)
def _quota(call: Call) -> None:
    """Show what the store, tenants and namespaces may hold, and what of it is used.

    A quota counts bytes of payload, and is the settings' (capacity_bytes, eviction.tenant_bytes,
    eviction.namespace_bytes, eviction.salt_bytes) until one is set with `quota set`, which all engines and
    janitors obey. A salt's holds in each namespace by itself; that of the settings is not listed.
    """
    with call.cache() as cache:
        report = quota.quotas(cache, time.time())
    call.print(report, curate_text.quotas)


@verb(
    "quota set",
    section="Maintain",
    examples=(
        "cache-admin quota set store 2TiB --apply",
        "cache-admin quota set tenant/search 200GiB",
        "cache-admin quota set namespace/8a74e0fa 50GiB --apply",
    ),
    see_also=("quota", "quota clear", "advise"),
)
def _quota_set(
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
        report = quota.set_quota(cache, scope, most, applied=apply, now_s=time.time())
    _end_quota(call, report)


@verb(
    "quota clear",
    section="Maintain",
    examples=("cache-admin quota clear tenant/search --apply",),
    see_also=("quota", "quota set"),
)
def _quota_clear(call: Call, scope: Scope, apply: Apply = False) -> None:
    """Forget the quota that was set for a scope: the settings' holds again."""
    with call.cache() as cache:
        report = quota.set_quota(cache, scope, None, applied=apply, now_s=time.time())
    _end_quota(call, report)


def _end_quota(call: Call, report: QuotaReport) -> None:
    call.print(report)
    remind(applied=report.applied, anything=True)


@verb(
    "sessions",
    section="Maintain",
    examples=("cache-admin sessions", "cache-admin sessions --state retained --limit 1000 --json"),
    see_also=("sessions end", "sessions retain", "quota"),
)
def _sessions(
    call: Call,
    namespace: Within = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only those that are live, retained or ended.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, metavar="N", help="So many at most. Default: 50.")
    ] = None,
) -> None:
    """List clients' sessions: those that own most bytes, what only they have used, and until when it stays.

    Sessions are named by their clients (vLLM's session_id); the index knows 16 bytes of a digest of the salt
    and the name.
    """
    wanted = None if state is None else one_of("--state", state, get_args(SessionState))
    with call.cache() as cache:
        most = _LISTED if limit is None else limit
        report = sessions.sessions(cache, namespace, cast("SessionState | None", wanted), most, time.time())
    call.print(report)


@verb(
    "sessions end",
    section="Maintain",
    examples=(
        "cache-admin sessions end --name user-81/trip-planner --apply",
        "cache-admin sessions end 5c2f1ab09d3e4f60718293a4b5c6d70b",
    ),
    see_also=("sessions", "sessions retain", "evict"),
)
def _sessions_end(
    call: Call,
    session: SessionId = None,
    name: SessionName = None,
    salt_file: SessionSalt = None,
    namespace: Within = None,
    apply: Apply = False,
) -> None:
    """End a session: what only it has used goes before all else.

    Nothing is deleted by this itself. A later request of the session makes what it uses like any other again.
    """
    _tell(call, "end", session, name, salt_file, namespace, apply=apply)


@verb(
    "sessions retain",
    section="Maintain",
    examples=("cache-admin sessions retain --name user-81/trip-planner --for 2h --apply",),
    see_also=("sessions", "sessions end", "pin"),
)
def _sessions_retain(
    call: Call,
    session: SessionId = None,
    name: SessionName = None,
    salt_file: SessionSalt = None,
    seconds: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Such as 10m or 2h, at most a day.")
    ] = "1h",
    namespace: Within = None,
    apply: Apply = False,
) -> None:
    """Retain a session: what only it has used goes after all else, for a time, and then as before.

    At most sessions.retain_share of every quota that bounds a namespace can be retained, tails are left out.
    """
    for_s = seconds_of("--for", seconds)
    if not 0 < for_s <= LONGEST_RETAINED_S:
        raise typer.BadParameter(f"{seconds!r} is not within a day", param_hint="--for")
    _tell(call, "retain", session, name, salt_file, namespace, apply=apply, for_s=for_s)


def _tell(
    call: Call,
    action: Literal["end", "retain"],
    wanted: str | None,
    name: str | None,
    salt_file: str | None,
    namespace: str | None,
    *,
    apply: bool,
    for_s: float = 0.0,
) -> None:
    if (wanted is None) == (name is None):
        raise typer.BadParameter("say which: an ID, or --name NAME")
    if name is None and salt_file is not None:
        raise typer.BadParameter("--salt-file belongs to --name")
    salt = NO_SALT if salt_file is None else salt_id(read_salt(salt_file))
    try:
        known = None if name is None else session_id(salt, name)
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="--name") from exc
    with call.cache() as cache:
        chosen = sessions.find(cache, wanted or "" if known is None else known.hex(), namespace)
        report = sessions.tell(
            cache, chosen, action, for_s=for_s, salt=salt, applied=apply, now_s=time.time()
        )
    call.print(report, curate_text.session)
    remind(applied=report.applied, anything=True)


@verb(
    "warm",
    section="Move",
    examples=(
        "cache-admin warm --dry-run",
        "cache-admin warm 8a74e0fa --jobs 8",
        "cache-admin warm --tokens prompt.json",
        "curl -s localhost:8000/tokenize -d @chat.json | cache-admin warm 8a74e0fa --tokens -",
        "cache-admin warm 8a74e0fa --hashes blocks.txt",
        "cache-admin warm --session user-81/trip-planner --dry-run",
    ),
    see_also=("top", "sessions", "status", "explain"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _warm(
    call: Call,
    namespaces: Namespaces = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Only what an engine would load of this prompt, given as token ids, a JSON list or "
            "separated by blanks, or as the answer of an engine's /tokenize, which knows its tokenizer and "
            "chat template; - reads stdin.",
        ),
    ] = None,
    hashes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Only what it would load of the prompt whose blocks have these hashes, as vLLM makes them, "
            "in hex, from the first block on; - reads stdin.",
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only what this session alone has used, by the name that its client gives it, or by its id "
            "or the start of it (`cache-admin sessions`).",
        ),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --tokens: the engines' PYTHONHASHSEED, if they have one."),
    ] = None,
    salt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --tokens or --session: the requests' cache_salt, if they have one, as "
            "`erase --salt-file` takes it.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Fetch so many side by side.")] = 4,
    max_bytes: MaxBytes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be fetched.")] = False,
) -> None:
    """Fetch segments into this node's fast tier, the most recently used first, or a prompt's or a session's.

    Stops when the tier is full. Run it where an engine runs, as the engine's user: before the engine
    starts, or beside it. What was fetched stays, also after Ctrl-C. A prompt with images or an adapter has
    other names than its token ids tell: give the hashes of its blocks. What a session shares with others,
    such as a system prompt, is not known to be its.
    """
    limit = None if max_bytes is None else byte_count("--max-bytes", max_bytes)
    if sum(one is not None for one in (tokens, hashes, session)) > 1:
        raise typer.BadParameter("give one of --tokens, --hashes and --session")
    if session is None:
        ids, salt = read_prompt(tokens, seed, salt_file)
    else:
        ids, _ = read_prompt(None, seed, None)
        salt = "" if salt_file is None else read_salt(salt_file)
    names = [] if hashes is None else read_hashes(hashes)
    found: list[PromptFound] = []
    lines: list[SessionLine] = []
    with call.cache() as cache, progress.shown() as shows:
        most = warm.warming_bytes(cache.settings, limit)
        if session is not None:
            moved, lines = sessions.plan_session(
                cache, session, salt=salt, prefixes=namespaces or [], max_bytes=most
            )
        elif tokens is None and hashes is None:
            moved = plan.plan(cache, namespaces or [], max_bytes=most)
        else:
            prompt = StoredPrompt(ids, names, seed, salt)
            moved, found = plan_prompt(cache, prompt, namespaces or [], max_bytes=most)
        report = warm.warm(
            cache,
            moved,
            cache.fast,
            jobs=jobs,
            dry_run=dry_run,
            progress=shows,
            prompts=found,
            sessions=lines,
        )
    call.print(report, curate_text.warm)
    call.end(report)


@of_report.register
def _of_pin(report: PinReport) -> ExitCode:
    if report.ended != "complete" or not report.left_out:
        return ENDS[report.ended]
    return ExitCode.PARTIAL if report.changed else ExitCode.PROBLEMS


@of_report.register
def _of_warm(report: WarmReport) -> ExitCode:
    return of_moved(report, report.warm.segments)
