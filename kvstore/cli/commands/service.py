"""doctor, vllm-config: whether it is well, and how engines connect to it."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from kvstore import admin
from kvstore.admin.engine import Role
from kvstore.cli import render
from kvstore.cli.call import Call, one_of, say, verb


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    verb(app.command())(doctor)
    verb(app.command("vllm-config"))(vllm_config)


def doctor(call: Call) -> None:
    """Check settings, index, payloads, permissions, disk and clocks, and say what to do.

    Writes one probe to the index and one to the payloads, and deletes them. Run it where an engine
    runs, as the user that the engine runs as. Exits with 3 if there is a problem.
    """
    with call.cache() as cache:
        report = admin.doctor(cache, call.sources)
    call.print(report, render.doctor)
    call.exit_by(report)


def vllm_config(
    call: Call,
    kv: Annotated[bool, typer.Option("--kv/--no-kv", help="The flag for KV blocks.")] = True,
    ec: Annotated[bool, typer.Option("--ec/--no-ec", help="The flag for encoder outputs.")] = True,
    role: Annotated[
        str,
        typer.Option(metavar="ROLE", help="both, producer (only saves) or consumer (only loads)."),
    ] = "both",
) -> None:
    """Print the flags of `vllm serve` for this cache, quoted for a shell.

    With --json, an object whose values are the arguments of `vllm.LLM`. Passwords are never printed:
    a note on stderr says which environment variable takes them.
    """
    chosen = cast("Role", one_of("--role", role, ("both", "producer", "consumer")))
    if not (kv or ec):
        raise typer.BadParameter("--no-kv and --no-ec together leave nothing to print")
    report = admin.vllm_config(call.sources.settings(), kv=kv, ec=ec, role=chosen)
    # Not through a console, which would wrap what a shell is to read.
    typer.echo(report.model_dump_json(indent=2) if call.json else "\n".join(render.vllm_flags(report)))
    for note in report.notes:
        say(note)
