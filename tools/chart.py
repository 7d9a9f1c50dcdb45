"""Generates values.schema.json and the table in README.md from the chart's values.yaml.

    python -m tools.chart            # writes both
    python -m tools.chart --check    # says what isn't in step, and writes nothing

Above each key of values.yaml stands a comment:

    # -- What it means, in as many lines as it takes
    # @schema {"enum": ["s3", "pvc"]}
    key: default

`# -- ` begins the description. `# @schema` adds to what the default says of the type, and wins over it, in
JSON Schema of draft 7, with two words more: `"nullable": true` allows null as well, and `"settings": true`
stands for the store's own settings (schemas/settings/), which the schema then defines once. A map is a
group of keys, each with its comment, unless its `@schema` says `properties` or `additionalProperties`: then
it is one value. Empty lists say what they hold with `items`.

Groups are closed: a key that isn't in values.yaml is refused by helm. So is one that a user sets to null,
since templates count on it, unless it is nullable.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from schemas.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm"
MARK = "{{ values }}"

Schema = dict[str, Any]


@dataclass
class Value:
    """One key of values.yaml."""

    path: tuple[str, ...]
    line: int
    default: Any
    text: str
    extra: Schema
    #: The keys of a group; None: a value.
    children: list[Value] | None = None

    @property
    def name(self) -> str:
        return ".".join(part.replace(".", "\\.") for part in self.path)


@dataclass
class Reader:
    """Reads values.yaml with its comments, and collects what is wrong with them."""

    lines: list[str]
    problems: list[str] = field(default_factory=list)

    def complain(self, line: int, path: tuple[str, ...], what: str) -> None:
        self.problems.append(f"values.yaml:{line + 1}: {'.'.join(path)}: {what}")

    def group(self, node: yaml.MappingNode, above: tuple[str, ...]) -> list[Value]:
        return [self.value(key, value, above) for key, value in node.value]

    def value(self, key: yaml.Node, node: yaml.Node, above: tuple[str, ...]) -> Value:
        path, line = (*above, str(key.value)), key.start_mark.line
        text, extra = self.comment(line, path)
        value = Value(path, line, _plain(node), text, extra)
        free = {"properties", "additionalProperties", "settings"} & extra.keys()
        if isinstance(node, yaml.MappingNode) and not free:
            if node.value and node.flow_style:
                self.complain(line, path, "write a group in lines of its own, so that each key has a comment")
            elif node.value:
                value.children = self.group(node, path)
            else:
                self.complain(line, path, 'an empty map needs # @schema {"additionalProperties": ...}')
        if value.default == [] and "items" not in extra:
            self.complain(line, path, 'an empty list needs # @schema {"items": ...}')
        if value.default is None and not {"type", "enum", "anyOf", "oneOf"} & extra.keys():
            self.complain(line, path, 'null says no type: # @schema {"type": ..., "nullable": true}')
        return value

    def comment(self, line: int, path: tuple[str, ...]) -> tuple[str, Schema]:
        """Returns the description and the schema that stand right above a line."""
        first = line
        while first > 0 and self.lines[first - 1].lstrip().startswith("#"):
            first -= 1
        words: list[str] = []
        extra: Schema = {}
        begun = False
        for number in range(first, line):
            said = self.lines[number].strip()
            if said.startswith("# -- "):
                begun, words = True, [said[5:].strip()]
            elif said.startswith("# @schema"):
                extra |= self.schema(number, path, said[len("# @schema") :])
            elif begun:
                words.append(said.lstrip("#").strip())
        if not begun:
            self.complain(line, path, "no comment: a line that begins with '# -- ' belongs above it")
        return " ".join(word for word in words if word), extra

    def schema(self, line: int, path: tuple[str, ...], text: str) -> Schema:
        try:
            found = json.loads(text)
        except ValueError as exc:
            self.complain(line, path, f"# @schema is not JSON ({exc}); it is one object on one line")
            return {}
        if not isinstance(found, dict):
            self.complain(line, path, '# @schema is an object, as in {"enum": ["a", "b"]}')
            return {}
        return found


def _plain(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def read(text: str) -> tuple[list[Value], list[str]]:
    """Returns the values with their comments, none if they can't be read, and a sentence for each problem."""
    reader = Reader(text.splitlines())
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as exc:
        return [], [f"values.yaml is not YAML: {' '.join(str(exc).split())}"]
    if not isinstance(node, yaml.MappingNode):
        return [], ["values.yaml is not a map"]
    return reader.group(node, ()), reader.problems


# The schema.

_TYPES: list[tuple[type, str]] = [(bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")]


#: What `"settings": true` becomes. Several values hold settings, and all of them are checked by one tree; a
#: validator of draft 7 looks under `definitions` for it, and at nothing that stands beside a `$ref`.
_SETTINGS = {"$ref": "#/definitions/settings"}


def schema(values: list[Value]) -> Schema:
    """Returns the schema of the whole file."""
    defined = {"definitions": {"settings": settings()}} if any(map(_has_settings, _leaves(values))) else {}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the kvstore chart",
        **_group(values),
    } | {
        # Helm hands `global` to every subchart of a larger chart, and reads `enabled` itself, where the
        # larger chart's `condition` names it.
        "properties": _group(values)["properties"]
        | {"global": {"type": "object"}, "enabled": {"type": "boolean"}},
        **defined,
    }


def _group(values: list[Value]) -> Schema:
    required = [value.path[-1] for value in values if not _nullable(value)]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {value.path[-1]: _one(value) for value in values},
        **({"required": required} if required else {}),
    }


