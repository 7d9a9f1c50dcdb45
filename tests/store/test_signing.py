"""Attacks by somebody who may write to the payloads, or send an archive, and has no key.

Each attack is made twice: on a store without keys, where it must succeed, or it would prove nothing; and on
one with keys, where nothing that was planted may ever be loaded.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.archive.export import export
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.wanted import EVERYTHING
from kvstore.admin.backends import Cache
from kvstore.admin.curate.plan import plan
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.admin.serve.server import Serving
from kvstore.build import load_settings, open_store
from kvstore.errors import ConfigError, KVStoreError, UnknownKey
from kvstore.format import segment as codec
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.format.segment import Slot
from kvstore.janitor.janitor import Janitor
from kvstore.keys import SegmentId, namespace_id, new_segment_id, parse_payload_name, payload_name
from kvstore.store.store import Store
from schemas.namespace import GroupSpec, Namespace, Parallel
from tests.format.test_signing import resealed, rewritten, stripped
from tests.store.world import SLOT_BYTES, chain, content, fetch, keys, match, namespace, slots

#: Chains that the victim has saved: number -> blocks.
SAVED = [chain(number, 0, 1, 2) for number in range(8)]
#: Chains that nobody has ever sent.
UNSENT = [chain(number, 7, 7, 7) for number in range(100, 108)]
#: What the attacker wants the victim to use.
FORGED = bytes(range(1, 256)) * (SLOT_BYTES // 255 + 1)

MODES = ["signed", "encrypted"]


def forged(hashes: list[bytes]) -> list[Slot]:
    data = memoryview(FORGED[:SLOT_BYTES])
    return [Slot(slot.key, data, slot.dtype, slot.shape) for slot in slots(hashes)]


@dataclass
class Place:
    """Where the payloads are, as the attacker sees them: a folder or a bucket."""

    settings: dict[str, Any]
    names: Callable[[], list[str]]
    get: Callable[[str], bytes]
    put: Callable[[str, bytes], None]


@dataclass
class Victim:
    """A store that engines use, through the whole stack, with the settings of a user."""

    place: Place
    root: Path
    mode: str
    namespaces: list[Namespace] = field(default_factory=lambda: [namespace()])

    @property
    def settings(self) -> dict[str, Any]:
        given = {**self.place.settings, "index": f"sqlite://{self.root}/index-{self.mode}.sqlite"}
        if self.mode in MODES:
            folder = self.root / "keys"
            folder.mkdir(exist_ok=True)
            (folder / "2026").write_text("5f" * 32)
            given["signing"] = {"keys": str(folder), "key": "2026", "encrypt": self.mode == "encrypted"}
        return given

    def open(self) -> Store:
        return open_store(self.settings)

    def cache(self) -> Cache:
        return Cache(load_settings(self.settings, {}))

    def fill(self) -> None:
        with closing(self.open()) as store:
            for one in self.namespaces:
                space = store.open(one, block_bytes=SLOT_BYTES)
                for hashes in SAVED:
                    same: dict[str, Any] = {"segment": new_segment_id(), "created_s": 1_790_000_000}
                    for rank in range(one.parts()):
                        assert space.save(slots(hashes), rank=rank, ranks=one.parts(), **same).stored

    def ask(
        self, chains: list[list[bytes]] | None = None, *, rank: int = 0
    ) -> tuple[int, int, dict[str, int]]:
        """What an engine that has just started gets of all chains: right blocks, wrong ones, its counters."""
        right = wrong = 0
        with closing(self.open()) as store:
            for one in self.namespaces:
                space = store.open(one, block_bytes=SLOT_BYTES)
                for hashes in [*SAVED, *UNSENT] if chains is None else chains:
                    for run in match(space, hashes).runs:
                        into = [memoryview(bytearray(SLOT_BYTES)) for _ in range(run.count)]
                        wanted = hashes[run.start : run.start + run.count]
                        try:
                            space.load(run, keys(wanted), into, rank=rank)
                        except KVStoreError:
                            continue
                        good = [bytes(view) == content(each) for view, each in zip(into, wanted, strict=True)]
                        right, wrong = right + sum(good), wrong + len(good) - sum(good)
            return right, wrong, store.counters.snapshot()

    def parsed(self, data: bytes) -> codec.Header:
        """What anybody can read of a header: all but who wrote it."""
        length = codec.header_length(data)
        document = json.loads(data[8:length])
        meta = dict(document["__metadata__"])
        return codec.parse_header(stripped(data) if "mac" in meta else data)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.servers)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        bucket = request.getfixturevalue("s3_bucket")
        return Place(
            {"payloads": bucket.url, **bucket.settings},
            lambda: [name for name in bucket.keys() if parse_payload_name(name)],
            bucket.get,
            bucket.put,
        )
    return folder(tmp_path / "payloads")


def folder(root: Path) -> Place:
    def put(name: str, data: bytes) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)

    return Place(
        {"payloads": f"file://{root}"},
        lambda: sorted(str(path.relative_to(root)) for path in root.glob("*/??/*.*")),
        lambda name: (root / name).read_bytes(),
        put,
    )


def made(header: codec.Header, hashes: list[bytes], keyring: Keyring, **changes: Any) -> bytes:
    """A payload like one that is there, with the attacker's bytes in its slots."""
    meta = header.meta
    given: dict[str, Any] = {
        "namespace_json": meta.namespace,
        "kind": meta.kind,
        "segment": SegmentId(bytes.fromhex(meta.segment)),
        "rank": meta.rank,
        "ranks": meta.ranks,
        "codec": meta.codec,
        "depth": meta.depth,
        "created_s": meta.created_s,
        "cost_us": meta.cost_us,
        "writer": meta.writer,
        "keyring": keyring,
    }
    return b"".join(codec.encode(forged(hashes), **given | changes).buffers)


