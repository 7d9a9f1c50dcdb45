"""warm for one prompt: what an engine would load of it, and nothing else, comes to this node's folder."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.curate.prompts import StoredPrompt
from kvstore.admin.curate.reports import WarmReport
from kvstore.admin.curate.warm import warm_prompt, warm_session
from kvstore.build import load_settings
from kvstore.errors import ConfigError
from kvstore.format.segment import Slot
from kvstore.keys import NO_SALT, SessionId, block_key, namespace_id, salt_id, session_id
from kvstore.rules.hashing import block_hashes, root_digest
from schemas.namespace import GroupSpec, Namespace
from tests.admin.conftest import BLOCK_SHAPE, Admin, Filled, fill, kv_slots, kv_space
from tests.admin.inspect.test_status import row

TOKENS = [random.Random(3).randrange(50_000) for _ in range(16 * 9 + 5)]
HASHES = block_hashes(TOKENS, algorithm="sha256_cbor", block_tokens=16, seed="7")


def space(**changes: Any) -> Namespace:
    return kv_space(
        **{"hash_algo": "sha256_cbor", "hash_root": root_digest("7"), "tenant": "prompts"} | changes
    )


class Node:
    """A node with an empty folder in front of a store that has most of a prompt, and other things."""

    def __init__(self, root: Path, index: str | None = None) -> None:
        self.filled: Filled = fill(root / "cache", index)
        self.fast, self.file = root / "fast", root / "settings.yaml"
        self.tree = {
            "payloads": {
                "fast": f"file://{self.fast}",
                "slow": f"file://{self.filled.folder}",
                "fast_capacity": "64MiB",
            },
            "index": index or f"sqlite://{self.filled.folder}/index.sqlite",
        }
        self.file.write_text(yaml.safe_dump(self.tree))
        data = kv_slots(1)[0].data
        slots = [Slot(block_key(each), data, "BF16", BLOCK_SHAPE) for each in HASHES]
        # Block 6 was never stored, so nobody can load what follows it.
        for first, end in ((0, 3), (3, 6), (7, 9)):
            self.filled.save(space(), slots[first:end], depth=first)
        self.name = namespace_id(space())

    @property
    def options(self) -> list[str]:
        return ["--settings", str(self.file)]

    def kept(self) -> int:
        return len([*self.fast.glob("*/??/*.*")])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def talked(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    """A node on either index, beside whose prompt two sessions have saved something under one name."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    node = Node(tmp_path, url)
    for number, (salt, count) in enumerate([(NO_SALT, 3), (salt_id("hers"), 2)]):
        slots = kv_slots(2 * count, seed=80 + number)
        for first in reversed(range(0, 2 * count, 2)):
            mine = session_id(salt, "user-81/trip")
            node.filled.save(space(), slots[first : first + 2], depth=first, session=mine)
    return node


def verb(admin: Admin, node: Node, *words: str) -> WarmReport:
    ran = admin("warm", *words, "--json", *node.options)
    assert ran.code == 0, ran.err
    return WarmReport.model_validate_json(ran.out)


@pytest.mark.parametrize("written", ["json", "blanks", "tokenize"])
def test_warm_a_prompt_by_its_tokens(admin: Admin, node: Node, tmp_path: Path, written: str) -> None:
    path = tmp_path / "prompt"
    forms = {
        "json": json.dumps(TOKENS),
        "blanks": " ".join(map(str, TOKENS)),
        "tokenize": json.dumps({"count": len(TOKENS), "max_model_len": 4096, "tokens": TOKENS}),
    }
    path.write_text(forms[written])
    words = ("--tokens", str(path), "--seed", "7")
    dry = verb(admin, node, *words, "--dry-run")
    assert (dry.planned.segments, dry.warm.segments, node.kept()) == (2, 0, 0)
    [found] = dry.prompts
    assert (found.namespace, found.tokens, found.stored) == (node.name, 144, 96)
    done = verb(admin, node, *words)
    assert (done.warm, done.left_out, node.kept()) == (done.planned, 0, 2)
    assert row(admin("warm", *words, *node.options).out, node.name) == [node.name, "144", "96"]


