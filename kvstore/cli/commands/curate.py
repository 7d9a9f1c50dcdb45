"""pin, quota, sessions: what stays; warm: what is near.

What keeps something, or lets it go, only says what it would do, until --apply.
"""

from __future__ import annotations

import time
from typing import Annotated, cast, get_args

import typer

from kvstore.admin.curate import pin, plan, quota, sessions, ttl, warm
from kvstore.admin.curate.prompts import StoredPrompt, plan_prompt
from kvstore.admin.curate.reports import PinReport, PromptFound, SessionLine, WarmReport
from kvstore.cli import progress
from kvstore.cli.call import Call, remind
from kvstore.cli.commands.archive import of_moved
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.options import (
    Apply,
    MaxBytes,
    Namespace,
    Namespaces,
    PromptSalt,
    Segments,
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
from kvstore.keys import NO_SALT, salt_id

#: Clears what was set.
_NONE = "none"
#: Sessions that are listed, unless more or fewer are asked for.
_LISTED = 50


@verb(
    "quota",
    section="Policy",
    examples=(
        "cache-admin quota",
        "cache-admin quota store --size 2TiB --apply",
        "cache-admin quota tenant/search --size 200GiB --ttl 30d",
        "cache-admin quota namespace/8a74e0fa --size none --apply",
        "cache-admin quota --json | jq '.quotas[] | select(.state != \"ok\")'",
    ),
    see_also=("status", "pin", "evict", "advise"),
)
def _quota(
    call: Call,
    scope: Annotated[
        str | None,
        typer.Argument(
            metavar="SCOPE",
            help="store, tenant/NAME, namespace/ID by the start of the id, or salt/ID, in each namespace. "
            "Default: list all.",
        ),
    ] = None,
    nbytes: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="Bytes of payload that SCOPE may hold, such as 200GiB; none: what the settings say.",
        ),
    ] = None,
    ttl_: Annotated[
        str | None,
        typer.Option(
            "--ttl",
            metavar="TIME",
            help="How old what SCOPE stores may become, such as 90m, 12h or 30d, ten minutes at least; none: "
            "what the settings say.",
        ),
    ] = None,
    apply: Apply = False,
) -> None:
    """Show or set how much the store, tenants and namespaces may hold, and for how long.

    The size is the settings' (capacity_bytes, eviction.tenant_bytes, eviction.namespace_bytes,
    eviction.salt_bytes) until one is set here, which all engines and janitors obey. A salt's holds in each
    namespace by itself; that of the settings is not listed. A size evicts nothing by itself: engines do when
    they save, and `cache-admin serve` in its next round.

    The shortest time to live that a namespace is under holds: the settings' (eviction.ttl_s), the
    store's, its tenant's, its own; `status` shows which that is. Age counts from when it was computed and
    saved; a use makes nothing younger. From now on nothing older is served, whether or not it is evicted yet,
    and engines that compute it again save it anew. `cache-admin serve`, or an engine that saves, evicts it in
    its next rounds, pinned or not, and deletes the payload after grace_s. A longer time, or none, holds from
    their next round on.
    """
    change = quota.Change(
        quota.UNCHANGED if nbytes is None else None if nbytes == _NONE else byte_count("--size", nbytes),
        quota.UNCHANGED if ttl_ is None else None if ttl_ == _NONE else _time_to_live(ttl_),
    )
    unchanged = change == quota.Change()
    if (scope is None) != unchanged or (unchanged and apply):
        raise typer.BadParameter("give SCOPE with --size SIZE, --ttl TIME or both, or none of them to list")
    with call.cache() as cache:
        if scope is None:
            call.print(quota.quotas(cache, time.time()), curate_text.quotas)
            return
        report = quota.set_quota(cache, scope, change, applied=apply, now_s=time.time())
    call.print(report)
    remind(applied=report.applied, anything=True)


def _time_to_live(text: str) -> int:
    ttl_s = int(seconds_of("--ttl", text))
    if not ttl.SHORTEST_S <= ttl_s <= ttl.LONGEST_S:
        raise typer.BadParameter(f"{text!r} is not between ten minutes and a century", param_hint="--ttl")
    return ttl_s


