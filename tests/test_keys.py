"""Identity: golden values, and the properties that everything else relies on."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import keys
from kvstore.keys import NamespaceId, SegmentId
from schemas.namespace import GroupSpec, Namespace, Parallel

FULL = GroupSpec(
    kind="full", block_tokens=16, dtype="BF16", shape=(32, 8, 16, 128), layers="00112233aabbccdd"
)
WINDOW = GroupSpec(kind="sliding_window", block_tokens=16, dtype="BF16", shape=(4, 8, 16, 128), window=1024)

KV = Namespace(
    kind="kv",
    tenant="team-a",
    model="meta-llama/Llama-3.1-8B",
    revision="0e9e39f249a16976918f6564b8830bc894c89659",
    weights="9f86d081884c7d65",
    config="2c26b46b68ffc68f",
    dtype="bfloat16",
    quantization="fp8",
    options={"attention_config.backend": "FLASH_ATTN"},
    block_tokens=16,
    hash_algo="sha256_cbor",
    hash_root="fcde2b2edba56bf4",
    kv_dtype="auto",
    page_order="LHNC",
    page_format="cuda/FLASH_ATTN",
    groups=(FULL, WINDOW),
    parallel=Parallel(tp=4, pp=2, dcp=1),
    codec="lz4",
    epoch=3,
)
EC = Namespace(kind="ec", model="Qwen/Qwen2.5-VL-7B", weights="9f86d081884c7d65", dtype="bfloat16")


#: What an item is, and what is in a block.
CONTENT = bytes(range(32))

# Golden: a change of any of these makes every cache cold. It is a new format, on purpose or not at all.


def test_golden_canonical_json() -> None:
    assert keys.canonical_json(EC) == (
        '{"block_tokens":0,"codec":"none","config":"","dtype":"bfloat16","epoch":0,"format":2,"groups":[],'
        '"hash_algo":"","hash_root":"","kind":"ec","kv_dtype":"","model":"Qwen/Qwen2.5-VL-7B",'
        '"options":{},"page_format":"","page_order":"","parallel":{"dcp":1,"pp":1,"tp":1},"quantization":"","revision":"",'
        '"tenant":"default","weights":"9f86d081884c7d65"}'
    )


def test_golden_namespace_ids() -> None:
    assert keys.namespace_id(KV) == "40018c1f93aa8938"
    assert keys.namespace_id(EC) == "776731a881797096"


def test_golden_content_keys() -> None:
    block = bytes(range(32))
    assert keys.block_key(block).hex() == block.hex() + "0000"
    assert keys.block_key(block, 300).hex() == block.hex() + "012c"
    assert keys.block_key(block[:16], 1).hex() == block[:16].hex() + "0001"
    assert (
        keys.item_key(CONTENT).hex() == "355afdf485eaa45338906f99b8bd321fe897147e8afb823a18712f509cb222030000"
    )
    assert (
        keys.item_key(CONTENT, "tenant-a").hex()
        == "8cde613f1107c1963b6bba5e6ba917faced295f0e5c60728c686424666d4f4f90000"
    )
    assert (
        keys.item_key(CONTENT, "\udc80\x00../../x").hex()
        == "9e00f212ebeecf438b9f9ceabf4cdf640f78144bca049d886ef29b7673c0857b0000"
    )


def test_golden_names_of_blocks_behind_items() -> None:
    block, items = CONTENT, keys.chained_items(keys.chained_items(b"", CONTENT), bytes(range(32, 64)))
    assert keys.chained_items(b"", CONTENT).hex() == (
        "6e0de2e61bb7eebeb209a01bd88c66ef7a9fb31d75e07790074794d414a49519"
    )
    assert items.hex() == "c7773215744957df466394c38f3693d59baec1983ca5b6d97b2c047441a69a30"
    assert keys.bound_name(block, items).hex() == (
        "ebb42bab112a04fcdea314042154436ef7c9bb6a9f3e6794899cf42fd5a9c8f1"
    )
    # As long as the hash, so that the names of one chain have one length.
    assert len(keys.bound_name(block[:16], items)) == 16


def test_golden_digests() -> None:
    block = bytes(range(32))
    assert keys.digest(keys.block_key(block)).hex() == "000102030405060708090a0b0c0d0e0f"
    assert keys.digest(keys.block_key(block, 300)).hex() == "000102030405060708090a0b0c0d0f23"
    assert keys.digest(keys.item_key(CONTENT)).hex() == "355afdf485eaa45338906f99b8bd321f"
    assert keys.digests([block, block[::-1]], 300).hex() == (
        "000102030405060708090a0b0c0d0f231f1e1d1c1b1a1918171615141312103c"
    )


def test_golden_payload_names() -> None:
    segment = SegmentId(bytes.fromhex("abcdef0123456789"))
    assert keys.payload_name(NamespaceId("0123456789abcdef"), segment, 0) == (
        "0123456789abcdef/ab/abcdef0123456789.0"
    )
    assert keys.payload_name(NamespaceId("0123456789abcdef"), segment, 15) == (
        "0123456789abcdef/ab/abcdef0123456789.15"
    )


# Namespaces

OTHERS: dict[str, Any] = {
    "tenant": "team-b",
    "model": "meta-llama/Llama-3.1-70B",
    "revision": "main",
    "weights": "0000000000000000",
    "config": "",
    "dtype": "float16",
    "quantization": "",
    "options": {"attention_config.backend": "TRITON_ATTN"},
    "block_tokens": 32,
    "hash_algo": "xxhash",
    "hash_root": "",
    "kv_dtype": "fp8",
    "page_order": "NHLC",
    "page_format": "cpu/CPU_ATTN/amx",
    "groups": (FULL,),
    "parallel": Parallel(tp=2, pp=4, dcp=1),
    "codec": "none",
    "epoch": 4,
}
#: What can't differ alone: one value is allowed so far, or it decides what else is allowed.
FIXED = {"format", "kind"}


def test_every_field_is_covered() -> None:
    """A new field of Namespace must be added above, and change the id."""
    assert set(OTHERS) | FIXED == set(Namespace.model_fields)


@pytest.mark.parametrize("field", OTHERS)
def test_any_one_field_makes_another_namespace(field: str) -> None:
    other = Namespace(**(dict(KV) | {field: OTHERS[field]}))
    assert keys.namespace_id(other) != keys.namespace_id(KV)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "mla"),
        ("block_tokens", 32),
        ("dtype", "F16"),
        ("shape", (32, 8, 128, 16)),
        ("layers", "other"),
    ],
)
def test_any_one_field_of_a_group_makes_another_namespace(field: str, value: Any) -> None:
    group = GroupSpec(**(dict(FULL) | {field: value}))
    other = Namespace(**(dict(KV) | {"groups": (group, WINDOW)}))
    assert keys.namespace_id(other) != keys.namespace_id(KV)


def test_the_order_of_groups_is_part_of_the_namespace() -> None:
    other = Namespace(**(dict(KV) | {"groups": (WINDOW, FULL)}))
    assert keys.namespace_id(other) != keys.namespace_id(KV)


def test_layouts_of_one_size_differ() -> None:
    ids = {
        keys.namespace_id(Namespace(**(dict(KV) | {"parallel": Parallel(**each)})))
        for each in ({"tp": 8}, {"pp": 8}, {"dcp": 8})
    }
    assert len(ids) == 3


text = st.text(st.characters(codec="utf-8"), max_size=50)
#: Also lone surrogates, which JSON from a client can hold.
any_text = st.text(st.characters(exclude_categories=()), max_size=50)


@given(text, text)
def test_namespaces_are_equal_if_and_only_if_their_ids_are(one: str, two: str) -> None:
    a = Namespace(kind="ec", model=one, weights=two, dtype="x")
    b = Namespace(kind="ec", model=two, weights=one, dtype="x")
    assert (keys.namespace_id(a) == keys.namespace_id(b)) == (a == b)


@given(text)
def test_canonical_json_is_ascii_and_comes_back(model: str) -> None:
    namespace = Namespace(kind="ec", model=model, weights="w", dtype="x")
    canonical = keys.canonical_json(namespace)
    assert canonical.isascii()
    assert Namespace.model_validate(json.loads(canonical)) == namespace
    assert keys.namespace_id_of_json(canonical) == keys.namespace_id(namespace)
    assert re.fullmatch("[0-9a-f]{16}", keys.namespace_id(namespace))


# Content keys and digests


@given(any_text)
def test_item_key_takes_any_salt(identifier: str) -> None:
    key = keys.item_key(CONTENT, identifier)
    assert len(key) == 34
    assert key[-2:] == bytes(2)
    assert len(keys.digest(key)) == keys.DIGEST_BYTES


@pytest.mark.parametrize(
    "salt",
    [
        "",
        "\x00",
        "a\x00b",
        "\ud800",
        "\udfff\ud800",
        "../../x",
        "/etc/passwd",
        "x" * 10_000,
        "{ns}:*\r\n",
        "🐈",
    ],
)
def test_item_key_takes_hostile_salts(salt: str) -> None:
    key = keys.item_key(CONTENT, salt)
    assert len(key) == 34
    # Not a plain hash, so that a salt can't be chosen to be another use's SHA-256.
    assert key[:32] != hashlib.sha256(CONTENT + salt.encode("utf-8", "surrogatepass")).digest()


def test_an_item_has_a_digest_of_one_length() -> None:
    """Else a salt could be made the end of it."""
    for content in (b"", CONTENT[:31], CONTENT + b"s"):
        with pytest.raises(ValueError, match="expected 32"):
            keys.item_key(content)


@given(any_text, any_text)
def test_item_keys_differ_if_salts_do(one: str, two: str) -> None:
    assert (keys.item_key(CONTENT, one) == keys.item_key(CONTENT, two)) == (one == two)


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_item_keys_and_names_differ_if_contents_do(one: bytes, two: bytes) -> None:
    assert (keys.item_key(one) == keys.item_key(two)) == (one == two)
    chains = [keys.chained_items(b"", content) for content in (one, two)]
    assert (keys.bound_name(CONTENT, chains[0]) == keys.bound_name(CONTENT, chains[1])) == (one == two)


def test_surrogates_and_what_they_pair_to_are_different_items() -> None:
    assert keys.item_key(CONTENT, "\ud83d\udc08") != keys.item_key(CONTENT, "\U0001f408")


groups = st.sampled_from([0, 1, 255, 256, 300, 65535])


@given(
    st.integers(16, 40).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), max_size=20)), groups
)
def test_digests_is_digest_of_every_block_key(hashes: list[bytes], group: int) -> None:
    each = [keys.digest(keys.block_key(block, group)) for block in hashes]
    packed = keys.digests(hashes, group)
    assert packed == b"".join(each)
    assert keys.split_digests(packed) == each


@given(st.binary(min_size=32, max_size=32), groups, groups)
def test_groups_of_one_block_have_different_digests(block: bytes, one: int, two: int) -> None:
    same = keys.digest(keys.block_key(block, one)) == keys.digest(keys.block_key(block, two))
    assert same == (one == two)


def test_many_digests_at_once() -> None:
    hashes = [hashlib.sha256(b"%d" % i).digest() for i in range(8192)]
    packed = keys.digests(hashes, 1)
    assert len(packed) == 16 * 8192
    assert packed[16 * 8000 : 16 * 8001] == keys.digest(keys.block_key(hashes[8000], 1))


@pytest.mark.parametrize(
    "hashes",
    [
        [b"x" * 15],
        [b""],
        [b"x" * 16, b"x" * 17],
        [b"x" * 32, b"x" * 31, b"x" * 33],  # add up to three of 32 bytes
        [b"x" * 17, b"x" * 15],
    ],
)
def test_block_hashes_must_have_one_length(hashes: list[bytes]) -> None:
    with pytest.raises(ValueError, match="one length of at least 16"):
        keys.digests(hashes)


@pytest.mark.parametrize("group", [-1, 65536, 1 << 40])
def test_a_group_that_does_not_fit_is_refused_by_both(group: int) -> None:
    with pytest.raises(OverflowError):
        keys.block_key(bytes(32), group)
    with pytest.raises(OverflowError):
        keys.digests([bytes(32)], group)


def test_a_truncated_block_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        keys.block_key(bytes(15))


def test_no_hashes_no_digests() -> None:
    assert keys.digests([]) == b""
    assert keys.split_digests(b"") == []


# Segment ids and payload names


def test_segment_ids_are_fresh() -> None:
    ids = {keys.new_segment_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {keys.SEGMENT_ID_BYTES}


def test_segment_ids_end_with_the_tag_of_their_chain() -> None:
    hashes = [bytes(range(first, first + 32)) for first in (0, 100)]
    assert keys.TAG_AT == 13
    for group in (0, 1, 300):
        chain = keys.digests(hashes, group)
        made = {keys.new_segment_id(chain) for _ in range(1000)}
        assert len(made) == 1000
        assert {len(each) for each in made} == {keys.SEGMENT_ID_BYTES}
        # The groups of a request have chains of one tag.
        assert {each[-1] for each in made} == {keys.tag_of(chain)} == {13}
    assert keys.tag_of(b"") == 0
    assert len({each[-1] for each in (keys.new_segment_id() for _ in range(1000))}) > 100


@given(
    st.from_regex("[0-9a-f]{16}", fullmatch=True), st.binary(min_size=8, max_size=8), st.integers(0, 99999)
)
def test_payload_names_round_trip(namespace: str, segment: bytes, rank: int) -> None:
    name = keys.payload_name(NamespaceId(namespace), SegmentId(segment), rank)
    assert keys.parse_payload_name(name) == (namespace, segment, rank)


@given(st.text(max_size=60) | st.from_regex(r"[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{16}\.\d{1,6}\n?"))
def test_what_parses_is_exactly_what_payload_name_makes(name: str) -> None:
    parsed = keys.parse_payload_name(name)
    if parsed is not None:
        assert keys.payload_name(*parsed) == name
        assert ".." not in name
        assert name.isascii()


@pytest.mark.parametrize(
    "rank", ["00", "01", "-1", "+1", " 1", "1 ", "1_0", "100000", "", "x", "\u0661", "1\n"]
)
def test_ranks_have_one_spelling(rank: str) -> None:
    assert keys.parse_payload_name(f"0123456789abcdef/ab/abcdefabcdefabcd.{rank}") is None
