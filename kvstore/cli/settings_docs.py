"""docs/settings.md and docs/settings.schema.json, generated from schemas/settings.py.

    python -m kvstore.cli.settings_docs > docs/settings.md
    python -m kvstore.cli.settings_docs --schema > docs/settings.schema.json

What a key is for stands in the `#:` comment above it, and nowhere else: `texts` reads those from the source.
Tests compare both files with what this makes, and hold the tables below against the code that reads the keys.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo

from kvstore.build import PREFIX
from schemas import settings as source
from schemas.base import model_of
from schemas.settings import Settings, Tiers, parse_bytes

Readers = Literal["engines", "cache-admin", "both"]

#: Who reads a section, or a key of it that differs.
READERS: dict[str, Readers] = {
    "": "both",
    "ec": "engines",
    "eviction.pinned_share": "cache-admin",
    "identity": "engines",
    "janitor": "cache-admin",
    "janitor.lease_s": "both",
    "kv": "engines",
    "kv.load_deadline_s": "both",
    "kv.match_deadline_s": "both",
    "kv.staging_bytes": "both",
}
#: Settings that all processes of one store must have alike, engines and janitors: by section or key.
STORE_WIDE = (
    "payloads", "index", "capacity_bytes", "grace_s", "eviction", "journal", "admission.window_s",
    "admission.sketch_bytes", "janitor.lease_s",
)  # fmt: skip
#: Of these, what may differ from node to node.
PER_NODE = ("payloads.fast", "payloads.fast_capacity", "eviction.pinned_share")
#: What engines must have alike to find each other's blocks: it is part of the namespace.
SHARED = (
    "identity.tenant", "identity.epoch", "identity.model", "identity.weights", "identity.any_tp",
    "identity.any_vllm", "segment.codec",
)  # fmt: skip

_WHO: dict[Readers, str] = {
    "engines": "read by engines",
    "cache-admin": "read by `cache-admin`",
    "both": "read by engines and `cache-admin`",
}

_INTRO = """\
# Settings

<!-- Generated: python -m kvstore.cli.settings_docs > docs/settings.md -->

