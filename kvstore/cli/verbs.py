"""A verb of cache-admin: a function of a `Call` and of its own parameters, and what the reference says of it.

    @verb("events", section="See", examples=("cache-admin events",), see_also=("status",))
    def _events(call: Call, namespace: Namespace = None) -> None:
        \"\"\"Show commits and evictions.\"\"\"

The docstring and the parameters are its help. typer registers it with the common options behind its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Final, Literal, get_args

import typer

from kvstore.admin.backends import Sources
from kvstore.cli.call import Call, guarded
from kvstore.cli.exits import ExitCode

#: Groups of --help and of the reference, in their order.
Section = Literal["See", "Policy", "Take away", "Repair", "Move", "Decide", "Run"]
SECTIONS: Final[tuple[Section, ...]] = get_args(Section)


@dataclass(frozen=True, slots=True)
class Verb:
    """A command, and what the reference says of it beside its help."""

    #: Its words: `namespaces`, or `namespaces diff` for one that stands below it.
    name: str
    section: Section
    examples: Sequence[str]
    #: What to run before or after it, and what to read.
    see_also: Sequence[str]
    #: What it may end with, besides what every verb may.
    exits: Collection[ExitCode]
    #: The function that typer registers: its parameters are read by reflection.
    run: Callable[..., None]


def _common(
    settings: Annotated[
        str | None,
        typer.Option("--settings", metavar="FILE", help="YAML file with the whole settings tree."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index",
            metavar="URL",
            help="redis://HOST:PORT/DB, rediss://, redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB, unix:// "
            "or sqlite:///PATH. Default: SQLite inside the payload folder.",
        ),
    ] = None,
    payloads: Annotated[
        str | None,
        typer.Option(
            "--payloads",
            metavar="URL",
            help="Where the payloads are: file:///DIR or s3://BUCKET/PREFIX?endpoint=URL&region=NAME. Two "
            "tiers are described in a settings file.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Has the signature that `verb` appends."""


def verb(
    name: str,
    *,
    section: Section,
    examples: Sequence[str],
    see_also: Sequence[str] = (),
    exits: Collection[ExitCode] = (),
) -> Callable[[Callable[..., None]], Verb]:
    """Makes a verb of a function of a Call, and of what the reference says of it."""

    def decorate(function: Callable[..., None]) -> Verb:
        return Verb(name, section, examples, see_also, exits, _run(function))

    return decorate


def _run(function: Callable[..., None]) -> Callable[..., None]:
    """Returns what typer calls: it makes the Call of the common options."""

    def run(context: typer.Context, **given: Any) -> None:
        where = {name: given.pop(name) for name in ("settings", "index", "payloads")}
        sources = Sources(where["settings"], where["index"], where["payloads"])
        call = Call(sources, given.pop("json"), context.invoked_subcommand)
        if call.subcommand is not None:
            # A group with a command of its own: what was said to it would be lost.
            if call.json or any(value is not None for value in (*where.values(), *given.values())):
                raise typer.BadParameter(f"put the options after '{call.subcommand}'")
            return
        with guarded(debug=bool(context.find_root().obj)):
            function(call, **given)

    # What typer reads. Keyword-only, because parameters without a default may stand behind others.
    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *list(inspect.signature(function, eval_str=True).parameters.values())[1:],
        *inspect.signature(_common, eval_str=True).parameters.values(),
    ]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = function.__doc__
    return run


def verbs_of(modules: Iterable[ModuleType]) -> list[Verb]:
    """Returns the verbs of these modules, by section, and within one as they stand there."""
    found = [each for module in modules for each in vars(module).values() if isinstance(each, Verb)]
    return sorted(found, key=lambda each: SECTIONS.index(each.section))


def add_to(app: typer.Typer, verbs: Iterable[Verb]) -> None:
    """Registers them. One of two words stands below the one that is the first of them, and comes after it; or
    the first of them is no verb by itself."""
    verbs = list(verbs)
    below = {each.name.split()[0]: typer.Typer() for each in verbs if " " in each.name}
    alone = below.keys() - {each.name for each in verbs}
    for each in verbs:
        first, _, second = each.name.partition(" ")
        if second:
            below[first].command(second)(each.run)
            if first in alone:
                alone.remove(first)
                others = [one.name.split()[1] for one in verbs if one.name.startswith(f"{first} ")]
                app.add_typer(
                    below[first], name=first, no_args_is_help=True, help=f"One of {', '.join(others)}."
                )
        elif first in below:
            below[first].callback(invoke_without_command=True)(each.run)
            app.add_typer(below[first], name=first, rich_help_panel=each.section)
        else:
            app.command(first, rich_help_panel=each.section)(each.run)
