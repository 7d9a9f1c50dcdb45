"""docs/settings.md and docs/settings.schema.json, generated from schemas/settings/.

    python -m tools.reference.settings > docs/settings.md
    python -m tools.reference.settings --schema > docs/settings.schema.json

The `#:` comment above a key says what the key is for, and nothing else does; `texts` reads them.
Tests compare both files with what this makes, and hold the tables below against the code that reads the keys.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from kvstore.build import PREFIX
from schemas import settings as source
from schemas.base import model_of
from schemas.settings import Settings, Tiers
from tools.reference.fields import default, is_size, kind

Readers = Literal["engines", "cache-admin", "both"]

#: Programs that read a section, or a key that differs from its section.
READERS: dict[str, Readers] = {
    "payloads.prefetch_bytes": "engines",
    "": "both",
    "ec": "engines",
    "eviction.pinned_share": "cache-admin",
    "identity": "engines",
    "janitor": "cache-admin",
    "kv": "engines",
    "kv.load_deadline_s": "both",
    "kv.match_deadline_s": "both",
    "kv.staging_bytes": "both",
    "ec.staging_bytes": "both",
}
#: Settings that all processes of one store must have alike, engines and janitors: by section or key.
STORE_WIDE = (
    "payloads", "index", "capacity_bytes", "grace_s", "eviction", "journal", "admission.window_s",
    "admission.sketch_bytes",
)  # fmt: skip
#: Those among them that may differ from node to node.
PER_NODE = ("payloads.fast", "payloads.fast_capacity", "payloads.prefetch_bytes", "eviction.pinned_share")
#: Settings that engines must have alike to find each other's blocks, as they are part of the namespace.
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

<!-- Generated: python -m tools.reference.settings > docs/settings.md -->

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
        """The setting's name in the environment."""
        return PREFIX + self.path.upper().replace(".", "__")

    @property
    def readers(self) -> Readers:
        """The programs that read it."""
        section = self.path.partition(".")[0]
        return READERS.get(self.path) or READERS.get(section) or READERS[""]

    def is_within(self, paths: tuple[str, ...]) -> bool:
        """Tells whether it, or its section, is one of these."""
        return self.path in paths or self.path.partition(".")[0] in paths

    @property
    def agrees(self) -> str:
        """The processes that must have it alike, in words; empty if none must."""
        if self.is_within(SHARED):
            return "engines share only where it is the same"
        if self.is_within(STORE_WIDE) and not self.is_within(PER_NODE):
            return "the same for all processes of a store"
        return ""


@cache
def texts(model: type[BaseModel]) -> dict[str, str]:
    """Returns the `#:` comment of every field of a class, as one paragraph."""
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
    """Yields every setting that is a value, in the order of the source; `payloads` before its own keys."""
    for name, field in model.model_fields.items():
        path = f"{above}{name}"
        inner = model_of(field.annotation)
        if inner is None or inner is not field.annotation:
            yield Key(path, field, texts(model)[name])
        if inner is not None:
            yield from keys(inner, f"{path}.")


def reference() -> str:
    """Returns docs/settings.md."""
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
        "- **only engines** read `identity` and most of `kv` and `ec`; each key says so\n"
    )


def _links(paths: Iterable[str]) -> str:
    return ", ".join(f"[`{path}`](#{_anchor(path)})" for path in paths)


def _anchor(path: str) -> str:
    """Returns the anchor that Markdown gives to a heading."""
    return path.replace(".", "")


def _entry(key: Key) -> str:
    facts = [kind(key.field), f"default: {default(key.field)}", f"`{key.variable}`", _WHO[key.readers]]
    facts += [key.agrees] if key.agrees else []
    return f"### `{key.path}`\n\n{'; '.join(facts)}\n\n{key.text}\n"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def schema(*, secrets: bool = True) -> dict[str, Any]:
    """Returns the JSON schema of a settings file, for editors and the chart. `secrets=False` leaves out the
    keys that belong into the environment.
    """
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
            if is_size(info):
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
    """Lets a size also be a text such as 512MiB, of which only the form can be checked."""
    text = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KkMmGgTt][Ii]?)?[Bb]?\s*$"}
    inner = [one for one in node.pop("anyOf", []) if one.get("type") != "null"]
    number = inner[0] if inner else {name: node.pop(name) for name in list(node) if name not in _KEPT}
    # For a bound that a field narrows, pydantic leaves a key that JSON schema doesn't have.
    number.pop("ge", None)
    node["anyOf"] = [number, text] + ([{"type": "null"}] if inner else [])


#: Keys of a field's schema besides its type.
_KEPT = {"default", "description", "title"}


if __name__ == "__main__":
    if sys.argv[1:] == ["--schema"]:
        sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    else:
        sys.stdout.write(reference())