One tree of settings describes a store, and everything that opens the store reads the same one: engines (the
connectors) and `cache-admin`, whose `serve` is the janitor. Only [`payloads`](#payloads) has no default. A
key that is not below is refused, with the ones that are allowed in its place.

## Where settings come from

Each source overrides the ones before it, key by key:

1. the defaults below
2. **a mapping or a file**, one of the two. The mapping is what stands beside `kv_connector` or
   `ec_connector` in an engine's configuration, `kv_connector_extra_config` and `ec_connector_extra_config`.
   The file is YAML and holds the whole tree; it is named by the mapping's one key `settings`, by
   `--settings FILE` of `cache-admin`, or, where neither is given, by the environment variable
   `KVSTORE_SETTINGS`
3. **environment variables** `KVSTORE_<KEY>`, upper case, with two underscores between the levels:
   `KVSTORE_INDEX`, `KVSTORE_REDIS__PASSWORD`. A variable `KVSTORE_...` that is no setting is refused; those
   that Kubernetes makes for a Service called `kvstore` are ignored
4. for `cache-admin`: `--index` and `--payloads`

Secrets belong into the environment. They are shown nowhere: neither in logs nor in reports or error
messages, and of a URL neither its user nor its query.

## Units

| a key that ends in | is | is written |
| --- | --- | --- |
| `_s` | seconds | `0.5`, `120` |
| `_bytes`, and `fast_capacity` | a size | bytes, or `512MiB`, `50GiB`, `1.5TiB` (powers of 1024: KiB, MiB, \
GiB, TiB), `500GB` (powers of 1000: kB, MB, GB, TB) |
| `_tokens`, `_blocks` | a number of them | `64` |
"""

_STACKS = """\
## Three usual stacks

One machine, nothing to install:

```yaml
payloads: file:///var/lib/kvstore     # index: SQLite inside this folder
capacity_bytes: 200GiB
```

A fleet, with Redis and a bucket:

```yaml
payloads: s3://my-bucket/kvstore?region=eu-central-1
index: rediss://redis.example:6379/0  # KVSTORE_REDIS__USERNAME and KVSTORE_REDIS__PASSWORD in the environment
capacity_bytes: 10TiB
```

The same with a disk of each node in front of the bucket:

```yaml
payloads:
  fast: file:///mnt/nvme/kvstore
  slow: s3://my-bucket/kvstore?region=eu-central-1
  fast_capacity: 500GiB
index: rediss://redis.example:6379/0
capacity_bytes: 10TiB
```

An engine names the file, or holds the same keys itself; `cache-admin vllm-config` writes the whole flag:

```json
{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"settings": "/etc/kvstore/settings.yaml"}}
```

[`settings.schema.json`](settings.schema.json), beside this page, is the JSON schema of such a file: an
editor that is told of it (for many, by a first line `# yaml-language-server: $schema=settings.schema.json`)
completes and checks keys. What depends on several keys is checked by the program alone; `cache-admin
doctor` says whether a file is accepted, and what it reaches.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    path: str
    field: FieldInfo
    text: str

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.path.upper().replace(".", "__")

    @property
    def readers(self) -> Readers:
        """Which programs read it."""
        section = self.path.partition(".")[0]
        return READERS.get(self.path) or READERS.get(section) or READERS[""]

    def is_within(self, paths: tuple[str, ...]) -> bool:
        """Whether it, or its section, is one of these."""
        return self.path in paths or self.path.partition(".")[0] in paths

    @property
    def agrees(self) -> str:
        """With whom it must agree, in words; empty if with nobody."""
        if self.is_within(SHARED):
            return "engines share only where it is the same"
        if self.is_within(STORE_WIDE) and not self.is_within(PER_NODE):
            return "the same for all processes of a store"
        return ""


@cache
def texts(model: type[BaseModel]) -> dict[str, str]:
    """The `#:` comment of every field of a class, as one paragraph."""
    lines, first = inspect.getsourcelines(model)
    tree = ast.parse("".join(lines)).body[0]
    assert isinstance(tree, ast.ClassDef), first
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            at = node.lineno - 1
            said: list[str] = []
            while at and lines[at - 1].lstrip().startswith("#:"):
                at -= 1
                said.insert(0, lines[at].strip().removeprefix("#:").strip())
            found[node.target.id] = " ".join(said)
    return found


def keys(model: type[BaseModel] = Settings, above: str = "") -> Iterator[Key]:
    """Every setting that is a value, in the order of the source; `payloads` before what may be inside it."""
    for name, field in model.model_fields.items():
        path = f"{above}{name}"
        inner = model_of(field.annotation)
        if inner is None or inner is not field.annotation:
            yield Key(path, field, texts(model)[name])
        if inner is not None:
            yield from keys(inner, f"{path}.")


def reference() -> str:
    """docs/settings.md."""
    parts = [_INTRO, _STACKS, *_agreement(), "## The store\n"]
    parts += [_entry(key) for key in keys() if "." not in key.path]
    parts.append("## Two tiers of payloads: `payloads.*`\n")
    parts.append(f"{_paragraphs(Tiers.__doc__ or '')}\n")
    parts += [_entry(key) for key in keys(Tiers, "payloads.")]
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            parts.append(f"## `{name}`\n")
            parts.append(f"{_paragraphs(section.__doc__ or '')}\n")
            parts += [_entry(key) for key in keys(section, f"{name}.")]
    return "\n".join(parts)


def _agreement() -> Iterator[str]:
    every = list(keys())
    alike = _links(key.path for key in every if key.agrees.startswith("the same"))
    shared = _links(key.path for key in every if key.is_within(SHARED))
    admins = _links(key.path for key in every if key.readers == "cache-admin")
    yield "## Who must agree\n"
    yield "Engines and janitors that read one file agree by themselves. Where they can't:\n"
    yield (
        "- **all processes of one store**, engines and janitors, must have these alike, or they evict, "
        f"forget and delete by different rules: {alike}. In Redis the size of a namespace's buckets follows "
        "from the `capacity_bytes` of the process that registers it first\n"
        "- **engines find each other's blocks** only where these are the same, as they are part of the "
        f"namespace: {shared}\n"
        f"- **only `cache-admin`** reads {admins}\n"
        "- **only engines** read `identity`, `ec` and most of `kv`; each key says so\n"
    )


def _links(paths: Iterable[str]) -> str:
    return ", ".join(f"[`{path}`](#{_anchor(path)})" for path in paths)


def _anchor(path: str) -> str:
    """As Markdown makes them of a heading."""
    return path.replace(".", "")


def _entry(key: Key) -> str:
    facts = [kind(key.field), f"default: {default(key.field)}", f"`{key.variable}`", _WHO[key.readers]]
    facts += [key.agrees] if key.agrees else []
    return f"### `{key.path}`\n\n{'; '.join(facts)}\n\n{key.text}\n"


def kind(field: FieldInfo) -> str:
    """A field's type with its bounds, in words."""
    if model_of(field.annotation) is not None:
        return "a URL, or the keys of two tiers"
    inner = _alternatives(field)[0]
    inner = get_args(inner)[0] if get_origin(inner) is Annotated else inner
    size = _is_size(field)
    if get_origin(inner) is Literal:
        return "one of " + ", ".join(f"`{one}`" for one in get_args(inner))
    names = {bool: "`true` or `false`", int: "a whole number", float: "a number", str: "text"}
    names |= {SecretStr: "text, secret"}
    what = "a size" if size else "seconds" if _is_time(field) else names[inner]
    return f"{what} {_bounds(field, size)}".strip()


def _alternatives(field: FieldInfo) -> list[Any]:
    """What a field may be, besides left out."""
    if get_origin(field.annotation) is Literal:
        return [field.annotation]
    return [one for one in get_args(field.annotation) if one is not type(None)] or [field.annotation]


def _bounds(field: FieldInfo, size: bool) -> str:
    given: dict[str, list[float]] = {}
    for one in _metadata(field):
        for name in ("ge", "gt", "le", "min_length", "max_length"):
            if (bound := getattr(one, name, None)) is not None:
                given.setdefault(name, []).append(bound)
    # A field narrows what its type bounds.
    least, above, most = (pick(given[name]) if name in given else None for pick, name in _NARROWEST)
    shortest, longest = (given.get(name, [0])[-1] for name in ("min_length", "max_length"))
    if longest:
        return f"of {shortest} to {longest} characters"
    if least is not None and most is not None:
        return f"from {_amount(least, size)} to {_amount(most, size)}"
    if above is not None and most is not None:
        return f"above {_amount(above, size)}, up to {_amount(most, size)}"
    if above is not None:
        return f"above {_amount(above, size)}"
    # That a size isn't negative goes without saying.
    return f"from {_amount(least, size)}" if least is not None and (least or not size) else ""


_NARROWEST: tuple[tuple[Callable[[list[float]], float], str], ...] = ((max, "ge"), (max, "gt"), (min, "le"))


def _metadata(field: FieldInfo) -> Iterator[Any]:
    """What bounds a field; of an optional one, also what stands inside its alternatives."""
    yield from field.metadata
    for inner in _alternatives(field):
        for one in getattr(inner, "__metadata__", ()):
            yield from one.metadata if isinstance(one, FieldInfo) else [one]


def _is_size(field: FieldInfo) -> bool:
    return any(isinstance(one, BeforeValidator) and one.func is parse_bytes for one in _metadata(field))


def _is_time(field: FieldInfo) -> bool:
    """Whether it is of the type Seconds, the only one whose numbers may not be infinite."""
    return any(getattr(one, "allow_inf_nan", None) is False for one in _metadata(field))


def default(field: FieldInfo) -> str:
    """A field's default, in units that people use."""
    if field.is_required():
        return "none; must be given"
    value = field.default
    if value is None:
        return "left out"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"{value:g} s{_longer(value)}" if _is_time(field) else f"`{value:g}`"
    if _is_size(field):
        return _amount(value, True)
    return f"`{value}`"


def _longer(seconds: float) -> str:
    for name, size in (("day", 86400), ("hour", 3600)):
        count, rest = divmod(seconds, size)
        if count and not rest:
            return f" ({count:.0f} {name}{'s' if count > 1 else ''})"
    return ""


def _amount(value: float, size: bool) -> str:
    if size:
        for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value and not value % (1 << power):
                return f"{int(value) >> power} {unit}"
        return f"{value:g} byte{'s' if value != 1 else ''}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def schema(*, secrets: bool = True) -> dict[str, Any]:
    """The JSON schema of a settings file, for editors and the chart. `secrets=False`: without the keys that
    belong into the environment."""
    made = Settings.model_json_schema()
    definitions: dict[str, Any] = made["$defs"]
    models = {name: getattr(source, name) for name in definitions} | {"Settings": Settings}
    for name, model in models.items():
        node = made if model is Settings else definitions[name]
        node["description"] = _paragraphs(model.__doc__ or "")
        for field, info in model.model_fields.items():
            described = node["properties"][field]
            if not secrets and SecretStr in (info.annotation, *get_args(info.annotation)):
                del node["properties"][field]
                continue
            described.pop("title", None)
            if "$ref" in described:
                described.pop("default", None)  # its keys say theirs
            if _is_size(info):
                _accept_sizes(described)
            if text := texts(model)[field]:
                described["description"] = text
        node.pop("title", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvstore settings",
        **made,
    }


def _accept_sizes(node: dict[str, Any]) -> None:
    """Beside the number also its spellings, of which only the form can be checked."""
    text = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KkMmGgTt][Ii]?)?[Bb]?\s*$"}
    inner = [one for one in node.pop("anyOf", []) if one.get("type") != "null"]
    number = inner[0] if inner else {name: node.pop(name) for name in list(node) if name not in _KEPT}
    # Of a bound that a field narrows pydantic leaves a word that is none of JSON schema's.
    number.pop("ge", None)
    node["anyOf"] = [number, text] + ([{"type": "null"}] if inner else [])


#: What a schema says of a field besides its type.
_KEPT = {"default", "description", "title"}


if __name__ == "__main__":
    if sys.argv[1:] == ["--schema"]:
        sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    else:
        sys.stdout.write(reference())
