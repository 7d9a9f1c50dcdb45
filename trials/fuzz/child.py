"""Runs one target under atheris, in a process of its own: libFuzzer ends it.

python -m trials.fuzz.child TARGET [libFuzzer's options] FOLDER ...
"""

from __future__ import annotations

import resource
import sys

import atheris

#: The product, and what parses for it in Python.
INSTRUMENTED = ["kvstore", "schemas", "tarfile", "urllib.parse", "botocore.parsers"]
#: Address space that the process may take on top of what it has once everything is imported.
ROOM = 1 << 30


def main() -> None:
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        from trials.fuzz.targets import BY_NAME, try_one
    target = BY_NAME[sys.argv[1]]

    def one(data: bytes) -> None:
        try_one(target, data)

    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    atheris.Setup([sys.argv[0], *sys.argv[2:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
