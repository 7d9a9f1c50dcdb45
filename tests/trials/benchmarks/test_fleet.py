"""A fleet in a box runs, and tells what it promises; what that costs is no test's business."""

from __future__ import annotations

import pytest

from tests.servers.s3.ceph import CephServer
from tools.fleet.__main__ import fleet, schedule


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.skipif(bool(CephServer.missing()), reason="there is no S3 server here but an imitation")
def test_a_small_fleet() -> None:
    report = fleet(engines=6, seconds=3.0, rate=2.0, shards=8, processes=2)
    assert (report.engines, report.requests, report.failed) == (6, 36, 0)
    assert report.loaded > 0 and report.loads > 0 and report.commits > 0
    # A load is one GET of each segment, a save one PUT, and the janitor reads some more. A match and a commit
    # are one call each.
    assert report.s3_gets >= report.loads and report.s3_puts >= report.commits
    assert report.calls["match"].calls == 1
    assert report.calls["commit"].calls == pytest.approx(report.commits)
    assert 0 < report.busiest_cpu_us and report.stored_blocks > 0


def test_turns_go_to_one_engine_after_the_other_in_time() -> None:
    engines = schedule(engines=5, seconds=10.0, rate=2.0)
    assert [len(one) for one in engines] == [20] * 5
    for requests in engines:
        times = [one.at_s for one in requests]
        assert times == sorted(times) and 0 <= times[0] and times[-1] < 10
    assert engines == schedule(engines=5, seconds=10.0, rate=2.0)
