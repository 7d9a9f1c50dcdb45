"""cache-admin: the command line over kvstore.admin.

app        the command line as a whole
commands   the verbs: they parse, call, print
text       reports as text, made of tables
verbs      what makes a verb of a function, and what the reference says of it
call       one run of a verb: its cache, what it prints, how it ends
options    options that several verbs take
progress   how far it is
exits      exit codes

A verb is a function of kvstore.admin with its report, one in commands and one in text, in the module of its
group in each. --help, the reference and the completion of shells follow from the one in commands.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Entry point of `cache-admin`."""
    try:
        import rich  # noqa: F401 - only to see whether it is there
        import typer  # noqa: F401
    except ImportError as exc:
        # Not by a name alone: on PyPI `kvstore` is somebody else's, and `kvstore-vllm` isn't there.
        sys.exit(
            f"cache-admin needs {exc.name}, which is not installed. It comes with the extra `cli`: install "
            "'.[cli]' in a checkout, or a release's wheel with [cli] after its name. The image has it"
        )
    # Nothing of what is imported is garbage, and looking for some takes a tenth of the start.
    gc.disable()
    from kvstore.cli.app import app

    gc.enable()
    app(prog_name="cache-admin")
