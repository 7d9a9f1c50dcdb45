"""doctor, vllm-config: whether it is well, and how engines connect to it."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from kvstore.admin.doctor import doctor, vllm_config
from kvstore.admin.doctor.reports import DoctorReport
from kvstore.cli import progress
from kvstore.cli.call import Call, say
from kvstore.cli.exits import ExitCode, of_report
from kvstore.cli.options import one_of
from kvstore.cli.text import doctor as doctor_text
from kvstore.cli.verbs import verb


@verb(
    "doctor",
    section="Decide",
    examples=("cache-admin doctor", "cache-admin doctor --json | jq '.checks[] | select(.state != \"ok\")'"),
    see_also=("status", "bench"),
    exits=(ExitCode.PROBLEMS,),
)
def _doctor(call: Call) -> None:
    """Check settings, index, payloads, permissions, disk and clocks, and say what to do.

    Writes one probe to the index and one to the payloads, and deletes them. Run it where an engine
    runs, as the user that the engine runs as. Exits with 3 if there is a problem.
    """
    with call.cache() as cache, progress.shown() as shows:
        report = doctor.doctor(cache, call.sources, progress=shows)
    call.print(report, doctor_text.doctor)
    call.end(report)


@verb(
    "vllm-config",
    section="Decide",
    examples=(
        "cache-admin vllm-config --index redis://redis:6379/0 --payloads file:///mnt/kvstore",
        'eval "vllm serve MODEL $(cache-admin vllm-config)"',
        "cache-admin vllm-config --ec",
    ),
    see_also=("doctor",),
)
def _vllm_config(
    call: Call,
    kv: Annotated[bool, typer.Option("--kv/--no-kv", help="The flag for KV blocks.")] = True,
    ec: Annotated[
        bool,
        typer.Option("--ec", help="Also the flag for encoder outputs: for multimodal models only."),
    ] = False,
    role: Annotated[
        str,
        typer.Option(metavar="ROLE", help="both, producer (only saves) or consumer (only loads)."),
    ] = "both",
) -> None:
    """Print the flags of `vllm serve` for this cache, quoted for a shell.

    With --json, an object whose values are the arguments of `vllm.LLM`. Passwords are never printed:
    a note on stderr says which environment variable takes them.
    """
    chosen = cast("vllm_config.Role", one_of("--role", role, ("both", "producer", "consumer")))
    if not (kv or ec):
        raise typer.BadParameter("--no-kv without --ec leaves nothing to print")
    report = vllm_config.vllm_config(call.sources.settings(), kv=kv, ec=ec, role=chosen)
    # Not through a console, which would wrap what a shell is to read.
    typer.echo(report.model_dump_json(indent=2) if call.json else "\n".join(doctor_text.vllm_flags(report)))
    for note in report.notes:
        say(note)


@of_report.register
def _of_doctor(report: DoctorReport) -> ExitCode:
    return ExitCode.PROBLEMS if report.state == "problem" else ExitCode.OK
