"""docs/format.md against the code: its examples come out, its tables leave nothing out and invent nothing."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import xxhash

from kvstore import keys
from kvstore.admin.archive.manifest import check_signed, signed
from kvstore.format import keyring, lz4, planes
from kvstore.format import segment as codec
from kvstore.index import eviction
from kvstore.index.redis import client as redis_client
from kvstore.index.scripted import catalogue as redis_catalogue
from kvstore.index.scripted import index as redis_index
from kvstore.index.scripted import journal as redis_journal
from kvstore.index.scripted import layouts as redis_layouts
from kvstore.index.scripted import maintenance as redis_upkeep
from kvstore.index.scripted import salts as redis_salts
from kvstore.index.scripted import sessions as redis_sessions
from kvstore.index.scripted import values as redis_values
from kvstore.index.scripted import verdicts as redis_verdicts
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.values import bucket_bits
from kvstore.index.sharding.names import shard_names
from kvstore.index.sqlite import file as sqlite_schema
from kvstore.payloads.tiered import schema as ledger_schema
from schemas.archive import Manifest
from schemas.namespace import DTYPE_BYTES, GroupKind, GroupSpec, Namespace
from schemas.records import CODECS, EvictionRule, OutcomeOp
from schemas.segment import SegmentMeta, SlotMeta
from tests.format import second
from tests.format.second import signatures

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


def example(name: str) -> list[str]:
    """The lines of the block that follows the mark."""
    found = re.search(rf"<!-- example: {re.escape(name)} -->\n\n```text\n(.*?)\n```", TEXT, flags=re.DOTALL)
    assert found, name
    return found[1].split("\n")


def rows(after: str) -> list[list[str]]:
    """The rows of the first table behind a heading or a mark."""
    lines = iter(TEXT.partition(after)[2].splitlines())
    table = []
    for line in lines:
        if line.startswith("|"):
            table.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif table:
            break
    assert len(table) > 2, after
    return table[2:]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# Nothing of ours is in the second implementation


def test_the_second_implementation_uses_none_of_our_code() -> None:
    modules = set()
    for file in Path(second.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level
                name = node.module or ""
                modules.add("" if name.startswith("tests.format.second.") else name.partition(".")[0])
    assert modules - {""} <= {
        "__future__", "collections", "dataclasses", "hashlib", "io", "json", "lz4", "numpy", "os", "pathlib",
        "re", "redis", "secrets", "sqlite3", "struct", "tarfile", "time", "typing", "xxhash", "blake3",
        "cryptography",
    }  # fmt: skip


# Examples


def test_namespaces() -> None:
    lines = example("namespaces")
    for text, name in zip(lines[::2], lines[1::2], strict=True):
        assert second.canonical(json.loads(text)) == text
        assert second.namespace_id(text) == name
        namespace = Namespace.model_validate_json(text)
        assert keys.canonical_json(namespace) == text
        assert keys.namespace_id(namespace) == name


def test_block_hashes() -> None:
    (tokens, root, *hashes) = example("chain sha256_cbor")
    numbers = [int(one) for one in re.findall(r"\d+", tokens)]
    assert second.chain(numbers[:-1], numbers[-1]) == [bytes.fromhex(one) for one in hashes]
    assert root == f"hash_root {second.hash_root()}"


def test_keys() -> None:
    lines = iter(example("keys"))
    for line in lines:
        key, made = next(lines), next(lines)
        kind, name, how, *more = line.split()
        if how == "group":
            found = second.block_key(bytes.fromhex(name), int(more[0]))
        elif how == "items":
            contents = [bytes.fromhex(one) for one in more]
            found = second.block_key(second.bound_name(bytes.fromhex(name), contents))
        else:
            assert kind == "item"
            found = second.item_key(bytes.fromhex(name), more[0] if how == "salt" else "")
        assert key == f"key {found.hex()}"
        assert made == f"digest {second.digest(found).hex()}"


def test_shards_come_out_as_said() -> None:
    (head, *names) = example("shards")
    namespace, _, shards, _ = head.split()
    assert shard_names(keys.NamespaceId(namespace), int(shards)) == tuple(names)


def test_salts() -> None:
    lines = example("salts")
    for line, made in zip(lines[::2], lines[1::2], strict=True):
        salt = line.removeprefix("salt ")
        assert made == f"id {second.salt_id(salt).hex()}" == f"id {keys.salt_id(salt).hex()}"
    assert second.salt_id("") == keys.salt_id("") == b""


def test_sessions() -> None:
    lines = example("sessions")
    for line, made in zip(lines[::2], lines[1::2], strict=True):
        name, _, salt = line.removeprefix("name ").partition(" salt ")
        theirs, ours = (
            second.session_id(second.salt_id(salt), name),
            keys.session_id(keys.salt_id(salt), name),
        )
        assert made == f"id {theirs.hex()}" == f"id {ours.hex()}"
    (said, packed) = example("record of a session")
    words = said.split(" ")
    right = (int(words[1]), False, int(words[3]), int(words[5]), [bytes.fromhex(words[7])])
    assert second.session_record(bytes.fromhex(packed)) == right


def test_payload_names() -> None:
    question, name = example("name")
    namespace, segment, rank = question.split()
    assert second.payload_name(namespace, bytes.fromhex(segment), int(rank)) == name


def test_checksums() -> None:
    key, described, seed, _, xxh3 = (line.partition(" ")[2] for line in example("checksum"))
    assert described == f"{key}|none|F32|5,6"
    assert f"{xxhash.xxh3_64_intdigest(described.encode()):016x}" == seed
    stored = struct.pack("<30f", *(i % 3 for i in range(30)))
    assert second.slot_checksum(stored, key, "none", "F32", [5, 6]) == xxh3


def values(name: str) -> list[str]:
    """What stands behind the words of an example's lines, in order."""
    return [line.rpartition(" ")[2] for line in example(name)]


