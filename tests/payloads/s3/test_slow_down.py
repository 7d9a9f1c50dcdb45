"""A bucket that takes so many requests a second, and clients that don't know of each other."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from kvstore.build import load_settings, open_payloads, open_store
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.errors import Throttled
from kvstore.payloads.port import PayloadStore
from tests.payloads.s3.test_store import tree
from tests.servers.s3.bucket import S3Bucket
from tests.servers.s3.proxy import S3Proxy
from tests.waiting import PATIENCE_S, until

CLIENTS, THREADS = 6, 2
PER_S = 20.0


def test_clients_share_what_a_bucket_takes(moto_proxy: tuple[S3Bucket, S3Proxy]) -> None:
    bucket, proxy = moto_proxy
    settings = load_settings(tree(bucket), {})
    name = fresh_name()
    with open_payloads(settings) as payloads:
        payloads.put(name, views(b"x" * 1000))
    # All take as long as the machine makes them; what is compared is counted, in the same seconds.
    proxy.inject("status503", methods=("GET",), beyond_per_s=PER_S)
    served: Counter[int] = Counter()
    stop = threading.Event()

    def read(number: int, payloads: PayloadStore) -> None:
        while not stop.is_set():
            try:
                assert fetch(payloads, name, 1000) == b"x" * 1000
                served[number] += 1
            except Throttled:
                stop.wait(0.2)

    with ExitStack() as opened:
        clients = [opened.enter_context(open_payloads(settings)) for _ in range(CLIENTS)]
        threads = [
            threading.Thread(target=read, args=(number, client))
            for number, client in enumerate(clients)
            for _ in range(THREADS)
        ]
        try:
            for thread in threads:
                thread.start()
            time.sleep(5)
            first = Counter(each.status for each in proxy.log)
            proxy.forget()
            served.clear()
            time.sleep(10)
            later = Counter(each.status for each in proxy.log)
            found = dict(served)
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_S)
    assert first[503] > 0
    assert later[503] < 0.25 * later.total()
    assert later[206] > 0
    assert set(found) == set(range(CLIENTS))


def test_a_store_counts_what_a_bucket_refuses_and_stops_asking(
    moto_proxy: tuple[S3Bucket, S3Proxy],
) -> None:
    bucket, proxy = moto_proxy
    settings = load_settings(
        {**tree(bucket, attempts=2, max_backoff_s=0.3), "breaker": {"backoff_s": 0.2, "max_backoff_s": 0.2}},
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
        assert len(proxy.log) <= 2 * len(names)
        counted = store.counters.snapshot()
        assert counted["slow_downs"] > 0
        assert counted["held_back"] > 0
        proxy.heal()

        def back() -> bool:
            try:
                payloads.ping()
            except Exception:
                return False
            return fetch(payloads, name) == b"x"

        assert until(back)
