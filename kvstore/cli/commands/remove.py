"""evict, drop, erase: what goes. They only say what they would do, until --apply."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvstore.admin.curate.prompts import StoredPrompt
from kvstore.admin.remove import drop, erase, evict
from kvstore.admin.remove import named as evict_named
from kvstore.admin.remove.reports import DropReport, EraseReport, EvictReport
from kvstore.admin.tokenizer import token_ids
from kvstore.cli import progress
from kvstore.cli.call import Call, remind
from kvstore.cli.exits import ENDS, ExitCode, of_report
from kvstore.cli.options import (
    Apply,
    Namespace,
    Segments,
    byte_count,
    read_hashes,
    read_salt,
    read_text,
    read_tokens,
    seconds_of,
)
from kvstore.cli.text import remove as remove_text
from kvstore.cli.verbs import verb
from kvstore.keys import salt_id

OneNamespace = Annotated[str, typer.Argument(metavar="NAMESPACE", help="The start of a namespace's id.")]


@verb(
    "evict",
    section="Take away",
    examples=(
        "cache-admin evict --unused-for 7d",
        "cache-admin evict --keep 500GiB --apply",
        "cache-admin evict 8a74e0fa cdf5c6c46cc04768 --apply",
        "cache-admin evict 8a74e0fa --all --apply",
        "cache-admin evict --prompt letter.txt --engine http://localhost:8000",
        "cache-admin evict --tokens prompt.json --whole --apply",
        "cache-admin evict --session user-81/trip-planner --apply",
        "cache-admin evict --request chatcmpl-8f14e45f --apply",
    ),
    see_also=("drop", "erase", "pin", "quota", "status"),
)
def _evict(
    call: Call,
    namespace: Namespace = None,
    segments: Segments = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="All of NAMESPACE from one moment to the next, pinned or not."),
    ] = False,
    unused_for: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="All that was not used for so long, such as 90m, 12h or 7d."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What goes first, until at most so much is left, such as 50GiB."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What this prompt has stored: text, or a chat as JSON with `messages`, which --engine turns "
            "into token ids; - reads stdin.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="URL", help="With --prompt: an engine that serves the model.")
    ] = "http://localhost:8000",
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What the prompt with these token ids has stored: a JSON list, separated by blanks, or the "
            "answer of an engine's /tokenize; - reads stdin.",
        ),
    ] = None,
    hashes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What the prompt has stored whose blocks have these hashes, as vLLM makes them, in hex, "
            "from the first block on; - reads stdin.",
        ),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="What the store lacked when this request came, as it is stored now."),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What this session alone has used, by the name that its client gives it, or by its id or "
            "the start of it; it is forgotten as well.",
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Of a prompt or a request: also what others may use."),
    ] = False,
    seed: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="With --prompt or --tokens: the engines' PYTHONHASHSEED, if they have one."
        ),
    ] = None,
    salt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --prompt, --tokens or --session: the requests' cache_salt, if they have one, as "
            "`erase --salt-file` takes it.",
        ),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned segments as well.")] = False,
    apply: Apply = False,
) -> None:
    """Evict segments: these, a namespace's, unused ones, down to a size, or a prompt's or session's.

    To make room, to forget bytes that are not to be trusted, or what belongs to somebody. `drop` removes the
    namespace as well; `erase` is for good, and proves it.

    No request matches an evicted segment from that moment on. An engine that saves, or `cache-admin serve`,
    deletes the payload after grace_s. A segment that is used between the plan and its turn is spared, unless
    it was named. The last blocks of a prompt go first, so that the rest is of use. Where you name segments,
    you see to that order yourself.

    With --all engines compute everything anew, and save into the namespace as before: for weights that
    changed under the same name, or bytes that are not to be trusted.

    A prompt loses its last segment. If a session owns that segment, the segments go too that this session
    alone was seen to use right before it. The rest may be the beginning of others' prompts: the report calls
    it shared, and --whole takes it. A prompt whose end is not stored is shared as a whole. Copies in the
    folders of other nodes stay until these need the room, as after any eviction; `erase` reaches them.
    """
    named = (prompt, tokens, hashes, request, session)
    ways = (*named, unused_for, keep)
    if sum((bool(segments), every, *(way is not None for way in ways))) != 1:
        raise typer.BadParameter(
            "say what is to go, in one way: SEGMENT... after NAMESPACE, --all, --unused-for, --keep, "
            "--prompt, --tokens, --hashes, --request or --session"
        )
    if every and (namespace is None or pinned):
        raise typer.BadParameter("--all goes with NAMESPACE, and takes pinned segments", param_hint="--all")
    if whole and prompt is tokens is hashes is request is None:
        raise typer.BadParameter("--whole goes with --prompt, --tokens, --hashes or --request")
    if seed is not None and prompt is tokens is None:
        raise typer.BadParameter("--seed goes with --prompt or --tokens")
    if salt_file is not None and prompt is tokens is session is None:
        raise typer.BadParameter("--salt-file goes with --prompt, --tokens or --session")
    if salt_file == "-" and "-" in (prompt, tokens):
        raise typer.BadParameter("the prompt and --salt-file can't both be on stdin")
    salt = "" if salt_file is None else read_salt(salt_file)
    if keep is not None and pinned:
        raise typer.BadParameter("--keep leaves pinned segments alone: pin --remove", param_hint="--pinned")
    unused_for_s = None if unused_for is None else seconds_of("--unused-for", unused_for)
    keep_bytes = None if keep is None else byte_count("--keep", keep)
    now = time.time()
    if every and namespace is not None:
        with call.cache() as cache:
            _end_evict(call, evict.evict_all(cache, namespace, applied=apply, now_s=now))
        return
    with call.cache() as cache, progress.shown() as shows:
        if segments:
            planned = evict.plan_segments(cache, segments, namespace, pinned=pinned)
        elif request is not None:
            planned = evict_named.plan_request(cache, request, namespace, whole=whole, pinned=pinned)
        elif session is not None:
            planned = evict_named.plan_session(cache, session, salt, namespace, pinned=pinned)
        elif any(way is not None for way in named):
            hashed = [] if hashes is None else read_hashes(hashes)
            ids = [] if tokens is None else read_tokens(tokens)
            if prompt is not None:
                ids = token_ids(engine, read_text("--prompt", prompt))
            stored = StoredPrompt(ids, hashed, seed, salt)
            planned = evict_named.plan_prompt(cache, stored, namespace, whole=whole, pinned=pinned)
        elif unused_for_s is not None:
            planned = evict.plan_unused(cache, namespace, unused_for_s=unused_for_s, pinned=pinned, now_s=now)
        else:
            assert keep_bytes is not None, "it is one of the three"
            planned = evict.plan_keep(cache, namespace, keep_bytes=keep_bytes, now_s=now)
        report = evict.evict(cache, planned, applied=apply, now_s=now, progress=shows)
    _end_evict(call, report)


def _end_evict(call: Call, report: EvictReport) -> None:
    call.print(report)
    remind(applied=report.applied, anything=report.planned.segments > 0)
    call.end(report)


@verb(
    "drop",
    section="Take away",
    examples=("cache-admin drop 8a74e0fa", "cache-admin drop 8a74e0fa --now --apply"),
    see_also=("evict", "erase", "namespaces"),
    exits=(ExitCode.PARTIAL,),
)
def _drop(
    call: Call,
    namespace: OneNamespace,
    now: Annotated[
        bool,
        typer.Option("--now", help="Delete the payloads at once: for a namespace that no engine uses."),
    ] = False,
    apply: Apply = False,
) -> None:
    """Remove a namespace with all that it holds.

    For a model, a version or a tenant's share that no engine uses any more. `evict NAMESPACE --all` keeps
    the namespace; `erase` is for good, and proves it.

    No request matches its segments from then on. A load that is under way may read them in the grace time.
    After that the janitor deletes the payloads, or `drop` does if you run it again. A second `drop` also
    forgets the namespace. The janitor forgets it when no engine has registered it for
    janitor.forget_after_s. An engine that still uses the namespace registers it anew.
    """
    with call.cache() as cache, progress.shown() as shows:
        report = drop.drop(cache, namespace, apply=apply, now=now, progress=shows)
    call.print(report, remove_text.drop)
    call.end(report)


@verb(
    "erase",
    section="Take away",
    examples=(
        "cache-admin erase --tenant search",
        "cache-admin erase --tenant search --apply --wait 5m",
        "cache-admin erase --salt-file salt.txt --apply",
        "vault read -field=salt users/4711 | cache-admin erase --salt-file - --apply --json",
    ),
    see_also=("evict", "drop", "fsck"),
    exits=(ExitCode.PARTIAL,),
)
def _erase(
    call: Call,
    namespace: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE",
            help="With --salt-file: only in this one, by the start of its id. Default: in all of them.",
        ),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="All of this tenant's namespaces.")
    ] = None,
    salt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="All that requests with this `cache_salt` have stored. The file holds the salt and nothing "
            "else, but for one newline at its end, which is left off; - reads stdin.",
        ),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="While something is left, go on for so long, such as 5m."),
    ] = None,
    apply: Apply = False,
) -> None:
    """Erase all of a tenant, or all that was saved under a salt, and look what is left.

    For what must be gone for good, such as after a request to be forgotten. `evict` and `drop` keep payloads
    for the grace time, and prove nothing.

    No request matches these segments from then on. Erase deletes the payloads at once, without the
    grace time: a load that is under way computes instead. The index refuses all that was created before, for
    ever, from whichever save, archive or rebuild it comes. Engines go on, and save anew what they compute
    more than a minute later. The report names what is left, and what can't be reached from here. A bucket
    with versions keeps former ones, and the report has the lifecycle rule that deletes them. The exit code is
    4 if anything is left, or may be. The report shows a salt by its id only. To finish an erase that was cut
    off, run it again.
    """
    if (tenant is None) == (salt_file is None):
        raise typer.BadParameter("say what is to go: --tenant NAME, or --salt-file FILE")
    if tenant is not None and namespace is not None:
        raise typer.BadParameter("NAMESPACE goes with --salt-file; `drop` removes a single namespace")
    if tenant is not None and not tenant:
        raise typer.BadParameter("no tenant has an empty name", param_hint="--tenant")
    if not apply and wait is not None:
        raise typer.BadParameter("--wait goes with --apply")
    wait_s = 0.0 if wait is None else seconds_of("--wait", wait)
    if tenant is not None:
        target = erase.Target(tenant=tenant)
    else:
        assert salt_file is not None, "it is one of the two"
        target = erase.Target(salt=salt_id(read_salt(salt_file)), prefix=namespace)
    with call.cache() as cache, progress.shown() as shows:
        report = erase.erase(cache, target, apply=apply, wait_s=wait_s, progress=shows)
    call.print(report, remove_text.erase)
    remind(applied=report.applied, anything=True)
    call.end(report)


@of_report.register
def _of_evict(report: EvictReport) -> ExitCode:
    return ENDS[report.ended]


@of_report.register
def _of_drop(report: DropReport) -> ExitCode:
    return ExitCode.PARTIAL if report.state == "in_use" else ExitCode.OK


@of_report.register
def _of_erase(report: EraseReport) -> ExitCode:
    if not report.applied or report.ended != "complete":
        return ENDS[report.ended]
    return ExitCode.OK if report.state == "erased" else ExitCode.PARTIAL