@verb(
    "pin",
    section="Policy",
    examples=(
        "cache-admin pin",
        "cache-admin pin 8a74e0fa cdf5c6c46cc04768 --apply",
        "cache-admin pin 8a74e0fa --depth 64 --apply",
        "cache-admin pin 8a74e0fa --tokens system-prompt.json --apply",
        "cache-admin pin 8a74e0fa --remove",
    ),
    see_also=("status", "quota", "evict"),
    exits=(ExitCode.PROBLEMS, ExitCode.PARTIAL),
)
def _pin(
    call: Call,
    namespace: Namespace = None,
    segments: Segments = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="All that begins within the first N blocks of its chain, where shared prompts are.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="All that holds this prompt's blocks, given as token ids, a JSON list or "
            "separated by blanks; - reads stdin.",
        ),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --tokens: the engines' PYTHONHASHSEED, if they have one."),
    ] = None,
    salt_file: PromptSalt = None,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove", help="Unpin: these, or without any all that is pinned, of NAMESPACE or everywhere."
        ),
    ] = False,
    apply: Apply = False,
) -> None:
    """Keep segments from being evicted by a quota; without any, list what is pinned.

    At most eviction.pinned_share of every quota that bounds a namespace can be pinned; what is beyond that is
    left out, tails first, and the exit code is 4, or 3 if nothing remains. `evict` with
    --pinned or --all, and a repair, remove pinned segments all the same. With --remove quotas evict them
    again, by their last use.
    """
    now = time.time()
    ways = sum((bool(segments), depth is not None, tokens is not None))
    if ways > 1:
        raise typer.BadParameter("give one of SEGMENT..., --depth and --tokens")
    if ways and namespace is None:
        raise typer.BadParameter("give NAMESPACE before SEGMENT..., --depth or --tokens")
    if apply and not ways and not remove:
        raise typer.BadParameter("say what to pin: SEGMENT..., --depth or --tokens")
    ids, salt = read_prompt(tokens, seed, salt_file)
    with call.cache() as cache:
        if not ways and not remove:
            call.print(pin.pins(cache, namespace, now))
            return
        if not ways:
            chosen = pin.pinned(cache, namespace)
        elif tokens is not None and namespace is not None:
            chosen = pin.choose_prompt(cache, namespace, ids, seed=seed, salt=salt)
        else:
            chosen = pin.choose(cache, segments or [], namespace, depth)
        change = pin.unpin if remove else pin.pin
        report = change(cache, chosen, applied=apply, now_s=now)
    call.print(report)
    remind(applied=report.applied, anything=report.planned.segments > 0)
    call.end(report)


@verb(
    "sessions",
    section="Policy",
    examples=(
        "cache-admin sessions",
        "cache-admin sessions 8a74e0fa --state retained --limit 1000 --json",
        "cache-admin sessions --session user-81/trip-planner --end --apply",
        "cache-admin sessions --session user-81/trip-planner --retain 2h --apply",
    ),
    see_also=("evict", "warm", "pin", "quota"),
)
def _sessions(
    call: Call,
    namespace: Namespace = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only those that are live, retained or ended.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, metavar="N", help="So many at most. Default: 50.")
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The one to end or to retain, by the name that its client gives it, or by its id or the "
            "start of it.",
        ),
    ] = None,
    salt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --session: the requests' cache_salt, if they have one, as `erase --salt-file` takes "
            "it.",
        ),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="What only it has used goes before all else.")] = False,
    retain: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="What only it has used goes after all else for so long, such as 10m or 2h, at most a day.",
        ),
    ] = None,
    apply: Apply = False,
) -> None:
    """List clients' sessions, those that own most bytes first; end one, or retain it.

    Sessions are named by their clients (vLLM's session_id); the index knows 16 bytes of a digest of the salt
    and the name. The list says what only they have used, and until when it stays. Neither --end nor --retain
    deletes anything by itself. A later request of an ended session makes what it uses like any other again.
    At most sessions.retain_share of every quota that bounds a namespace can be retained, tails are left out.
    """
    tells = end or retain is not None
    if (session is not None) != tells or (end and retain is not None):
        raise typer.BadParameter("--session goes with one of --end and --retain")
    if tells and (state is not None or limit is not None):
        raise typer.BadParameter("--state and --limit are for the list")
    if not tells and (apply or salt_file is not None):
        raise typer.BadParameter("--apply and --salt-file go with --session")
    wanted = None if state is None else one_of("--state", state, get_args(SessionState))
    for_s = 0.0 if retain is None else seconds_of("--retain", retain)
    if retain is not None and not 0 < for_s <= LONGEST_RETAINED_S:
        raise typer.BadParameter(f"{retain!r} is not within a day", param_hint="--retain")
    salt = "" if salt_file is None else read_salt(salt_file)
    with call.cache() as cache:
        if session is None:
            most = _LISTED if limit is None else limit
            listed = cast("SessionState | None", wanted)
            call.print(sessions.sessions(cache, namespace, listed, most, time.time()))
            return
        chosen = sessions.find_named(
            cache, session, salt=salt, prefixes=[] if namespace is None else [namespace]
        )
        report = sessions.tell(
            cache,
            chosen,
            "end" if end else "retain",
            for_s=for_s,
            salt=salt_id(salt) if salt else NO_SALT,
            applied=apply,
            now_s=time.time(),
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
    see_also=("sessions", "status", "explain"),
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
