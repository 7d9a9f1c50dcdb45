"""rebuild --shards: brings a namespace from its shards into another number of them, while engines use it.

How, and what is lost, stands in kvstore.index.sharding.resharding. Of two processes that do it to one
namespace at a time the later one goes on, and the other one says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
from kvstore.index.sharding.names import shards_in
from kvstore.index.sharding.resharding import Moved, Resharding
from kvstore.keys import NamespaceId
from kvstore.rules.segments import index_bytes, typical_block_bytes
from schemas.namespace import Namespace


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
    is, and running it again does the rest. Raises UnknownName, Refused, and what the index raises
    before the first change.
    """
    index = needed_index(cache)
    if not isinstance(index, ShardedIndex):
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
        if not account.left and account.shards != shards:
            _see_that_it_fits(index, account)
        cache.record("rebuild", f"{name}: {account.shards} -> {shards} shards")
        shows = progress or Silent()
        run = Resharding(
            index,
            namespace,
            name,
            shards,
            expected_blocks=_blocks(cache, namespace, account),
            late_s=_late_s(cache),
            begin=lambda what, nbytes: shows.begin(what, nbytes or None),
            advance=shows.advance,
            wait=wait,
        )
        moved = run.moved
        try:
            run.run()
        except KeyboardInterrupt:
            ended, problem = "cancelled", "cancelled; run it again to go on"
        except KVStoreError as exc:
            ended, problem = "failed", str(exc)
    return ReshardReport(
        at_s=clock(),
        applied=apply,
        ended=ended,
        problem=problem,
        namespace=name,
        model=described(described_as)[1],
        before=shards_in(account.left or account.layout),
        after=shards,
        visible=amount_of([account]),
        rounds=moved.rounds,
        copied=moved.segments,
        entries=moved.entries,
        unfindable=moved.unfindable,
        withdrawn=moved.withdrawn,
        seconds=time.monotonic() - began,
    )


def _account(cache: Cache, name: NamespaceId) -> Account:
    found = cache.accounts(name)
    if not found:
        raise Refused(f"another process has just removed namespace {name}")
    return found[0]


def _see_that_it_fits(index: ShardedIndex, account: Account) -> None:
    """Raises Refused if the copy would fill Redis: then nobody could save until it is dropped."""
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
