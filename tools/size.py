"""How much there is to learn: one table, whose bounds may only fall.

    python -m tools.size            # prints the table
    python -m tools.size --check    # ends with 1 if a row exceeds its bound in tools/size.json
    python -m tools.size --write    # lowers the bounds to what there is

Lines are effective ones: a line with code on it. Blank lines, comments and docstrings don't count.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer.main

from kvstore.cli.app import VERBS, app
from schemas.base import model_of
from schemas.settings import Settings

ROOT: Final = Path(__file__).resolve().parents[1]
BOUNDS: Final = ROOT / "tools" / "size.json"
PRODUCT: Final = ("kvstore/", "connectors/", "schemas/", "tools/")
CORE: Final = (
    "kvstore/store/", "kvstore/index/", "kvstore/payloads/", "kvstore/format/", "kvstore/rules/",
    "kvstore/threads/", "connectors/kv/", "connectors/ec/", "connectors/engine/", "schemas/",
)  # fmt: skip
#: Folders that builds leave.
_NOT_OURS: Final = ("build", "dist", "__pycache__", "site")
#: Smaller modules need two importers.
SMALL: Final = 40
#: Words that a sentence with a subject does not begin with.
RIDDLE: Final = re.compile(r"(?:^|(?<=[.:;!?] ))(?:What|Whoever|Who|Of|Nothing|None|Nobody) (?=[a-z`])")
#: What is no sentence in Markdown: code and the addresses of links.
NO_PROSE: Final = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)


class Source:
    """One Python file."""

    def __init__(self, name: str) -> None:
        text = (ROOT / name).read_text(encoding="utf-8")
        self.name = name
        self.tree = ast.parse(text)
        self._tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))

    def lines(self) -> int:
        """Returns how many effective lines it has."""
        blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        docstrings = {(node.lineno, node.col_offset) for node in self._docstrings()}
        code: set[int] = set()
        for token in self._tokens:
            if token.type not in blank and token.start not in docstrings and token.string:
                code.update(range(token.start[0], token.end[0] + 1))
        return len(code)

    def texts(self) -> Iterator[str]:
        """Yields its docstrings, comments and other strings, each on one line."""
        for node in self._docstrings():
            yield " ".join(node.value.split())
        # A comment of several lines is one text.
        block: list[str] = []
        for token in self._tokens:
            if token.type == tokenize.COMMENT:
                block.append(token.string.lstrip("#: "))
            elif token.type != tokenize.NL and block:
                yield " ".join(block)
                block = []
        docstrings = {id(node) for node in self._docstrings()}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield " ".join(node.value.split())

    def imports(self) -> set[str]:
        """Returns the modules that it may import, by their dotted names."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return found

    def private(self) -> int:
        """Returns how often it touches a private attribute of something other than itself."""
        return sum(
            isinstance(node, ast.Attribute)
            and re.match(r"_[a-z]", node.attr) is not None
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
            for node in ast.walk(self.tree)
        )

    def _docstrings(self) -> Iterator[ast.Constant]:
        for node in ast.walk(self.tree):
            value = getattr(node, "value", None)
            if (
                isinstance(node, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                yield value


def measure() -> dict[str, int]:
    """Returns what there is, by row."""
    names = sorted(_names(ROOT))
    sources = [Source(name) for name in names if name.endswith(".py")]
    product = [one for one in sources if one.name.startswith(PRODUCT)]
    tests = [one for one in sources if one.name.startswith("tests/")]
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in names if name.endswith(".md")}
    commands: Any = typer.main.get_command(app)
    return {
        "lines of product": _lines(product),
        "lines of its core": _lines(one for one in product if one.name.startswith(CORE)),
        "lines of Lua": sum(_lua_lines(name) for name in names if name.endswith(".lua")),
        "lines of tests": _lines(tests),
        "lines of trials": _lines(one for one in sources if one.name.startswith("trials/")),
        "words at the top of cache-admin": len(commands.commands),
        "verbs": len(VERBS),
        "options": _options(commands),
        "settings": sum(1 for _ in _settings(Settings)),
        "words in Markdown": sum(len(text.split()) for text in pages.values()),
        "riddles": _riddles(product, pages.values()),
        "files that name sessions": sum(
            "session" in name for name in names if name.endswith((".py", ".lua"))
        ),
        "small modules with one importer": len(_small(product)),
        "private attributes touched by tests": sum(one.private() for one in tests),
    }


def _names(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in _NOT_OURS or path.is_symlink():
            continue
        if path.is_dir():
            yield from _names(path)
        else:
            yield path.relative_to(ROOT).as_posix()


def _lines(sources: Iterable[Source]) -> int:
    return sum(one.lines() for one in sources)


def _lua_lines(name: str) -> int:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) and not line.lstrip().startswith("--") for line in lines)


def _options(command: Any) -> int:
    inner = getattr(command, "commands", {}).values()
    return sum(map(_options, inner)) if inner else sum(p.param_type_name == "option" for p in command.params)


def _settings(model: type) -> Iterator[str]:
    for name, field in model.model_fields.items():  # type: ignore[attr-defined]
        inner = model_of(field.annotation)
        yield from (name,) if inner is None else _settings(inner)


def _riddles(product: Sequence[Source], pages: Iterable[str]) -> int:
    texts = [text for one in product for text in one.texts()]
    texts += [" ".join(part.split()) for page in pages for part in NO_PROSE.sub("`x`", page).split("\n\n")]
    return sum(len(RIDDLE.findall(text)) for text in texts)


def _small(product: Sequence[Source]) -> list[str]:
    importers = Counter(name for one in product for name in one.imports())
    return [
        one.name
        for one in product
        if one.lines() < SMALL
        and not one.name.endswith(("__init__.py", "__main__.py"))
        and importers[one.name.removesuffix(".py").replace("/", ".")] < 2
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(argv)
    bounds: Mapping[str, int] = json.loads(BOUNDS.read_text(encoding="utf-8"))
    found = measure()
    for row, count in found.items():
        print(f"{row:<40} {count:>8,}   bound {bounds.get(row, count):>8,}")
    if options.write:
        lower = {row: min(count, bounds.get(row, count)) for row, count in found.items()}
        BOUNDS.write_text(json.dumps(lower, indent=2) + "\n", encoding="utf-8")
    over = [row for row, count in found.items() if count > bounds.get(row, count)]
    for row in over:
        print(
            f"size: {row}: got {found[row]:,}, expected {bounds[row]:,} at most; take something "
            "away, or raise the bound in tools/size.json and say why in the commit",
            file=sys.stderr,
        )
    return 1 if options.check and over else 0


if __name__ == "__main__":
    sys.exit(main())
