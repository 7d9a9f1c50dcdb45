"""A bucket that takes so many requests a second, and clients that don't know of each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kvstore.build import load_settings, open_payloads, open_store
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.errors import Throttled
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.retrying import RetryingPayloads
from kvstore.payloads.throttle import Throttle
from tests.payloads.s3.test_store import tree
from tests.servers.s3.bucket import S3Bucket
from tests.servers.s3.hostile import HostileServer, answer, entry, listing
from tests.servers.s3.http import Head
from tests.servers.s3.proxy import S3Proxy
from tests.waiting import until

CLIENTS, READS = 4, 3
PER_S = 10.0


def test_clients_share_what_a_bucket_takes(moto_proxy: tuple[S3Bucket, S3Proxy]) -> None:
    bucket, proxy = moto_proxy
    settings = load_settings(tree(bucket), {})
    name = fresh_name()
    with open_payloads(settings) as payloads:
        payloads.put(name, views(b"x" * 1000))
    proxy.forget()
    proxy.inject("status503", methods=("GET",), beyond_per_s=PER_S)

    def read(client: PayloadStore) -> list[bytes | None]:
        return [fetch(client, name, 1000) for _ in range(READS)]

    with ExitStack() as opened:
        clients = [opened.enter_context(open_payloads(settings)) for _ in range(CLIENTS)]
        pool = opened.enter_context(ThreadPoolExecutor(CLIENTS))
        found = list(pool.map(read, clients))
    # Nobody fails for it, and most of what is asked is served, though each asks again as soon as it may.
    assert found == [[b"x" * 1000] * READS] * CLIENTS
    made = Counter(each.status for each in proxy.log)
    assert made[206] == CLIENTS * READS
    assert made[503] < 3 * made[206]


def test_each_page_of_a_listing_waits_for_its_turn_and_is_asked_for_again() -> None:
    names = [fresh_name() for _ in range(3)]
    asked, slept = list[int](), list[float]()

    def page(request: Head, _: bytes) -> Iterator[bytes]:
        """Pages 2 and 3 are refused once."""
        found = re.search(r"continuation-token=(\d)", request.words[1])
        asked.append(number := int(found[1]) if found else 0)
        if number and asked.count(number) == 1:
            return answer("503 Slow Down", b"<Error><Code>SlowDown</Code></Error>")
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{number + 1}</NextContinuationToken>"
        return answer("200 OK", listing(entry(f"pre/{names[number]}"), more if number < 2 else ""))

    with HostileServer(page) as server, server.open() as bucket:
        payloads = RetryingPayloads(
            bucket,
            attempts=2,
            backoff_s=0.1,
            max_backoff_s=2.0,
            throttle=(throttle := Throttle(longest_s=2.0, clock=lambda: 1000.0)),
            sleep=slept.append,
        )
        assert [item.name for item in payloads.list()] == names
        assert asked == [0, 1, 1, 2, 2]
        assert throttle.pause_s("saves") > 0
        assert len(slept) == 3


def test_a_store_counts_what_a_bucket_refuses_and_stops_asking(
    moto_proxy: tuple[S3Bucket, S3Proxy],
) -> None:
    bucket, proxy = moto_proxy
    settings = load_settings(
        {**tree(bucket, attempts=1, max_backoff_s=0.3), "breaker": {"backoff_s": 0.2, "max_backoff_s": 0.2}},
        {},
    )
    with open_store(settings) as store:
        payloads, breaker = store.backends.payloads, store.backends.breaker
        assert breaker is not None
        name = fresh_name()
        payloads.put(name, views(b"x"))
        proxy.inject("status503")
        # A save that is refused says nothing of reads.
        for _ in range(5):
            with pytest.raises(Throttled):
                payloads.put(fresh_name(), views(b"y"))
        assert breaker.is_closed
        proxy.forget()
        names = [fresh_name() for _ in range(3)]
        for each in names:
            with pytest.raises(Throttled):
                fetch(payloads, each)
        assert not breaker.is_closed
        assert len(proxy.log) == len(names)
        assert store.counters.snapshot()["slow_downs"] == 5 + len(names)
        proxy.heal()

        def back() -> bool:
            try:
                payloads.ping()
            except Exception:
                return False
            return fetch(payloads, name) == b"x"

        assert until(back)
