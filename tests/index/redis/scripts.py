"""Names of scripts, as the SLOWLOG of a server tells their digests."""

from __future__ import annotations

from kvstore.index.scripted import catalogue, index, journal, maintenance, salts, sessions
from kvstore.index.scripted.scripts import Script


def script_name(command: bytes) -> str:
    """Returns a script's name, or a command's, as SLOWLOG has it."""
    words = command.split()
    scripts = [
        script
        for module in (index, catalogue, maintenance, journal, salts, sessions)
        for script in vars(module).values()
        if isinstance(script, Script)
    ]
    by_sha = {script.sha.encode(): script.name for script in scripts}
    return by_sha.get(words[1], words[0].decode()) if len(words) > 1 else words[0].decode()
