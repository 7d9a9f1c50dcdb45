"""Packets between an engine and its stores vanish: those of the index, of the payloads, or both; or one way.

Nobody is told: no connection is refused or reset, nothing arrives. What was sent arrives when it is over.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.servers.redis import RedisServer
from tests.servers.s3.ceph import CephServer
from tests.servers.s3.servers import MotoServer
from tests.servers.wire import Wire
from trials.faults.bed import PATIENT, SETTINGS, Bed, bed, merged
from trials.faults.row import Row
from trials.faults.trial import DOWN, LOAD, MATCH, Fault, Promise, on

_KV, _EC = SETTINGS["kv"], SETTINGS["ec"]
#: A request that has its match, or half of it, when both are gone.
BOTH = Promise(
    _KV["match_deadline_s"] + _KV["load_deadline_s"],
    _KV["match_deadline_s"] + _KV["load_deadline_s"] + _EC["fetch_deadline_s"],
)


@contextmanager
def wired_bed() -> Iterator[Bed]:
    """Redis and a bucket of a real S3 server, each at the other end of a wire."""
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-bed-")))
        redis = stack.enter_context(RedisServer(top / "redis"))
        server = stack.enter_context(MotoServer() if CephServer.missing() else CephServer())
        index, payloads = (stack.enter_context(Wire(port)) for port in (redis.port, server.port))
        bucket = server.new_bucket()
        through = replace(bucket, endpoint=f"http://127.0.0.1:{payloads.port}")
        settings = {
            "index": f"redis://127.0.0.1:{index.port}/0",
            "payloads": through.url,
            "s3": bucket.settings["s3"],
        }
        direct = merged(PATIENT, {"index": redis.url, "payloads": bucket.url})
        yield stack.enter_context(bed({"index": index, "payloads": payloads}, settings, direct, top / "none"))


def cut(*names: str, requests: bool = True, replies: bool = True) -> Fault:
    """These wires are cut, in these directions."""

    @contextmanager
    def fault(one: Bed, _targets: list[str]) -> Iterator[Callable[[], int]]:
        wires: list[Wire] = [one.parts[name] for name in names]
        before = sum(wire.stopped for wire in wires)
        for wire in wires:
            wire.cut(requests=requests, replies=replies)
        try:
            yield lambda: sum(wire.stopped for wire in wires) - before
        finally:
            for wire in wires:
                wire.mend()

    return fault


_WAYS = {
    "": {"requests": True, "replies": True},
    ": requests only": {"requests": True, "replies": False},
    ": replies only": {"requests": False, "replies": True},
}
_SIDES: list[tuple[str, tuple[str, ...], Promise]] = [
    ("packets to and from the index vanish", ("index",), MATCH),
    ("packets to and from the payloads vanish", ("payloads",), LOAD),
    ("packets to and from both vanish", ("index", "payloads"), BOTH),
]

ROWS = [
    Row("partitions", what + way, "engine", on(wired_bed, cut(*names, **ways), promise, met=DOWN))
    for what, names, promise in _SIDES
    for way, ways in _WAYS.items()
]