def test_signatures() -> None:
    key, mac_key, wrapping_key, described, _, blake3 = values("signature")
    data_key, wrapped, associated, _, begins, tag = values("encryption")
    secret, data = bytes.fromhex(key), struct.pack("<30f", *(i % 3 for i in range(30)))
    assert signatures.mac_key(secret).hex() == mac_key
    assert signatures.wrapping_key(secret).hex() == wrapping_key
    assert (
        signatures.slot_digest(data, described) == blake3 == keyring.slot_digest(memoryview(data), described)
    )
    assert signatures.wrap(bytes.fromhex(data_key), secret) == wrapped
    assert associated.endswith(f"|{described}")
    stored, made = signatures.encrypt(data, bytes.fromhex(data_key), 2, associated)
    assert (stored[:16].hex(), made) == (begins, tag)
    cipher = keyring.Keyring({"a": secret}, key="a").cipher("a", wrapped, associated.removesuffix(described))
    ours = cipher.encrypt(2, described, memoryview(data))
    assert (bytes(ours[0]), ours[1].hex()) == (stored, tag)


def test_packs() -> None:
    key, text, mac = values("pack")
    manifest, secret = json.loads(text), bytes.fromhex(key)
    assert json.dumps(manifest, sort_keys=True, separators=(",", ":")) == text
    assert second.manifest_mac(manifest, secret) == mac
    ours = signed(Manifest.model_validate(manifest), keyring.Keyring({"golden": secret}, key="golden"))
    assert ours.pack is not None and ours.pack.mac == mac
    check_signed(ours, keyring.Keyring({"golden": secret}, key="golden"))


