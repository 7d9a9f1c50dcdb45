"""cache-admin: the command line over kvstore.admin.

app        the command line as a whole
commands   the commands: they parse, call, print
call       what they have in common: options, errors, printing
render     reports as text, made of tables
exits      exit codes
docs       docs/cache-admin.md, generated from the commands
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of `cache-admin`."""
    try:
        import rich  # noqa: F401 - only to see whether it is there
        import typer  # noqa: F401
    except ImportError as exc:
        sys.exit(f"cache-admin needs {exc.name}, which is not installed: pip install 'kvstore[cli]'")
    from kvstore.cli.app import app

    app(prog_name="cache-admin")