def test_warm_a_prompt_by_its_blocks(admin: Admin, node: Node, tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_text("\n".join(one.hex() for one in HASHES[:5]))
    done = verb(admin, node, node.name[:8], "--hashes", str(path))
    assert [(one.tokens, one.stored) for one in done.prompts] == [(80, 80)]
    assert done.warm.segments == node.kept() == 2
    path.write_text(json.dumps([one.hex() for one in HASHES[6:]]))
    assert verb(admin, node, node.name, "--hashes", str(path)).warm.segments == 0


def test_a_bound_takes_the_head(admin: Admin, node: Node, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_text(json.dumps(TOKENS))
    words = ("--tokens", str(path), "--seed", "7", "--max-bytes")
    size = verb(admin, node, *words, "1GiB", "--dry-run").planned.stored_bytes // 2
    done = verb(admin, node, *words, str(size + size // 2))
    assert (done.warm.segments, done.beyond.segments) == (1, 1)


def test_only_the_windows_that_a_load_needs_are_fetched(admin: Admin, node: Node, tmp_path: Path) -> None:
    full = GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=BLOCK_SHAPE)
    windows = full.model_copy(update={"kind": "sliding_window", "window": 32})
    mixed = space(tenant="mixed", groups=(full, windows))
    data = kv_slots(1)[0].data
    for group in range(2):
        slots = [Slot(block_key(each, group), data, "BF16", BLOCK_SHAPE) for each in HASHES]
        for first in range(0, 9, 3):
            node.filled.save(mixed, slots[first : first + 3], depth=first)
    path = tmp_path / "prompt"
    path.write_text(json.dumps(TOKENS))
    done = verb(admin, node, namespace_id(mixed), "--tokens", str(path), "--seed", "7")
    assert [one.stored for one in done.prompts] == [144]
    # Three segments of full attention, and the one in which the last window lies.
    assert done.warm.segments == node.kept() == 4


def test_a_salt_and_another_seed_name_other_blocks(admin: Admin, node: Node, tmp_path: Path) -> None:
    path, salt = tmp_path / "prompt", tmp_path / "salt"
    path.write_text(json.dumps(TOKENS))
    salt.write_text("hers")
    words = ("--tokens", str(path), "--seed", "7", "--salt-file", str(salt))
    assert verb(admin, node, *words).planned.segments == 0
    wrong = admin("warm", node.name, "--tokens", str(path), *node.options)
    assert (wrong.code, "--seed" in wrong.err) == (2, True)
    items = admin("warm", node.filled.ec_id, "--tokens", str(path), *node.options)
    assert (items.code, "encoder items" in items.err) == (2, True)


TRIP = session_id(NO_SALT, "user-81/trip").hex()


@pytest.mark.parametrize("which", ["user-81/trip", TRIP, TRIP[:20].upper()])
def test_warm_what_a_session_has_used(admin: Admin, talked: Node, which: str) -> None:
    dry = verb(admin, talked, "--session", which, "--dry-run")
    assert (dry.planned.segments, dry.warm.segments, talked.kept()) == (3, 0, 0)
    [found] = dry.sessions
    assert (found.session, found.namespace, found.segments) == (TRIP, talked.name, 3)
    bound = dry.planned.stored_bytes * 2 // 3 + 1
    done = verb(admin, talked, talked.name[:8], "--session", which, "--max-bytes", str(bound))
    assert (done.warm.segments, done.beyond.segments, talked.kept()) == (2, 1, 2)
    with Cache(load_settings(talked.tree)) as cache:
        assert cache.index is not None
        own = cache.index.owned(talked.name, SessionId(bytes.fromhex(TRIP)))
        heads = {segment.hex() for segment, record in own.items() if record.depth < 4}
    assert {path.name.split(".")[0] for path in talked.fast.glob("*/??/*.*")} == heads
    assert verb(admin, talked, "--session", which).warm.segments == talked.kept() == 3
    assert row(admin("warm", "--session", which, *talked.options).out, TRIP)[2] == "live"


def test_a_salted_session_is_another(admin: Admin, talked: Node, tmp_path: Path) -> None:
    salt = tmp_path / "salt"
    salt.write_text("hers")
    words = ("--session", "user-81/trip", "--salt-file", str(salt))
    assert verb(admin, talked, *words).warm.segments == talked.kept() == 2
    unknown = admin("warm", "--session", TRIP, "--salt-file", str(salt), *talked.options)
    assert (unknown.code, "remembers no such session" in unknown.err) == (1, True)
    for which in ("feed", "x" * 257, "", "nobody"):
        ran = admin("warm", "--session", which, *talked.options)
        assert (ran.code, ran.out) == (1, "") and "session" in ran.err
    assert admin("warm", talked.filled.ec_id, "--session", TRIP, *talked.options).code == 1


def test_a_name_that_looks_like_an_id_is_a_name_first(admin: Admin, talked: Node) -> None:
    mine = session_id(NO_SALT, TRIP)
    talked.filled.save(space(), kv_slots(2, seed=90), session=mine)
    [found] = verb(admin, talked, "--session", TRIP).sessions
    assert (found.session, talked.kept()) == (mine.hex(), 1)


def test_a_program_warms_a_session(admin: Admin, talked: Node) -> None:
    report = warm_session(talked.tree, "user-81/trip", salt="hers")
    assert (report.warm.segments, talked.kept()) == (2, 2)
    assert warm_session(load_settings(talked.tree), TRIP, [talked.name], dry_run=True).planned.segments == 3
    assert json.loads(admin("operations", "--json", *talked.options).out)["operations"] == []
    with pytest.raises(UnknownName):
        warm_session(talked.tree, "nobody")
    with pytest.raises(ConfigError):
        warm_session({"payloads": f"file://{talked.filled.folder}"}, TRIP)


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens", "x", "--hashes", "y"],
        ["--tokens", "x", "--session", "y"],
        ["--session", "x", "--seed", "7"],
        ["--session", "x", "--salt-file", "/nowhere"],
        ["--seed", "7"],
        ["--salt-file", "-"],
        ["--hashes", "/dev/null"],
        ["--tokens", "/nowhere"],
    ],
)
def test_warm_says_what_is_wrong_with_the_words(admin: Admin, node: Node, words: list[str]) -> None:
    ran = admin("warm", *words, *node.options)
    assert (ran.code, ran.out, node.kept()) == (2, "", 0)


@pytest.mark.parametrize("text", ["{}", '{"tokens": "1 2"}', '{"tokens": [true]}', "[", "1 -2", '{"a": [1]}'])
def test_what_holds_no_token_ids_is_refused(admin: Admin, node: Node, tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompt"
    path.write_text(text)
    ran = admin("warm", "--tokens", str(path), "--seed", "7", *node.options)
    assert (ran.code, "token ids" in ran.err) == (2, True)


def test_a_program_warms_a_prompt_and_leaves_no_line(admin: Admin, node: Node) -> None:
    report = warm_prompt(node.tree, StoredPrompt(tokens=TOKENS, seed="7"))
    assert (report.ended, report.warm.segments, node.kept()) == ("complete", 2, 2)
    assert (
        warm_prompt(load_settings(node.tree), StoredPrompt(hashes=HASHES[:3]), [node.name]).warm.segments == 1
    )
    assert json.loads(admin("operations", "--json", *node.options).out)["operations"] == []
    with pytest.raises(ConfigError):
        warm_prompt({"payloads": f"file://{node.filled.folder}"}, StoredPrompt(tokens=TOKENS))
    with pytest.raises(UnknownName):
        warm_prompt(node.tree, StoredPrompt(tokens=TOKENS), ["feedfeed"])


def test_a_program_that_warms_imports_neither_vllm_nor_torch(node: Node) -> None:
    source = (
        "import sys; from kvstore.admin.curate.prompts import StoredPrompt\n"
        "from kvstore.admin.curate.warm import warm_prompt\n"
        f"assert warm_prompt({node.tree!r}, StoredPrompt(tokens={TOKENS!r}, seed='7')).warm.segments == 2\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=300)
