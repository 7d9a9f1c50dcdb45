"""What the doctor says of replicas that engines are to read, to the users of docs/security.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.admin.backends import Cache, Sources
from kvstore.admin.doctor.doctor import doctor
from kvstore.admin.doctor.reports import Check
from tests.index.redis.cluster import RedisClusterServers
from tests.servers.redis import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.servers

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")


def checked(folder: Path, url: str, **more: str) -> list[Check]:
    """The check of a store; by default its engines read replicas where there are some."""
    environ = {
        "KVSTORE_REDIS__TIMEOUT_S": str(PATIENCE_S),
        "KVSTORE_REDIS__CONNECT_TIMEOUT_S": str(PATIENCE_S),
    }
    sources = Sources(payloads=f"file://{folder}", index=url, environ=environ | more)
    with Cache(sources.settings()) as cache:
        report = doctor(cache, sources, mounts="")
    # How fast the index answers is the machine's affair: the state may warn of it.
    [index] = [one for one in report.checks if one.name == "index"]
    assert index.found.startswith("read and written; ")
    return [one for one in report.checks if one.name == "index replicas"]


def test_the_user_of_the_page_reads_replicas_and_what_it_lacks_is_said(
    tmp_path: Path, replicated_cluster: RedisClusterServers
) -> None:
    [rule] = re.findall(r"^user kvstore on >PASSWORD (.*)$", PAGE, re.MULTILINE)
    [more] = re.findall(r"In a Cluster add `(.*?)`", PAGE)
    login = {"KVSTORE_REDIS__USERNAME": "kvstore", "KVSTORE_REDIS__PASSWORD": "secret"}
    url, user = replicated_cluster.urls[0], ("ACL", "SETUSER", "kvstore")
    replicated_cluster.everywhere(*user, "on", ">secret", *rule.split(), *more.split())
    [check] = checked(tmp_path, url, **login)
    assert (check.state, check.found, check.advice) == ("ok", "3 of 3 can be read", "")
    replicated_cluster.everywhere(*user, "-readonly")
    [check] = checked(tmp_path, url, **login)
    assert check.state == "warning" and check.found.startswith("0 of 3 can be read; 127.0.0.1:")
    assert "+readonly" in check.advice
    [same] = checked(tmp_path, url, KVSTORE_REDIS__READ_FROM="replicas", **login)
    assert (same.state, same.advice) == (check.state, check.advice)
    assert checked(tmp_path, url, KVSTORE_REDIS__READ_FROM="master", **login) == []
    replicated_cluster.everywhere("ACL", "DELUSER", "kvstore")


def test_replicas_for_which_grace_has_no_room_are_nobodys_fault(
    tmp_path: Path, replicated_cluster: RedisClusterServers
) -> None:
    [check] = checked(tmp_path, replicated_cluster.urls[0], KVSTORE_GRACE_S="41")
    assert (check.state, check.advice) == ("ok", "")
    assert check.found.startswith("none of 3 is read: after redis.max_lag_s = 2, grace_s = 41 leaves")
    assert "with grace_s = 42 or more they are read" in check.found
    [check] = checked(tmp_path, replicated_cluster.urls[0], KVSTORE_GRACE_S="42")
    assert check.found == "3 of 3 can be read"


def test_replicas_that_nobody_names_are_none(tmp_path: Path, private_redis: RedisServer) -> None:
    [check] = checked(tmp_path, private_redis.url, KVSTORE_REDIS__READ_FROM="replicas")
    assert (check.state, check.found) == ("warning", "0 of 0 can be read")
    assert "Sentinels" in check.advice
    assert checked(tmp_path, private_redis.url) == []
    assert checked(tmp_path, private_redis.url, KVSTORE_GRACE_S="41") == []
    # Nor where it doesn't tell.
    private_redis.command("ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "-info")
    login = {"KVSTORE_REDIS__USERNAME": "mute", "KVSTORE_REDIS__PASSWORD": "secret"}
    assert checked(tmp_path, private_redis.url, **login) == []