def test_planes() -> None:
    dtype, raw = example("planes")[0].split()
    stored = bytes.fromhex(example("planes")[1])
    assert second.unplanes(stored, dtype, len(raw) // 2).hex() == raw
    assert bytes(planes.split(memoryview(bytes.fromhex(raw)), dtype)) == stored


def test_records() -> None:
    described, packed = example("record")
    record = second.unpack_record(bytes.fromhex(packed))
    assert (second.pack_head(record, 2) + second.pack_parts(record)).hex() == packed
    ranks, slots, *rest = (int(one) for one in re.findall(r"\d+", described.replace("lz4", "")))
    assert (len(record.parts), record.slots, record.codec) == (ranks, slots, "planes-lz4")
    assert [*record.parts[0][1], *record.parts[1][1]] == rest[:4]
    assert [record.parts[0][0], record.created_s, record.depth, record.cost_us] == rest[4:]
    said, packed = example("salted record")
    salted = replace(record, salt=second.salt_id(said.rpartition(" ")[2]))
    assert (second.pack_head(salted, 2) + second.pack_parts(salted)).hex() == packed
    assert second.unpack_record(bytes.fromhex(packed)) == salted


def test_values() -> None:
    digests, value, said = example("value")
    nbytes, slots, first, agreed, record = second.split_value(bytes.fromhex(value))
    assert said == f"bytes {nbytes} slots {slots} first {first.hex()}"
    assert agreed == second.agreement(bytes.fromhex(digests.partition(" ")[2]), record, 2)
    assert record == second.unpack_record(bytes.fromhex(example("record")[1]))


def test_buckets() -> None:
    head, *buckets, value, expected = example("bucket")
    _, one, _, segment, _, slot = head.split()
    for line in buckets:
        _, bits, _, bucket, _, field = line.split()
        place = second.RedisStore.bucket(_Keys(), "ns", bytes.fromhex(one), int(bits))  # type: ignore[arg-type]
        assert place == (f"b:{bucket}", bytes.fromhex(field))
    assert value == f"value {segment}{int(slot):04x}"
    assert second.bucket_bits(int(expected.split()[1])) == int(expected.split()[3])


class _Keys:
    def key(self, namespace: str, rest: str) -> str:
        return rest


@pytest.mark.parametrize("expected", [0, 1, 64, 65, 128, 129, 10_000, 10**6, 10**9, 10**15])
def test_bits_of_buckets(expected: int) -> None:
    assert second.bucket_bits(expected) == bucket_bits(expected)


def test_scores() -> None:
    for line in example("score"):
        _, minute, _, depth, _, worth, _, score = line.split()
        assert f"{second.score(float(minute), int(depth), int(worth)):.17g}" == score
        assert second.unscore(float(score)) == (float(minute), int(depth), int(worth))
        assert redis_values.Use.of(score).used_s == float(minute) * 60


# Tables


def test_versions() -> None:
    said = {row[0]: int(row[1].partition(";")[0]) for row in rows("# The format")}
    assert said == {
        "namespace": Namespace.model_fields["format"].default,
        "segment file": max(get_args(SegmentMeta.model_fields["format"].annotation)),
        "packed record": 2,
        "Redis schema": redis_values.SCHEMA,
        "SQLite schema": sqlite_schema.SCHEMA_VERSION,
        "ledger of a node's fast tier": ledger_schema.SCHEMA_VERSION,
        "archive of `cache-admin export`": Manifest.model_fields["format"].default,
    }
    assert f"local SCHEMA = '{redis_values.SCHEMA}'" in (LUA / "register.lua").read_text()
    for line in (f"Redis schema {redis_values.SCHEMA}", f"1 to {sqlite_schema.SCHEMA_VERSION}"):
        assert line in TEXT.partition("## Changelog")[2], "a new version is a line in the changelog"
    section = TEXT.partition(f"## SQLite schema {sqlite_schema.SCHEMA_VERSION}\n")[2].partition("<!--")[0]
    assert section, "its heading has the version"
    assert not re.search(r"\bversion`?\s+\d", section), "and no other place, which would be forgotten"


def test_members_of_a_namespace_and_a_segment() -> None:
    assert [code(row[0])[0] for row in rows("### Namespace")] == list(Namespace.model_fields)
    assert [code(row[0])[0] for row in rows("A group is all layers")] == list(GroupSpec.model_fields)
    assert set(code(rows("A group is all layers")[0][1])) == {f'"{kind}"' for kind in get_args(GroupKind)}
    assert [code(row[0])[0] for row in rows("`__metadata__` maps names")] == list(SegmentMeta.model_fields)
    members = [name for row in rows("A slot's object has exactly") for name in code(row[0])]
    assert members == list(SlotMeta.model_fields)
    assert [code(row[0])[0] for row in rows("### Codecs")] == list(CODECS)
    assert second.CODECS == CODECS
    assert second.WIDTHS == DTYPE_BYTES
    line = TEXT.partition("### Dtypes\n\n")[2].partition("\n\n")[0]
    widths = {name: int(part.split()[0]) for part in line.partition(":")[2].split(";") for name in code(part)}
    assert widths == DTYPE_BYTES


def test_limits() -> None:
    assert "The data start is a multiple of 4096" in TEXT and codec.ALIGN == 4096
    assert "at most 1 MiB" in TEXT and codec.MAX_HEADER == 1 << 20
    assert "0x7E000000" in TEXT and lz4._MAX_BLOCK == 0x7E000000
    assert len(codec._OPENING) == 25 and codec._SEAL == 33


def test_every_key_of_redis() -> None:
    """The golden dump of the index has every key there is."""
    golden = (ROOT / "tests" / "index" / "redis" / "golden" / "redis_schema.txt").read_text()
    found = {line.split("  ")[0] for line in golden.splitlines() if line.startswith("kvs:")}
    described = [re.escape(code(row[0])[0]) for row in rows("### Keys")]
    patterns = {re.sub(r"<[a-z]+>", "[^:]+", one).replace("ns\\}", "[A-Z]+\\}") for one in described}
    patterns = {re.sub(r"(use|asked):\[\^:\]\+", r"\1:.+", one) for one in patterns}
    for key in found:
        assert sum(re.fullmatch(one, key) is not None for one in patterns) == 1, key
    for one in patterns:
        assert any(re.fullmatch(one, key) for key in found), one
    types = {code(row[0])[0].rpartition("}:")[2].partition(":")[0]: row[1] for row in rows("### Keys")}
    for line in golden.splitlines():
        if line.startswith("kvs:{"):
            name, kind = line.split("  ")[:2]
            assert kind.split()[0].rstrip(",") == types[name.rpartition("}:")[2].partition(":")[0]], line


def test_every_field_of_meta() -> None:
    golden = (ROOT / "tests" / "index" / "redis" / "golden" / "redis_schema.txt").read_text()
    found = set()
    for part in golden.split("\nkvs:")[1:]:
        if ":meta  hash" in part.partition("\n")[0]:
            found |= set(re.findall(r"^    b'([a-z_]+)':", part, flags=re.MULTILINE))
    assert {name for row in rows("Fields of `meta`") for name in code(row[0])} == found


def test_words_of_the_journal() -> None:
    streams = TEXT.partition("**Streams.**")[2].partition("**Totals**")[0]
    assert set(get_args(EvictionRule)) <= set(code(streams))
    assert set(get_args(OutcomeOp)) <= set(code(streams))
    for name, field in (("segment", "'segment'"), ("rule", "'rule'")):
        assert name in code(streams) and field in (LUA / "changes.lua").read_text()


LUA = ROOT / "kvstore" / "index" / "scripted" / "lua"


def scripts() -> Iterator[Script]:
    modules = (
        redis_index,
        redis_layouts,
        redis_catalogue,
        redis_journal,
        redis_upkeep,
        redis_salts,
        redis_sessions,
        redis_verdicts,
        redis_client,
    )
    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, Script))


