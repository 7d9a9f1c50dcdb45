"""explain: where a prompt's chain stops in the cache, and why."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvstore.admin.explain import explain
from kvstore.admin.explain.lookup import Lookup
from kvstore.admin.explain.reports import ExplainReport
from kvstore.cli import progress
from kvstore.cli.call import Call, say
from kvstore.cli.exits import ExitCode, of_report
from kvstore.cli.options import PromptSalt, read_prompt
from kvstore.cli.text import explain as explain_text
from kvstore.cli.verbs import verb


@verb(
    "explain",
    section="See",
    examples=(
        "cache-admin explain --tokens prompt.json",
        "cache-admin explain --request chatcmpl-8f0e2c --verify",
        "cache-admin explain --digest 5f4dcc3b5aa765d61d8327deb882cf99 --json | jq '.blocks[].findings'",
    ),
    see_also=("status", "namespaces diff", "events"),
    exits=(ExitCode.PROBLEMS,),
)
def _explain(
    call: Call,
    namespace: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE",
            help="The start of a namespace's id. Default: the one that an engine registered last (--tokens), "
            "or all.",
        ),
    ] = None,
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
    digest: Annotated[
        str | None, typer.Option(metavar="HEX", help="A digest, a block hash or a content key.")
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With --tokens: the engines' PYTHONHASHSEED, if they have one."),
    ] = None,
    salt_file: PromptSalt = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and verify the payloads that hold what is stored of it.")
    ] = False,
) -> None:
    """Explain why a prompt, a request, an image or a block is not served from the cache, or that it is.

    One of --tokens, --request and --digest. Says where the chain stops and why: never stored,
    evicted (when and by which rule), in another namespace (and what differs), not admitted, being saved by
    another engine, not saved, not asked for because something was down or late, damaged, invalidated; and how
    far back the journal reaches that it knows this from.

    Token ids are hashed as vLLM does it. Prompts with images or adapters have more in their names, and an
    image goes by what it is, whatever clients call it: ask for those by --request or --digest. Exits with
    3 if --verify finds damage.
    """
    given = {"--tokens": tokens, "--request": request, "--digest": digest}
    named = [option for option, value in given.items() if value is not None]
    if len(named) != 1:
        raise typer.BadParameter(f"give one of {', '.join(given)}; {', '.join(named) or 'none'} given")
    ids, salt = read_prompt(tokens, seed, salt_file)
    with call.cache() as cache, progress.shown() as shows:
        lookup = Lookup(cache, time.time(), verify=verify, progress=shows)
        if request is not None:
            report = explain.explain_request(lookup, request, namespace=namespace)
        elif digest is not None:
            report = explain.explain_digest(lookup, digest, namespace=namespace)
        else:
            report = explain.explain_tokens(lookup, ids, namespace=namespace, seed=seed, salt=salt)
    call.print(report, explain_text.explain)
    for remark in report.remarks:
        say(remark)
    call.end(report)


@of_report.register
def _of_explain(report: ExplainReport) -> ExitCode:
    return ExitCode.PROBLEMS if report.damaged else ExitCode.OK
