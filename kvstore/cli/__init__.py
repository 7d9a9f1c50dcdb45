"""cache-admin: the command line over kvstore.admin.

app        the command line as a whole
commands   the commands: they parse, call, print
call       what they have in common: options, errors, printing
render     reports as text, made of tables; beside it a module per group of verbs
exits      exit codes
docs       docs/cache-admin.md, generated from the commands
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
        sys.exit(f"cache-admin needs {exc.name}, which is not installed: it comes with kvstore[cli]")
    # Nothing of what is imported is garbage, and looking for some takes a tenth of the start.
    gc.disable()
    from kvstore.cli.app import app

    gc.enable()
    app(prog_name="cache-admin")