def test_every_script_and_its_chunks() -> None:
    said: dict[str, tuple[str, ...]] = {}
    for names, chunks, *_ in rows("The text of a script is its chunks"):
        each = chunks.split(";")
        for number, name in enumerate(code(names)):
            if " for " in chunks:
                said[name] = tuple(code(chunks)[:1]) if name == code(chunks)[1] else ()
            else:
                said[name] = tuple(code(each[number] if len(each) > 1 else chunks))
    made = {script.name: script for script in scripts()}
    assert set(said) == set(made)
    for name, chunks in said.items():
        files = [LUA / f"{chunk}.lua" for chunk in ("keys", *chunks, name)]
        assert "\n".join(file.read_text() for file in files) == made[name].source, name
    assert all(said[name] == chunks for name, chunks in second.SCRIPTS.items())


def test_how_many_arguments_the_scripts_take() -> None:
    """Of those that a writer needs: as many as the script reads."""
    for names, chunks, arguments, _ in rows("The text of a script is its chunks"):
        (name, *others) = code(names)
        if others or name in ("tell", "erase", "adopt", "discard"):
            continue  # of these the last ones are a list
        text = "\n".join((LUA / f"{chunk}.lua").read_text() for chunk in (*code(chunks), name))
        read = max((int(one) for one in re.findall(r"ARGV\[(\d+)\]", text)), default=0)
        listed = "as; sweep" if arguments == "as `sweep`" else re.sub(r"KEYS\[1\][^;]*;", "", arguments)
        said = len(listed.split(";")) if listed else 0
        if arguments.endswith("; by"):
            assert "ARGV[#ARGV" in text, name
            read += 1  # always the last
        if "filling" in code(chunks):
            read += 1  # the run, before that
        if name == "quota":
            said += 1  # "scope, bytes or nothing"
        if name in ("register", "claim"):
            said = len(arguments.split(","))
        assert said == read, name