def chain_of(header: codec.Header) -> list[bytes]:
    mine = [slot.key for slot in header.meta.slots]
    [found] = [hashes for hashes in SAVED if [key.hex() for key in keys(hashes)] == mine]
    return found


def with_their_digests(good: bytes, fake: bytes) -> bytes:
    """The MAC and the key's name as they were, over the attacker's bytes, with all digests made right."""
    theirs, start = codec.parse_header(fake, keyring=STRANGER), codec.header_length(good)

    def change(document: dict[str, Any]) -> None:
        described = json.loads(document["__metadata__"]["slots"])
        for slot, other in zip(described, theirs.meta.slots, strict=True):
            slot["xxh3"] = other.xxh3
            if "blake3" in slot:
                slot["blake3"] = other.blake3
        document["__metadata__"]["slots"] = json.dumps(described, separators=(",", ":"))

    return rewritten(good[:start] + fake[codec.header_length(fake) :], change)


#: The attacker has keys of its own, and knows how the victim's are called.
STRANGER = Keyring({"2026": b"\1" * 32}, key="2026")

FORGERIES: dict[str, Callable[[bytes, codec.Header], bytes]] = {
    "unsigned": lambda good, header: made(header, chain_of(header), NO_KEYS),
    "another key under this id": lambda good, header: made(header, chain_of(header), STRANGER),
    "the signature kept": lambda good, header: (
        with_their_digests(good, made(header, chain_of(header), STRANGER))
        if b'"mac"' in good[:64]
        else made(header, chain_of(header), NO_KEYS)
    ),
}


@pytest.mark.parametrize("mode", ["plain", *MODES])
def test_a_bucket_writer_replaces_payloads(place: Place, tmp_path: Path, mode: str) -> None:
    """Same names, same layout, chosen KV, every checksum right."""
    victim = Victim(place, tmp_path, mode)
    victim.fill()
    assert victim.ask()[:2] == (4 * len(SAVED), 0)
    kinds = list(FORGERIES.values())
    for number, name in enumerate(place.names()):
        good = place.get(name)
        fake = kinds[number % len(kinds) if mode != "plain" else 0](good, victim.parsed(good))
        assert len(fake) == len(good)
        place.put(name, fake)
    right, wrong, counted = victim.ask()
    if mode == "plain":
        assert wrong == 4 * len(SAVED), "the attack itself"
        return
    assert (right, wrong) == (0, 0)
    assert counted["quarantined_segments"] == len(SAVED), "damage, and evicted as such"
    assert counted["miss_blocks{unsigned}"] > 0 and counted["miss_blocks{corrupt}"] > 0
    # What the engines compute instead is saved again, and good.
    victim.fill()
    assert victim.ask()[:2] == (4 * len(SAVED), 0)


