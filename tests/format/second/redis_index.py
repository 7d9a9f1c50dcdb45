"""An index in Redis: reads by plain commands, changes by the scripts, one commit by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from tests.format.second.basics import need
from tests.format.second.names import namespace_id
from tests.format.second.records import (
    Record,
    Run,
    agreement,
    is_forbidden,
    pack_parts,
    record_of,
    retention,
    saved_minute,
    score,
    session_record,
    simple_match,
    unpack_record,
    unscore,
    worth,
)
from tests.format.second.segments import Header


def split_value(value: bytes) -> tuple[int, int, bytes, bytes, Record]:
    """Bytes, slots, first digest, agreement and record of a value of `segs`."""
    nbytes, slots, rest = value.split(b":", 2)
    end = 72 if rest[25] & 2 else 56
    return int(nbytes), int(slots), rest[:16], rest[16:end], unpack_record(rest[24:])


def bucket_bits(expected: int) -> int:
    return min(24, (max(1, -(-expected // 64)) - 1).bit_length())


#: The chunks of the scripts that are used here, as the document lists them.
SCRIPTS = {
    "register": (),
    "claim": ("age", "walk"),
    "commit": ("changes", "score", "generations", "forbidden", "retention", "sessions", "grace", "drop"),
    "touch": ("score", "retention"),
    "session": ("score", "retention", "sessions"),
    "evict": ("changes", "score", "retention", "grace", "fate", "drop"),
    "note": (),
    "forbid": ("forbidden",),
    "salted": (),
}


def mark(one: bytes) -> tuple[int, set[int]]:
    """Of a digest: the number that its own line is made of, and the bits of its mark."""
    m = int.from_bytes(one[4:8], "big")
    return int.from_bytes(one[:4], "big"), {m % 512, m // 512 % 512, m // 512**2 % 512}


def window_name(now_s: float, window_s: float, sketch_bytes: int, back: int = 0) -> str:
    return f"{sketch_bytes}:{window_s:.12g}:{int(now_s // window_s) - back}"


class RedisStore:
    """An index in Redis."""

    def __init__(self, client: redis.Redis, scripts: Path) -> None:
        """`client` answers with bytes, by RESP2; `scripts` is the folder with the .lua files."""
        self.client = client
        self._scripts = scripts

    def run(self, name: str, namespace: str, *args: bytes | str | int | float) -> Any:
        files = [self._scripts / f"{chunk}.lua" for chunk in ("keys", *SCRIPTS[name], name)]
        text = "\n".join(file.read_text() for file in files)
        return self.client.eval(text, 1, f"kvs:{{{namespace}}}:meta", *args)

    def key(self, namespace: str, rest: str) -> str:
        return f"kvs:{{{namespace}}}:{rest}"

    def namespaces(self) -> dict[str, str]:
        found = {}
        for name in self.client.smembers("kvs:ns"):
            meta = self.client.hgetall(self.key(name.decode(), "meta"))
            if b"bucket_bits" in meta and meta[b"schema"] == b"2":
                text = meta[b"json"].decode()
                need(namespace_id(text) == name.decode(), "namespace under another id")
                found[name.decode()] = text
        return found

    def account(self, namespace: str) -> dict[str, int]:
        meta = self.client.hgetall(self.key(namespace, "meta"))
        return {
            name: int(meta.get(name.encode(), 0))
            for name in ("bytes", "segments", "blocks", "pinned", "cost")
        }

    def records(self, namespace: str) -> dict[bytes, Record]:
        values = self.client.hgetall(self.key(namespace, "segs"))
        return {segment: split_value(value)[4] for segment, value in values.items()}

    def held(self, namespace: str) -> dict[bytes, int]:
        """Salt -> bytes of its visible segments."""
        found = self.client.zrange(self.key(namespace, "held"), 0, -1, withscores=True)
        return {salt: int(nbytes) for salt, nbytes in found}

    def of_salt(self, namespace: str, salt: bytes) -> set[bytes]:
        """By the keys alone. A member whose segment is not visible says nothing."""
        members = self.client.zrangebylex(
            self.key(namespace, "salts"), b"[" + salt, b"[" + salt + b"\xff" * 8
        )
        visible = self.records(namespace)
        return {member[16:] for member in members} & set(visible)

    def salted(self, namespace: str, salt: bytes, after: bytes, limit: int) -> tuple[list[bytes], bytes]:
        """By the script: a page, and where the next one begins."""
        page, last = self.run("salted", namespace, salt, after, limit)
        return page, last

    def erased(self, namespace: str) -> dict[bytes, int]:
        """Salt, or b"" for the whole namespace -> second until which what was created is forbidden."""
        found = self.client.hgetall(self.key(namespace, "erased"))
        return {salt: int(until) for salt, until in found.items()}

    def forbid(self, namespace: str, salt: bytes) -> int:
        return int(self.run("forbid", namespace, salt, 60, ""))

    def sessions(self, namespace: str) -> dict[bytes, tuple[int, bool, int, int, list[bytes]]]:
        """Session -> its record, with those segments that are its own."""
        owner, found = self.owner(namespace), {}
        for number in (0, 1):
            for session, value in self.client.hgetall(self.key(namespace, f"sessions:{number}")).items():
                *rest, own = session_record(value)
                found[session] = (*rest, [one for one in own if owner.get(one) == session])
        return found

    def owner(self, namespace: str) -> dict[bytes, bytes]:
        return dict(self.client.hgetall(self.key(namespace, "owner")))

    def kept(self, namespace: str) -> dict[bytes, tuple[int, int]]:
        found = self.client.zrange(self.key(namespace, "kept"), 0, -1, withscores=True)
        return {segment: retention(one) for segment, one in found}

    def retained(self, namespace: str) -> dict[bytes, int]:
        found = self.client.hgetall(self.key(namespace, "retained"))
        return {salt: int(nbytes) for salt, nbytes in found.items()}

    def session(
        self,
        namespace: str,
        session: bytes,
        segments: Sequence[bytes],
        minute: int,
        *,
        end: bool = False,
        retain_s: int | None = None,
        most: int = 0,
    ) -> list[Any]:
        told = [int(end), "" if retain_s is None else retain_s, ""]
        packed = b"".join(segments)
        answer = self.run(
            "session", namespace, session, packed, minute, 1, *told, most, most, most, 2048, 1024
        )
        return list(answer)

    def trash(self, namespace: str) -> dict[bytes, tuple[int, int]]:
        """Segment -> second of deletion, ranks."""
        found = self.client.zrange(self.key(namespace, "trash"), 0, -1, withscores=True)
        return {segment: (int(due), round(due % 1 * 256)) for segment, due in found}

    def order(self, namespace: str, key: str = "lru") -> list[tuple[bytes, tuple[float, int, int]]]:
        found = self.client.zrange(self.key(namespace, key), 0, -1, withscores=True)
        return [(segment, unscore(one)) for segment, one in found]

    def events(self, namespace: str) -> list[dict[str, bytes]]:
        found = self.client.xrange(self.key(namespace, "events"))
        return [{name.decode(): value for name, value in fields.items()} for _, fields in found]

    def bucket(self, namespace: str, one: bytes, bits: int) -> tuple[str, bytes]:
        number = int.from_bytes(one[:4], "big") >> (32 - bits)
        return self.key(namespace, f"b:{number:x}"), one[bits // 8 :]

    def bits(self, namespace: str) -> int:
        return int(self.client.hget(self.key(namespace, "meta"), "bucket_bits"))

    def entries(self, namespace: str) -> dict[bytes, tuple[bytes, int]]:
        """Every entry, dangling ones included."""
        bits, found = self.bits(namespace), {}
        for number in range(1 << bits):
            for field, value in self.client.hgetall(self.key(namespace, f"b:{number:x}")).items():
                first = (number >> bits % 8).to_bytes(bits // 8, "big")
                found[first + field] = value[:8], int.from_bytes(value[8:], "big")
        return found

    def match(self, namespace: str, digests: bytes) -> list[Run]:
        bits = self.bits(namespace)

        def entry(one: bytes) -> tuple[bytes, int] | None:
            value = self.client.hget(*self.bucket(namespace, one, bits))
            return (value[:8], int.from_bytes(value[8:], "big")) if value and len(value) == 10 else None

        def record(segment: bytes) -> Record | None:
            value = self.client.hget(self.key(namespace, "segs"), segment)
            known = split_value(value)[4] if value else None
            return known if known and (not ttl or known.created_s + int(ttl) > now) else None

        ttl, now = self.client.hget(self.key(namespace, "meta"), "ttl"), self.client.time()[0]
        return simple_match(digests, entry, record)

    def register(self, text: str, expected: int) -> str:
        name, described = namespace_id(text), json.loads(text)
        self.client.sadd("kvs:ns", name)
        now = round(time.time(), 3)
        answer = self.run(
            "register", name, text, described["kind"], described["tenant"], bucket_bits(expected), now
        )
        need(answer != 2, "a newer schema")
        if answer == 1:
            self.client.sadd("kvs:ns", name)
        return name

    def claim(self, namespace: str, digests: bytes, segment: bytes) -> tuple[int, bool]:
        present, granted, _ = self.run("claim", namespace, digests, segment, 30_000)
        return present, bool(granted)

    def commit(
        self,
        namespace: str,
        header: Header,
        session: bytes = b"",
        most: int = 0,
        replaces: Sequence[tuple[bytes, bytes]] = (),
    ) -> int:
        """By the script; one rank. `replaces` are segments and their digests."""
        meta, record = header.meta, record_of([header])
        digests, ranks = header.digests, meta["ranks"]
        return int(
            self.run(
                "commit",
                namespace,
                bytes.fromhex(meta["segment"]),
                digests,
                digests[:16] + agreement(digests, record, ranks),
                pack_parts(record),
                record.nbytes,
                meta["rank"],
                ranks,
                3600,
                worth(meta["kind"], record),
                4096,
                session,
                most,
                most,
                most,
                b"".join(old + (len(its) // 16).to_bytes(2, "big") + its for old, its in replaces),
                "1:0",
                "",
            )
        )

    def commit_by_hand(self, namespace: str, header: Header) -> bool:
        """A segment of one rank, without the script: the effects that the document lists, in one step."""
        meta, record, digests = header.meta, record_of([header]), header.digests
        need(meta["ranks"] == 1, "one rank only")
        segment, first = bytes.fromhex(meta["segment"]), digests[:16]
        place = lambda rest: self.key(namespace, rest)  # noqa: E731
        now = int(self.client.time()[0])
        record = replace(record, created_s=min(record.created_s, now))
        claim = place(f"claim:{first.hex()}")
        with self.client.pipeline() as pipe:
            looked_at = ("meta", "segs", "trash", "erased", f"part:{segment.hex()}")
            pipe.watch(*(place(one) for one in looked_at), claim)
            fields = pipe.hmget(place("meta"), "bucket_bits", "epoch", "drained")
            need(fields[0] is not None, "unknown namespace")
            bits, epoch, drained = (int(field or 0) for field in fields)
            olds = [place(f"old:{number}") for number in range(drained, epoch)]
            gone = pipe.zscore(place("trash"), segment) is not None
            forbidden = pipe.hmget(place("erased"), b"", record.salt)
            if (
                gone
                or is_forbidden(meta["created_s"], [int(until) for until in forbidden if until], now)
                or any(pipe.hexists(old, segment) for old in olds)
                or pipe.hexists(place("segs"), segment)
            ):
                return False
            held = pipe.get(claim) == segment
            pipe.multi()
            for slot in range(len(digests) // 16):
                bucket, field = self.bucket(namespace, digests[16 * slot : 16 * slot + 16], bits)
                pipe.hset(bucket, field, segment + slot.to_bytes(2, "big"))
            value = b"%d:%d:" % (record.nbytes, record.slots) + first
            pipe.hset(place("segs"), segment, value + agreement(digests, record, 1) + pack_parts(record))
            minute, extra = saved_minute(record.created_s), worth(meta["kind"], record)
            pipe.execute_command("ZADD", place("lru"), f"{score(minute, record.depth, extra):.17g}", segment)
            if record.salt:
                pipe.zadd(place("salts"), {record.salt + segment: 0})
                pipe.zincrby(place("held"), record.nbytes, record.salt)
            sums = {"bytes": record.nbytes, "segments": 1, "blocks": record.slots, "cost": record.cost_us}
            for name, amount in {**sums, "changes": 1}.items():
                pipe.hincrby(place("meta"), name, amount)
            event = {
                "op": "commit", "segment": segment, "first": first, "last": digests[-16:],
                "depth": record.depth, "slots": record.slots, "bytes": record.nbytes, "rule": "",
            }  # fmt: skip
            pipe.xadd(place("events"), event, maxlen=4096)
            pipe.zrem(place("ghosts"), first)
            if held:
                pipe.delete(claim)
            pipe.execute()
        return True

    def note(self, namespace: str, digests: bytes, now_s: float, window_s: float, sketch_bytes: int) -> int:
        blocks = [digests[at : at + 16] for at in range(0, len(digests), 16)]
        masks = b""
        for first in range(0, len(blocks), 32):
            bits = set().union(*(mark(one)[1] for one in blocks[first : first + 32]))
            masks += sum(1 << 511 - bit for bit in bits).to_bytes(64, "big")
        marks = b"".join(one[:8] for one in blocks)
        windows = [f"use:{window_name(now_s, window_s, sketch_bytes, back)}" for back in (0, 1)]
        return int(self.run("note", namespace, marks, masks, *windows, sketch_bytes // 64, 1000))

    def noted(self, namespace: str, digests: bytes, window: str) -> int:
        """Leading blocks that a window's sketch has, by its bytes."""
        sketch, size = self.client.get(self.key(namespace, f"use:{window}")), int(window.split(":")[0])
        if sketch is None:
            return 0

        def has(line: int, bits: set[int]) -> bool:
            at = line % (size // 64) * 64
            return all(sketch[at + bit // 8] >> 7 - bit % 8 & 1 for bit in bits)

        for position in range(len(digests) // 16):
            own, bits = mark(digests[16 * position : 16 * position + 16])
            home = position // 32 * 32 * 16
            if not has(mark(digests[home : home + 16])[0], bits) and not has(own, bits):
                return position
        return len(digests) // 16

    def evict(self, namespace: str, segments: Sequence[bytes], *, at_s: int, grace_s: int) -> int:
        deletion = f"{at_s}:{grace_s}"
        return int(self.run("evict", namespace, b"".join(segments), deletion, "admin", 4096, -1, ""))