def test_every_table_and_column_of_sqlite() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(sqlite_schema.SCHEMA)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        made = {
            name: [row[1] for row in db.execute(f"PRAGMA table_info({name})")]
            for name in tables
            if not name.startswith("sqlite_")
        }
    said = {code(row[0])[0]: code(row[1]) for row in rows("<!-- example: tables -->")}
    assert said == made
    assert f"0x{sqlite_schema.APPLICATION_ID:X}" in TEXT
    assert f"0x{ledger_schema.APPLICATION_ID:X}" in TEXT


def test_worth() -> None:
    for cost, nbytes in ((0, 10), (1, 1024), (1023, 1024), (10**6, 4096), (10**12, 1), (5, 10**9)):
        record = second.Record(1, "none", cost, 0, 0, 0, ((0, (nbytes,)),))
        assert second.worth("ec", record) == eviction.worth(cost, nbytes)
        assert second.worth("kv", record) == 0


def test_links_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.*)$", TEXT, flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= set(anchors)


def test_the_golden_segment_begins_as_shown() -> None:
    data = (ROOT / "tests" / "format" / "golden" / "segment-1-none.safetensors").read_bytes()
    for line in example("head"):
        offset, text = line[:4], line[6:53]
        assert data[int(offset, 16) :][:16] == bytes.fromhex(text)


def test_golden_segments_are_read() -> None:
    for name in CODECS:
        data = (ROOT / "tests" / "format" / "golden" / f"segment-1-{name}.safetensors").read_bytes()
        header = second.read_header(data)
        theirs = codec.parse_header(data[: header.data_start])
        assert header.nbytes == len(data)
        for slot, other in zip(header.slots, theirs.meta.slots, strict=True):
            raw = bytearray(other.raw_bytes)
            stored = data[slot.start : slot.end]
            codec.decode_slot(memoryview(stored), other, memoryview(raw))
            assert second.decode(stored, slot) == raw