@pytest.mark.parametrize("mode", ["plain", *MODES])
def test_a_writer_plants_prompts_that_nobody_sent(tmp_path: Path, mode: str) -> None:
    """Segments under fresh names, found by a rebuild after the index was lost, or by fsck."""
    place = folder(tmp_path / "payloads")
    victim = Victim(place, tmp_path, mode)
    victim.fill()
    header = victim.parsed(place.get(place.names()[0]))
    for number, hashes in enumerate(UNSENT):
        segment = new_segment_id()
        keyring = STRANGER if number % 2 and mode != "plain" else NO_KEYS
        name = payload_name(namespace_id(namespace()), segment, 0)
        place.put(name, made(header, hashes, keyring, segment=segment))
    with victim.cache() as cache:
        fsck(cache, depth=Depth(percent=100, settled_s=-10.0), apply=True)
    (tmp_path / f"index-{mode}.sqlite").unlink()
    with victim.cache() as cache:
        report = rebuild(cache, apply=True)
    right, wrong, _ = victim.ask()
    if mode == "plain":
        assert (right, wrong) == (4 * len(SAVED), 4 * len(UNSENT)), "the attack itself"
        return
    assert (right, wrong) == (4 * len(SAVED), 0)
    [space] = report.namespaces
    assert (space.listed.segments, space.unusable) == (len(SAVED), len(UNSENT))
    assert space.unsigned == len(UNSENT) // 2 == report.left_out - len(UNSENT) // 2


@pytest.mark.parametrize("mode", MODES)
def test_signatures_that_are_taken_off_are_missed(tmp_path: Path, mode: str) -> None:
    place = folder(tmp_path / "payloads")
    victim = Victim(place, tmp_path, mode)
    victim.fill()
    for name in place.names():
        place.put(name, stripped(place.get(name)))
    right, wrong, counted = victim.ask()
    assert (right, wrong, counted["miss_blocks{unsigned}"]) == (0, 0, 4 * len(SAVED))


def two_ranks(**changes: Any) -> Namespace:
    group = GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=(2, 4, 8, 16), shards=2)
    return namespace(parallel=Parallel(tp=2), groups=(group,), **changes)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_signed_is_good_anywhere_else(tmp_path: Path, mode: str) -> None:
    """Whole payloads under another's name, between segments, ranks and namespaces; slots swapped; a header
    over another's slots; its own name changed to fit.
    """
    place = folder(tmp_path / "payloads")
    victim = Victim(place, tmp_path, mode, [two_ranks(), two_ranks(model="other")])
    victim.fill()
    first, second = (
        [name for name in place.names() if name.startswith(namespace_id(one))] for one in victim.namespaces
    )
    good = {name: place.get(name) for name in place.names()}
    start = codec.header_length(good[first[0]])
    planted: dict[str, bytes] = {}
    for here, name in enumerate(first):
        data, segment = good[name], SegmentId(bytes.fromhex(name.partition(".")[0][-16:]))
        other_rank = name[:-1] + str(1 - int(name[-1]))
        planted[name] = [
            good[first[here - 2]],
            good[other_rank],
            good[second[here]],
            data[:start] + data[start + SLOT_BYTES :] + data[start : start + SLOT_BYTES],
            resealed(data[:start] + good[first[here - 2]][start:]),
            renamed(good[first[here - 2]], segment),
        ][here % 6]
    for name, data in planted.items():
        assert data != good[name]
        place.put(name, data)
    spoiled = {name[:-2] for name in planted}
    assert len(planted) == 2 * len(SAVED) and len(spoiled) == len(SAVED)
    for rank in (0, 1):
        right, wrong, _ = victim.ask(SAVED, rank=rank)
        assert wrong == 0 and right <= 4 * len(SAVED)
    with closing(victim.open()) as store:
        space = store.open(victim.namespaces[0], block_bytes=SLOT_BYTES)
        assert [match(space, hashes).blocks for hashes in SAVED] == [0] * len(SAVED), "all were evicted"


