"""reshard: brings a namespace from its shards into another number of them, while engines use it.

How, and what is lost, stands in kvstore.index.sharding.resharding. One process at a time does it to a
namespace: it has a lease.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from kvstore.admin.backends import Cache, Refused
from kvstore.admin.counting import amount_of
from kvstore.admin.described import described
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.repair.reports import ReshardReport
from kvstore.admin.reports import Ended
from kvstore.admin.selection import needed_index
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Account
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import lease_of
from kvstore.index.sharding.leaf import MovableLeaf
from kvstore.index.sharding.resharding import Moved, Resharding
from kvstore.keys import NamespaceId
from kvstore.rules.segments import index_bytes, typical_block_bytes
from schemas.namespace import Namespace

#: Seconds for which whoever was killed keeps others from going on. A page takes far less.
LEASE_S = 60.0


def reshard(
    cache: Cache,
    prefix: str,
    shards: int,
    *,
    apply: bool = False,
    progress: ProgressListener | None = None,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> ReshardReport:
    """Brings a namespace into so many shards, or goes on with that; without `apply` only says so.

    Ctrl-C and an index that does not answer end it, and the report says so: engines go on with what there
    is, and running it again goes on where it ended. Raises UnknownName, Refused, and what the index raises
    before the first change.
    """
    index = needed_index(cache)
    if not isinstance(index, ShardedIndex) or not isinstance(index.leaf, MovableLeaf):
        raise Refused("only an index in Redis keeps a namespace in several shards; this one is a file")
    name = cache.namespace(prefix)
    account, described_as = _account(cache, name), cache.namespaces().get(name)
    ended: Ended = "complete"
    problem, began, moved = "", time.monotonic(), Moved()
    if apply:
        try:
            namespace = Namespace.model_validate_json(described_as or "")
        except ValueError:
            raise Refused(
                f"what namespace {name} is can't be read; `cache-admin fsck {name} --apply` mends it"
            ) from None
        if not account.to and not account.left and account.shards != shards:
            _see_that_it_fits(index, account)
        cache.record("reshard", f"{name}: {account.shards} -> {shards} shards")
        shows, lease = progress or Silent(), _Lease(index, name)
        run = Resharding(
            index,
            index.leaf,
            namespace,
            name,
            shards,
            expected_blocks=_blocks(cache, namespace, account),
            late_s=_late_s(cache),
            hold=lease.hold,
            begin=lambda what, nbytes: shows.begin(what, nbytes or None),
            advance=shows.advance,
            wait=wait,
        )
        moved = run.moved
        try:
            lease.hold()
            run.run()
        except KeyboardInterrupt:
            ended, problem = "cancelled", "cancelled; run it again to go on"
        except KVStoreError as exc:
            ended, problem = "failed", str(exc)
        finally:
            lease.release()
    return ReshardReport(
        at_s=clock(),
        applied=apply,
        ended=ended,
        problem=problem,
        namespace=name,
        model=described(described_as)[1],
        before=account.left or account.shards,
        after=shards,
        visible=amount_of([account]),
        rounds=moved.rounds,
        copied=moved.segments,
        entries=moved.entries,
        unfindable=moved.unfindable,
        withdrawn=moved.withdrawn,
        sealed_s=moved.sealed_s,
        seconds=time.monotonic() - began,
    )


class _Lease:
    """Keeps others from resharding the namespace. Belongs to one thread."""

    def __init__(self, index: ShardedIndex, name: NamespaceId) -> None:
        self._index = index
        self._name = lease_of(name)
        self._holder = uuid.uuid4().hex
        self._until = 0.0

    def hold(self) -> None:
        """Renews it where it has less than half of its time. Raises Refused if another has it."""
        now = time.monotonic()
        if self._until - now < LEASE_S / 2:
            if not self._index.lease(self._name, self._holder, LEASE_S):
                raise Refused(
                    f"another process is about it, or was less than {LEASE_S:.0f} s ago: wait for that"
                )
            self._until = now + LEASE_S

    def release(self) -> None:
        """Leaves it to others. Never raises: it runs out by itself."""
        with suppress(KVStoreError):
            self._index.release(self._name, self._holder)


def _account(cache: Cache, name: NamespaceId) -> Account:
    found = cache.accounts(name)
    if not found:
        raise Refused(f"another process has just removed namespace {name}")
    return found[0]


def _see_that_it_fits(index: ShardedIndex, account: Account) -> None:
    """Raises Refused if the copy would fill Redis: then nobody could save until it is undone."""
    told = index.memory()
    if told is None or not told[1]:
        return
    used, most = told
    needed = index_bytes(account.usage.blocks, account.usage.segments, namespaces=0)
    if used + needed > most:
        raise Refused(
            f"Redis uses {used / 1e6:,.0f} MB of maxmemory {most / 1e6:,.0f} MB, and the copy takes about "
            f"{needed / 1e6:,.0f} MB until it is done: raise maxmemory first"
        )


def _late_s(cache: Cache) -> float:
    """Returns for how long a call that goes by the old number may take: to look at it, and to ask by it, with
    as much again for processes whose settings are other ones."""
    redis = cache.settings.redis
    return 4 * (redis.timeout_s + redis.connect_timeout_s)


def _blocks(cache: Cache, namespace: Namespace, account: Account) -> int:
    """Returns for how many blocks there is to be room: as many as an engine would say, or as there are."""
    return max(1, account.usage.blocks, cache.settings.capacity_bytes // typical_block_bytes(namespace))
