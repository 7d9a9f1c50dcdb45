"""Archives: kvstore's export is read by the second implementation, and one of its own is imported."""

from __future__ import annotations

import io
import json
from pathlib import Path

from kvstore.admin.archive.export import export
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.wanted import EVERYTHING
from kvstore.admin.backends import Cache
from kvstore.admin.curate.plan import plan
from kvstore.keys import canonical_json
from tests.format import second
from tests.format.test_redis_index import segment_of
from tests.format.world import NOW_S, SHAPES, content, kv, path, world


def test_ours_is_read(tmp_path: Path) -> None:
    namespace, hashes = kv("planes-lz4", shards=2), path("a", 9)
    with world(tmp_path / "store", f"sqlite://{tmp_path}/index.sqlite", namespace) as ours:
        segments = [ours.save(hashes[:5], ranks=2), ours.save(hashes[5:], depth=5, ranks=2)]
        with Cache(ours.store.settings) as cache:
            report = export(cache, plan(cache, []), tmp_path / "all.tar")
        assert report.ended == "complete"
        manifest, payloads = second.read_archive((tmp_path / "all.tar").read_bytes())
        name = ours.space.id
    assert manifest["namespaces"] == {name: canonical_json(namespace)}
    assert (manifest["segments"], manifest["payloads"]) == (2, 4) == (len(segments), len(payloads))
    assert manifest["payload_bytes"] == sum(map(len, payloads.values()))
    for segment in segments:
        for rank in (0, 1):
            header = second.read_header(payloads[second.payload_name(name, segment, rank)], namespace=name)
            assert (header.meta["segment"], header.meta["rank"]) == (segment.hex(), rank)


def test_theirs_is_imported(tmp_path: Path) -> None:
    namespace, hashes = kv("lz4"), path("i", 8)
    payloads = dict(segment_of(namespace, hashes[at : at + 4], depth=at) for at in (0, 4))
    data = second.write_archive(
        {second.namespace_id(t): t for t in [canonical_json(namespace)]}, payloads, NOW_S
    )
    assert json.loads(
        second.read_archive(data)[0]["namespaces"][second.namespace_id(canonical_json(namespace))]
    )
    with world(tmp_path, f"sqlite://{tmp_path}/index.sqlite", namespace) as ours:
        report = import_archive(io.BytesIO(data), ours.store, source="theirs", wanted=EVERYTHING)
        assert (report.ended, report.imported.segments, report.left_out) == ("complete", 2, 0)
        assert ours.served(hashes) == [content(one, 0, "BF16", SHAPES["BF16"]) for one in hashes]
        cut = import_archive(io.BytesIO(data.rstrip(b"\0")), None, source="cut short", wanted=EVERYTHING)
        assert cut.ended == "broken"