def renamed(data: bytes, segment: SegmentId) -> bytes:
    """A replay of an old segment under a name that the index knows, its header made to fit."""
    return rewritten(data, lambda document: document["__metadata__"].update(segment=segment.hex()))


@pytest.mark.parametrize("mode", ["plain", *MODES])
def test_an_archive_that_was_made_elsewhere(tmp_path: Path, mode: str) -> None:
    """Exported from a store of the attacker's, with no key, and with one under the victim's id."""
    victim = Victim(folder(tmp_path / "payloads"), tmp_path, mode)
    for theirs in ["plain"] if mode == "plain" else ["plain", "signed"]:
        elsewhere = Victim(folder(tmp_path / f"of-{theirs}"), tmp_path / f"at-{theirs}", theirs)
        elsewhere.root.mkdir()
        with closing(open_store(their_settings(elsewhere))) as store:
            space = store.open(namespace(), block_bytes=SLOT_BYTES)
            for hashes in UNSENT:
                assert space.save(forged(hashes)).outcome == "stored"
        archive = io.BytesIO()
        with Cache(load_settings(their_settings(elsewhere), {})) as cache:
            assert export(cache, plan(cache, ()), archive).exported.segments == len(UNSENT)
        with victim.cache() as cache:
            report = import_archive(
                io.BytesIO(archive.getvalue()), cache.saving(), source="-", wanted=EVERYTHING
            )
            again = import_archive(
                io.BytesIO(archive.getvalue()), None, source="-", keyring=cache.keyring, wanted=EVERYTHING
            )
        if mode != "plain":
            assert report.imported.segments == 0 and report.left_out == again.left_out == len(UNSENT)
            assert report.unsigned == again.unsigned == (len(UNSENT) if theirs == "plain" else 0)
    assert victim.ask()[:2] == (0, 4 * len(UNSENT) if mode == "plain" else 0)


def their_settings(elsewhere: Victim) -> dict[str, Any]:
    given = elsewhere.settings
    if elsewhere.mode != "plain":
        (elsewhere.root / "keys" / "2026").write_text("01" * 32)
    return given


@pytest.mark.parametrize("mode", ["plain", *MODES])
def test_copies_on_a_node_that_another_user_has_replaced(tmp_path: Path, mode: str) -> None:
    """In the fast tier's folder: dropped, and read from the shared store."""
    fast, slow = folder(tmp_path / "fast"), folder(tmp_path / "slow")
    urls = {"fast": fast.settings["payloads"], "slow": slow.settings["payloads"]}
    victim = Victim(dataclasses.replace(fast, settings={"payloads": urls}), tmp_path, mode)
    victim.fill()
    assert len(fast.names()) == len(SAVED)
    for name in fast.names():
        header = victim.parsed(fast.get(name))
        fast.put(name, made(header, chain_of(header), NO_KEYS))
    right, wrong, counted = victim.ask()
    if mode == "plain":
        assert (right, wrong) == (0, 4 * len(SAVED)), "the attack itself"
    else:
        assert (right, wrong) == (4 * len(SAVED), 0)
        assert (counted["dropped_copies"], counted["quarantined_segments"]) == (len(SAVED), 0)


@pytest.mark.parametrize("mode", MODES)
def test_the_janitor_of_serve_has_the_keys(tmp_path: Path, mode: str) -> None:
    """It evicts what was planted before a request finds out, and nothing that is signed."""
    place = folder(tmp_path / "payloads")
    victim = Victim(place, tmp_path, mode)
    victim.fill()
    for name in place.names()[::2]:
        header = victim.parsed(place.get(name))
        place.put(name, made(header, chain_of(header), NO_KEYS))
    with victim.cache() as cache:
        janitor = Serving(cache)._opened_janitor()
        assert janitor is not None and cache.index is not None
        [account] = cache.index.accounts()
        janitor._scrubbing._owed[account.namespace] = 100.0
        janitor.round()
        told = {fault.problem for fault in janitor.state().faults}
        left = {listing.segment.hex() for listing in cache.index.segments(account.namespace)}
    assert left == {name[-18:-2] for name in place.names()[1::2]}
    assert told == {"it is not signed, and signing.unsigned is refuse"}
    (tmp_path / "keys" / "2026").write_text("no key")
    settings = victim.settings | {"signing": {"keys": str(tmp_path), "key": "2026"}}
    with Cache(load_settings(settings, {})) as cache, pytest.raises(ConfigError):
        Serving(cache)