def _has_settings(value: Value) -> bool:
    return bool(value.extra.get("settings"))


def _nullable(value: Value) -> bool:
    return value.default is None or bool(value.extra.get("nullable"))


def _one(value: Value) -> Schema:
    said = {"description": value.text} if value.text else {}
    if value.children is not None:
        return said | _group(value.children) | value.extra
    if _has_settings(value):
        return said | _SETTINGS
    extra = dict(value.extra)
    nullable = extra.pop("nullable", False)
    found: Schema = said | ({} if value.default is None else {"default": value.default})
    kind = next((name for kind, name in _TYPES if isinstance(value.default, kind)), None)
    if isinstance(value.default, list):
        found |= {"type": "array"}
    elif isinstance(value.default, dict):
        found |= {"type": "object", "additionalProperties": False}
    elif kind is not None and not {"enum", "anyOf", "oneOf"} & extra.keys():
        found |= {"type": kind}
    found |= extra
    if nullable and "type" in found:
        kinds = found["type"] if isinstance(found["type"], list) else [found["type"]]
        found["type"] = [*kinds, "null"]
    return found


#: Settings that the chart takes from values of their own; _validate_core.tpl refuses them here.
_ELSEWHERE = ("payloads", "index", "capacity_bytes")


def settings() -> Schema:
    """Returns the store's settings tree, closed, with the sizes that it accepts as text."""
    tree = Settings.model_json_schema()
    definitions = tree.pop("$defs")
    found = _inline(tree, definitions)
    found.pop("required", None)
    found.pop("title", None)
    for name in _ELSEWHERE:
        found["properties"][name] = {"description": "Set by values of its own."}
    return {**found, "default": {}}


def _inline(part: Any, definitions: Schema, name: str = "") -> Any:
    if isinstance(part, list):
        return [_inline(item, definitions, name) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        part = definitions[part["$ref"].rpartition("/")[2]] | {
            key: value for key, value in part.items() if key not in ("$ref", "default")
        }
    found = {
        key: {inner: _inline(value, definitions, inner) for inner, value in value.items()}
        if key == "properties"
        else _inline(value, definitions, name)
        for key, value in part.items()
        if key not in ("title", "default", "format", "writeOnly", "discriminator", "description")
    }
    if name.endswith("_bytes") and found.get("type") == "integer":
        size = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([Bb]|[KMGTkmgt][Ii]?[Bb])?\s*$"}
        return {"anyOf": [found, size]}
    return found


# The table.


def table(values: list[Value]) -> str:
    """Returns Markdown with a section for each group at the top, and keys in full."""
    alone = [value for value in values if value.children is None]
    parts = ["### General\n\n" + _rows(alone)] if alone else []
    for value in values:
        if value.children is not None:
            said = f"{_words(value.text)}\n\n" if value.text else ""
            parts.append(f"### {value.path[0]}\n\n{said}{_rows(list(_leaves(value.children)))}")
    return "\n".join(parts)


def _leaves(values: list[Value]) -> Iterator[Value]:
    for value in values:
        if value.children is None:
            yield value
        else:
            yield from _leaves(value.children)


def _rows(values: list[Value]) -> str:
    rows = [f"| `{value.name}` | `{_shown(value.default)}` | {_cell(value)} |" for value in values]
    return "\n".join(["| value | default | |", "| --- | --- | --- |", *rows]) + "\n"


def _shown(default: Any) -> str:
    return json.dumps(default, ensure_ascii=False).replace("|", "\\|")


def _cell(value: Value) -> str:
    return _words(value.text).replace("|", "\\|")


def _words(text: str) -> str:
    """Escapes names in angle brackets, which are no tags."""
    return re.sub(r"<(?=[A-Za-z/])", "&lt;", text)


# The files.


def generate(chart: Path = CHART) -> tuple[dict[Path, str], list[str]]:
    """Returns what each generated file should hold, and what is wrong with the comments."""
    values, problems = read((chart / "values.yaml").read_text())
    if not values:
        return {}, problems
    readme = (chart / "README.md.gotmpl").read_text()
    if readme.count(MARK) != 1:
        problems.append(f"README.md.gotmpl: {MARK} belongs in it, once, where the table goes")
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    for name in ("version", "appVersion", "kubeVersion"):
        readme = readme.replace(f"{{{{ {name} }}}}", str(about[name]))
    first = "<!-- Generated from README.md.gotmpl and values.yaml: python -m tools.chart -->\n"
    return {
        chart / "values.schema.json": json.dumps(schema(values), indent=1, ensure_ascii=False) + "\n",
        chart / "README.md": first + readme.replace(MARK, table(values).rstrip()),
    }, problems


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all is in step or written, 1 if a comment is wrong or (--check) a file is out of step."""
    parser = argparse.ArgumentParser(description="Generate the chart's schema and README from values.yaml.")
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args(arguments)
    check = options.check
    files, problems = generate()
    for path, text in files.items():
        if path.is_file() and path.read_text() == text:
            continue
        if check:
            problems.append(f"{path.relative_to(ROOT)} is not what values.yaml says: python -m tools.chart")
        else:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
