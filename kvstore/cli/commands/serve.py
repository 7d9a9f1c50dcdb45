"""serve: the janitor and the exporter, with a page for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.admin.operators import janitor as janitor_name
from kvstore.admin.serve.reports import ProbeReport, ServingReport
from kvstore.cli.call import Call, say
from kvstore.cli.exits import ExitCode, of_report
from kvstore.cli.running import logged, place, until_told
from kvstore.cli.text import serve as serve_text
from kvstore.cli.verbs import verb

#: What is going on when the process is told to end, such as a backend's call, has so long.
_STOP_S = 5.0
_PORT = 9464


@verb(
    "serve",
    section="Maintain",
    examples=(
        "cache-admin serve",
        "cache-admin serve --listen 0.0.0.0:9464 --no-janitor",
        "cache-admin serve --listen 0.0.0.0:9464 --host cache.example --tls /etc/tls --password-file /etc/pw",
        "cache-admin serve --once --json | jq .janitor.steps",
    ),
    see_also=("status", "doctor"),
    exits=(ExitCode.PARTIAL,),
)
def _serve(
    call: Call,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; [::]:PORT or 0.0.0.0:PORT is everywhere, port 0 any free one.",
        ),
    ] = f"127.0.0.1:{_PORT}",
    janitor: Annotated[
        bool,
        typer.Option("--janitor/--no-janitor", help="Look after the cache, or only show it."),
    ] = True,
    once: Annotated[
        bool, typer.Option("--once", help="One round, print what there is then, and end; listens nowhere.")
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Ask the server that listens there whether it is ready, print what it says, and end: for "
            "health checks. Exits with 5 if it is not, or does not answer. With --tls it asks by https.",
        ),
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name by which it may be asked for, besides addresses and localhost; may be given more "
            "than once. Requests for another name are refused: a web site could lead one here.",
        ),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Speak TLS, with tls.crt and tls.key of this folder, as a Secret of type kubernetes.io/tls "
            "has them. They are read again when they change.",
        ),
    ] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --tls: answer clients that have a certificate of these authorities."
        ),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answer those who know the password in this file, by basic authentication with any user or "
            "as a bearer token. Read again when it changes.",
        ),
    ] = None,
) -> None:
    """Look after the cache until it is stopped, and show it: a page, metrics, probes.

    The janitor evicts down to the quotas, deletes what was evicted, sweeps, checks the accounts, and reads a
    few percent of the payloads a day to find damage. A fleet runs one.

    `/` is a page for people, `/metrics` is for Prometheus, `/healthz` and `/readyz` for probes, `/api/status`
    is the page as JSON. Only this machine is listened to unless --listen says otherwise; then say who may
    ask: with --client-ca, --password-file or both, of which either is enough. Probes are answered to
    everybody.
    """
    address, port = place(listen, _PORT)
    if probe:
        from kvstore.admin.serve.probe import probe as ask

        answer = ask(address, port, tls=tls is not None)
        call.print(answer, serve_text.probe)
        call.end(answer)
        return
    # Prometheus' library and the page are for this verb alone.
    from kvstore.admin.serve.door import Guests
    from kvstore.admin.serve.server import Serving

    with call.cache(by=janitor_name()) as cache, logged():
        serving = Serving(cache, janitor=janitor)
        if once:
            report = serving.once()
            call.print(report, serve_text.serve)
            call.end(report)
            return
        with until_told() as stop:
            access = Guests(tuple(host or ()), tls, client_ca, password_file)
            say(f"listening on {serving.start(address, port, access)}")
            stop.wait()
        # A backend that hangs is left alone: whatever is being done there is safe to be cut off.
        kept = serving.stop(_STOP_S)
        say(f"stopped, not waiting for: {', '.join(kept)}" if kept else "stopped")


@of_report.register
def _of_serving(report: ServingReport) -> ExitCode:
    if "unreachable" in (report.status.index.state, report.status.payloads.state):
        return ExitCode.UNREACHABLE
    failing = report.janitor is not None and any(step.failing for step in report.janitor.steps)
    return ExitCode.PARTIAL if failing else ExitCode.OK


@of_report.register
def _of_probe(report: ProbeReport) -> ExitCode:
    return ExitCode.OK if report.ready else ExitCode.UNREACHABLE
