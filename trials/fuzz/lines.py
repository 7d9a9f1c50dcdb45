"""Which lines of the product inputs of a target reach, and which inputs are worth keeping for it.

python -m trials.fuzz.lines TARGET FOLDER    reads what trials.fuzz.run has found there; prints three numbers
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from trials.fuzz.targets import BY_NAME, Target, corpus, try_one

#: A step from one line of a file to another.
Arc = tuple[str, int, int]


def executable(target: Target) -> set[tuple[str, int]]:
    """The lines of functions in a target's modules; what runs at import is not counted."""
    found: set[tuple[str, int]] = set()
    for name in target.modules:
        file = importlib.import_module(name).__file__
        assert file is not None
        with open(file, encoding="utf-8") as source:
            for code in _functions(compile(source.read(), file, "exec")):
                found.update(
                    (file, line) for _, _, line in code.co_lines() if line not in (None, code.co_firstlineno)
                )
    return found


def _functions(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 0x2:  # CO_NEWLOCALS: a function; classes and modules have none
                yield inner
            yield from _functions(inner)


def arcs(target: Target, data: bytes) -> set[Arc]:
    """The arcs that one input takes through a target's modules; none if it is a finding."""
    files = {importlib.import_module(name).__file__ for name in target.modules}
    taken: set[Arc] = set()

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        before = frame.f_code.co_firstlineno

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            if event == "line":
                taken.add((file, before, frame.f_lineno))
                before = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        try_one(target, data)
    except Exception:
        return set()  # trials.fuzz.run has reported it
    finally:
        sys.settrace(None)
    return taken


def smallest(target: Target, inputs: Iterable[bytes]) -> tuple[list[bytes], int, int]:
    """Those of `inputs`, small ones first, that take an arc which neither the seeds nor those before them
    take; how many lines of the target's modules all of them reach, and of how many."""
    known: set[Arc] = set()
    for data in target.seeds():
        known |= arcs(target, data)
    kept = []
    for data in sorted(inputs, key=lambda one: (len(one), one)):
        taken = arcs(target, data)
        if not taken <= known:
            known |= taken
            kept.append(data)
    lines = executable(target)
    return kept, len({(file, line) for file, _, line in known} & lines), len(lines)


def main() -> None:
    target, work = BY_NAME[sys.argv[1]], Path(sys.argv[2])
    found = [file.read_bytes() for file in sorted((work / "found").iterdir())]
    kept, reached, of = smallest(target, [*corpus(target), *found])
    (work / "kept").mkdir()
    for data in kept:
        (work / "kept" / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
    print(len(kept), reached, of)


if __name__ == "__main__":
    main()
