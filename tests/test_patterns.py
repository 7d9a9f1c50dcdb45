"""Every regular expression takes time in proportion to its text, whatever the text: it may be a stranger's.

A pattern is tried as the code uses it, on texts that are made from it: what leads to a repetition, then a
very long run of each thing that occurs in the pattern, then what fits nowhere. Those of pydantic are
matched by Rust's `regex`, which knows no other time.
"""

from __future__ import annotations

import ast
import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
#: Characters of a text. What is linear takes milliseconds for it, what is quadratic minutes.
LENGTH = 200_000
#: Seconds of this process' own time that one text may take, however busy the machine is.
MOST_S = 5.0
_CATEGORIES = {sre.CATEGORY_DIGIT: "1", sre.CATEGORY_SPACE: " ", sre.CATEGORY_WORD: "a"}


class Use(NamedTuple):
    """A pattern, and the function of `re` that it is used with."""

    where: str
    pattern: str | bytes
    function: str


def uses(path: Path) -> Iterator[Use]:
    """All that one module does with patterns."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = [call.func for call in calls if isinstance(call.func, ast.Attribute)]
    of_re = {id(one) for one in methods if isinstance(one.value, ast.Name) and one.value.id == "re"}
    module = str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    names = {id(node.value): ast.unparse(node.targets[0]) for node in assigned}
    for call in calls:
        if id(call.func) not in of_re or call.func.attr == "escape":  # type: ignore[attr-defined]
            continue
        known = vars(import_module(module))
        if ast.unparse(call.args[0]) == "words":
            patterns = [words for words, _ in known["_BUCKET_ADVICE"]]
        else:
            patterns = [eval(ast.unparse(call.args[0]), known)]
        functions = {call.func.attr}  # type: ignore[attr-defined]
        if functions == {"compile"}:
            used = {one.attr for one in methods if ast.unparse(one.value) == names[id(call)]}
            functions = used or {"match", "fullmatch"}
        for pattern in patterns:
            yield from (Use(f"{module}:{call.lineno}", pattern, function) for function in functions)


MODULES = [path for top in ("kvstore", "connectors", "schemas") for path in (ROOT / top).rglob("*.py")]
WITH_PATTERNS = [path for path in MODULES if re.search(r"\bre\.[a-z]+\(", path.read_text(encoding="utf-8"))]


def members(items: Sequence[Any]) -> list[str]:
    """Some characters that a class names."""
    found = []
    for kind, value in items:
        if kind is sre.LITERAL:
            found.append(chr(value))
        elif kind is sre.RANGE:
            found += [chr(value[0]), chr(value[1])]
        elif kind is sre.CATEGORY:
            found.append(_CATEGORIES.get(value, "-"))
    return found


def alphabet(tree: Any) -> set[str]:
    """Characters of which a text for this pattern is made."""
    found: set[str] = set()
    for kind, value in tree:
        if kind is sre.LITERAL or kind is sre.NOT_LITERAL:
            found.add(chr(value))
        elif kind is sre.IN:
            found.update(members(value))
        for inner in inside(kind, value):
            found |= alphabet(inner)
    return found


def inside(kind: Any, value: Any) -> list[Any]:
    """The patterns within a part of one."""
    if kind is sre.BRANCH:
        return list(value[1])
    if kind is sre.SUBPATTERN:
        return [value[3]]
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return [value[2]]
    if kind in (sre.ASSERT, sre.ASSERT_NOT):
        return [value[1]]
    return []


def shortest(tree: Any) -> str:
    """A short text that the pattern matches."""
    text = ""
    for kind, value in tree:
        if kind is sre.LITERAL:
            text += chr(value)
        elif kind is sre.IN:
            text += "~" if value[0][0] is sre.NEGATE else members(value)[0]
        elif kind is sre.NOT_LITERAL or kind is sre.ANY:
            text += "~"
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            text += shortest(value[2]) * value[0]
        elif inner := inside(kind, value):
            text += shortest(inner[0])
    return text


def attacks(tree: Any, letters: set[str], before: str = "") -> Iterator[str]:
    """Texts with a very long run wherever the pattern allows for one."""
    for number, (kind, value) in enumerate(tree):
        lead = before + shortest(tree[:number])
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT) and value[1] > 64:
            for run in {*letters, shortest(value[2])} - {""}:
                yield lead + run * (LENGTH // len(run)) + "\0"
        for inner in inside(kind, value):
            yield from attacks(inner, letters, lead)


@contextmanager
def at_most(seconds: float, what: str) -> Iterator[None]:
    """Ends what runs within it when this process has worked for so long."""

    def over(*_: object) -> None:
        raise AssertionError(f"{what} takes more than {seconds} s")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def attack(use: Use) -> int:
    """Tries all texts on one use; returns how many."""
    tree = parser.parse(use.pattern)
    compiled: Any = re.compile(use.pattern)
    whole = {"match": compiled.match, "fullmatch": compiled.fullmatch}
    run: Callable[[Any], object] = whole.get(
        use.function, lambda text: sum(1 for _ in compiled.finditer(text))
    )
    letters = alphabet(tree)
    anywhere = [one * (LENGTH // len(one)) for one in {*letters, shortest(tree)} - {""}]
    texts = [*attacks(tree, letters), *anywhere]
    for text in texts:
        with at_most(MOST_S, f"{use.where}: {use.pattern!r} on {text[:20]!r}..."):
            run(text.encode("latin-1") if isinstance(use.pattern, bytes) else text)
    return len(texts)


@pytest.mark.parametrize("path", WITH_PATTERNS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_takes_more_than_its_length(path: Path) -> None:
    assert sum(attack(use) for use in uses(path)) > 0


@pytest.mark.parametrize(
    ("pattern", "function"), [(r"(a+)+b", "match"), (r"\s*\d+\s*x*\s*", "fullmatch"), (r"a+b", "search")]
)
def test_what_takes_more_is_found(pattern: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.MOST_S", 1.0)
    with pytest.raises(AssertionError, match="takes more than"):
        attack(Use("here", pattern, function))


def test_no_pattern_of_pydantic_is_matched_by_python() -> None:
    assert not [path for path in MODULES if "regex_engine" in path.read_text(encoding="utf-8")]