# A rotation that went wrong is no damage


class Clock:
    now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("mode", MODES)
def test_what_a_key_is_missing_for_is_left_alone(tmp_path: Path, mode: str) -> None:
    place = folder(tmp_path / "payloads")
    victim = Victim(place, tmp_path, mode)
    victim.fill()
    before = {name: place.get(name) for name in place.names()}
    keys_folder = tmp_path / "keys"
    (keys_folder / "2026").rename(tmp_path / "removed")
    (keys_folder / "2027").write_text("61" * 32)
    settings = {**victim.settings, "signing": {"keys": str(keys_folder), "key": "2027"}}
    (keys_folder / "2026").unlink()
    with closing(open_store(settings)) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        found = match(space, SAVED[0])
        with pytest.raises(UnknownKey, match="written with key 2026; the keys here are 2027"):
            fetch(space, SAVED[0], found)
        assert match(space, SAVED[0]).reason == "quarantined", "this process doesn't try again"
        counted = store.counters.snapshot()
        assert (counted["miss_blocks{unknown_key}"], counted["quarantined_segments"]) == (4, 0)
    with Cache(load_settings(settings, {})) as cache:
        report = fsck(cache, depth=Depth(percent=100), apply=True)
        assert {fault.kind for fault in report.faults} == {"unreadable"} and report.mended == 0
        assert cache.index is not None
        clock = Clock()
        janitor = Janitor(
            cache.index,
            cache.payloads,
            cache.evidence,
            load_settings({**settings, "janitor": {"scrub_percent": 100}}, {}),
            keyring=cache.keyring,
            clock=clock,
            monotonic=clock,
        )
        for _ in range(300):
            janitor.round()
            clock.now += 600
        scrubbed = janitor.state().scrub
        assert (scrubbed.unreadable > 0, scrubbed.bad, scrubbed.evicted) == (True, 0, 0)
        (tmp_path / f"index-{mode}.sqlite").unlink()
    with Cache(load_settings(settings, {})) as cache:
        [space_report] = rebuild(cache, apply=True).namespaces
        assert (space_report.unreadable, space_report.listed.segments) == (len(SAVED), 0)
    # The key comes back, and everything is there.
    assert {name: place.get(name) for name in place.names()} == before
    (tmp_path / "removed").rename(keys_folder / "2026")
    with victim.cache() as cache:
        assert rebuild(cache, apply=True).namespaces[0].listed.segments == len(SAVED)
    assert victim.ask()[:2] == (4 * len(SAVED), 0)


def test_a_store_that_was_not_signed_becomes_one_that_is(tmp_path: Path) -> None:
    """`accept` keeps what is there; then `refuse` evicts it, as many an hour as damage."""
    place = folder(tmp_path / "payloads")
    unsigned = Victim(place, tmp_path, "plain")
    unsigned.fill()
    signed = Victim(place, tmp_path, "signed")
    settings = {**signed.settings, "index": unsigned.settings["index"]}
    settings["signing"] |= {"unsigned": "accept"}
    with closing(open_store(settings)) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        assert fetch(space, SAVED[0], match(space, SAVED[0])) == [content(one) for one in SAVED[0]]
        assert space.save(slots(UNSENT[0])).outcome == "stored"
    settings["signing"] |= {"unsigned": "refuse"}
    with closing(open_store(settings)) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        assert fetch(space, UNSENT[0], match(space, UNSENT[0])) == [content(one) for one in UNSENT[0]]
        with pytest.raises(KVStoreError, match="not signed"):
            fetch(space, SAVED[0], match(space, SAVED[0]))
        assert match(space, SAVED[0]).blocks == 0
