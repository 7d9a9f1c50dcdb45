"""The settings reference and the JSON schema are generated, committed, complete and true."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvstore.build import PREFIX, load_settings, settings_keys
from schemas.base import model_of
from schemas.settings import Settings
from tools.reference import fields
from tools.reference import settings as docs

ROOT = Path(__file__).parents[2]
KEYS = {key.path: key for key in docs.keys()}
#: Not readers: they list or test all settings.
NO_READERS = {"tools/reference/settings.py"}


def test_the_committed_reference_is_the_generated_one() -> None:
    committed = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    made = docs.reference()
    assert committed == made, "run: python -m tools.reference.settings > docs/settings.md"


def test_the_committed_schema_is_the_generated_one() -> None:
    committed = (ROOT / "docs" / "settings.schema.json").read_text(encoding="utf-8")
    made = json.dumps(docs.schema(), indent=2) + "\n"
    assert committed == made, "run: python -m tools.reference.settings --schema > docs/settings.schema.json"


def test_every_setting_is_there_and_has_a_sentence() -> None:
    assert {key.variable.removeprefix(PREFIX) for key in KEYS.values()} == settings_keys()
    text = docs.reference()
    for path, key in KEYS.items():
        assert re.search(r"[a-z].*[.:]", key.text), f"{path}: no sentence in a #: comment above it"
        assert text.count(f"\n### `{path}`\n") == 1
    sections = {path.partition(".")[0] for path in KEYS if "." in path}
    for section in sections:
        assert (model_of(Settings.model_fields[section].annotation) or Settings).__doc__, section


def test_links_lead_to_one_heading() -> None:
    text = docs.reference()
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors)


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("payloads", "a URL, or the keys of two tiers", "none; must be given"),
        ("kv.match_deadline_s", "seconds above 0", "0.5 s"),
        ("janitor.forget_after_s", "seconds above 0", "604800 s (7 days)"),
        ("segment.target_bytes", "a size from 4 KiB to 1 GiB", "32 MiB"),
        ("segment.codec", "one of `none`, `lz4`, `planes-lz4`", "`none`"),
        ("s3.gap_bytes", "a size", "1 MiB"),
        ("eviction.namespace_bytes", "a size from 1 byte", "left out"),
        ("eviction.pinned_share", "a number from 0 to 1", "`0.5`"),
        ("redis.password", "text, secret", "left out"),
        ("identity.tenant", "text of 1 to 128 characters", "`default`"),
        ("s3.tls_verify", "`true` or `false`", "`true`"),
        ("kv.handoff", "`true` or `false`", "`false`"),
    ],
)
def test_types_and_defaults_in_words(path: str, kind: str, default: str) -> None:
    assert fields.kind(KEYS[path].field) == kind
    assert fields.default(KEYS[path].field) == default


# Whether what is said of readers is so


@cache
def attributes(root: str) -> dict[str, tuple[set[tuple[str, str]], str]]:
    """Of every module: the attributes that it takes, each with what it is taken from, and its text."""
    found = {}
    for file in (ROOT / root).rglob("*.py"):
        name = str(file.relative_to(ROOT))
        if name not in NO_READERS:
            text = file.read_text(encoding="utf-8")
            nodes = ast.walk(ast.parse(text))
            if name.startswith("schemas/settings/"):
                # Checks of values are no use of them.
                parts = [
                    one for one in nodes if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")
                ]
                nodes = (inner for one in parts for inner in ast.walk(one))
            nodes = list(nodes)
            # A method may have the name of a key, but no key is called.
            called = {id(one.func) for one in nodes if isinstance(one, ast.Call)}
            taken = (one for one in nodes if isinstance(one, ast.Attribute) and id(one) not in called)
            found[name] = (
                {(last(one.value), one.attr) for one in taken},
                text,
            )
    return found


def last(node: ast.expr) -> str:
    """The name nearest to the dot."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


SECTIONS = {path.partition(".")[0] for path in KEYS if "." in path}


def readers(path: str) -> set[str]:
    """Modules that take the key's attribute, not of another section, and name its own or that one's class."""
    section, _, leaf = path.rpartition(".")
    found = set()
    for root in ("kvstore", "connectors", "schemas"):
        for name, (taken, text) in attributes(root).items():
            of = {base for base, attribute in taken if attribute == leaf} - (SECTIONS - {section})
            known = (
                not section or section in {attribute for _, attribute in taken} or class_of(section) in text
            )
            if of and known:
                found.add(name)
    return found


def class_of(section: str) -> str:
    model = model_of(Settings.model_fields[section].annotation)
    assert model is not None
    return model.__name__


@pytest.mark.parametrize("path", KEYS)
def test_every_key_is_read_by_those_who_are_said_to(path: str) -> None:
    found = readers(path)
    admin = {
        name for name in found if name.startswith(("kvstore/admin/", "kvstore/cli/", "kvstore/janitor/"))
    }
    engines = {name for name in found if name.startswith("connectors/")}
    store = found - admin - engines
    match KEYS[path].readers:
        case "engines":
            assert engines or store, "nothing reads it"
            assert not admin
        case "cache-admin":
            assert admin, "nothing reads it"
            assert not engines | store
        case "both":
            assert store or (engines and admin), found


def test_a_key_that_nothing_reads_is_noticed() -> None:
    assert not readers("kv.match_deadline")
    assert not readers("breaker.jitter_s")


# The schema


def accepted(tree: Any) -> bool:
    return jsonschema.Draft202012Validator(docs.schema()).is_valid(tree)


def test_the_schema_accepts_the_examples_and_so_does_the_program() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", docs.reference(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        tree = yaml.safe_load(block)
        assert accepted(tree)
        load_settings(tree, environ={})


@pytest.mark.parametrize(
    ("tree", "good"),
    [
        ({"payloads": "file:///x"}, True),
        ({"payloads": "file:///x", "capacity_bytes": "1.5TiB", "kv": {"staging_bytes": 1 << 20}}, True),
        ({"payloads": "file:///x", "eviction": {"namespace_bytes": None}}, True),
        ({"payloads": "file:///x", "eviction": {"namespace_bytes": "5GB"}}, True),
        ({"payloads": {"fast": "file:///x", "slow": "s3://bucket/x"}, "index": "redis://h"}, True),
        ({}, False),
        ({"payloads": "file:///x", "capacity": "1TiB"}, False),
        ({"payloads": "file:///x", "kv": {"save_decodes": True}}, False),
        ({"payloads": "file:///x", "capacity_bytes": "lots"}, False),
        ({"payloads": "file:///x", "segment": {"target_bytes": 1}}, False),
        ({"payloads": "file:///x", "segment": {"codec": "zstd"}}, False),
        ({"payloads": "file:///x", "grace_s": 0}, False),
        ({"payloads": {"fast": "file:///x"}}, False),
    ],
)
def test_the_schema_says_what_the_program_says(tree: dict[str, Any], good: bool) -> None:
    assert accepted(tree) is good
    try:
        load_settings(tree, environ={})
    except Exception:
        assert not good
    else:
        assert good


def test_secrets_can_be_left_out() -> None:
    text = json.dumps(docs.schema(secrets=False))
    secret = [path for path, key in KEYS.items() if "secret" in fields.kind(key.field)]
    assert {"redis.password", "s3.access_key_id", "s3.secret_access_key", "s3.session_token"} <= {*secret}
    for path in secret:
        assert f'"{path.partition(".")[2]}"' not in text
    assert "additionalProperties" in text
