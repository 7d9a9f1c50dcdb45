"""The users of docs/security.md on a real server: what each may do, and that none reads a password."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvstore.errors import PermissionDenied
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sessions import Allowance, Hint
from kvstore.keys import NO_SALT, new_segment_id, salt_id, session_id
from schemas.settings import RedisSettings
from tests.index.contract.chains import CREATED_S, chain, namespace, put, put_all, record
from tests.index.redis.test_failures import VERBS
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.servers

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
#: What an administrator sets, and nobody else is to see.
SECRETS = {"requirepass": "owner-secret", "masterauth": "master-secret", "tls-key-file-pass": "key-secret"}
USERS = ("kvstore", "kvstore-reader")


@pytest.fixture
def guarded(private_redis: RedisServer) -> Iterator[redis.Redis]:
    """An administrator of a server with passwords and with the users that the page documents."""
    rules = dict(
        re.findall(r"^user (\S+) on >PASSWORD (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert set(rules) == set(USERS)
    with redis.Redis(port=private_redis.port, protocol=2) as first:
        for user, rule in rules.items():
            first.execute_command("ACL", "SETUSER", user, "on", f">{user}-secret", *rule.split())
        for name, value in SECRETS.items():
            first.config_set(name, value)
    with redis.Redis(port=private_redis.port, protocol=2, password=SECRETS["requirepass"]) as owner:
        yield owner


def opened(server: RedisServer, user: str) -> RedisIndex:
    settings = RedisSettings.model_validate({"username": user, "password": f"{user}-secret"})
    return RedisIndex.from_settings(server.url, settings)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("asked", ["*", "*pass*", "requirepass", "masterauth", "tls-key-file-pass"])
def test_nobody_reads_a_password(
    private_redis: RedisServer, guarded: redis.Redis, user: str, asked: str
) -> None:
    with redis.Redis(
        port=private_redis.port, protocol=2, username=user, password=f"{user}-secret", decode_responses=True
    ) as client:
        for words in (
            ("CONFIG", "GET", asked),
            ("EVAL", f"return redis.call('CONFIG', 'GET', '{asked}')", "0"),
            ("EVAL", f"return redis.pcall('CONFIG', 'GET', '{asked}')", "0"),
        ):
            with pytest.raises(redis.ResponseError) as caught:
                client.execute_command(*words)
            assert not any(secret in str(caught.value) for secret in SECRETS.values())
        told = str(client.execute_command("INFO", "everything"))
        assert not any(secret in told for secret in SECRETS.values())


def test_the_user_may_do_all_that_the_store_does(private_redis: RedisServer, guarded: redis.Redis) -> None:
    with opened(private_redis, "kvstore") as index:
        name = index.register(namespace(), expected_blocks=1000)
        put_all(index, name, chain(6), [2, 2, 2])
        index.ping()
        index.set_quota("store", 1 << 40)
        for verb in VERBS:
            if verb is not VERBS[-2]:  # erase, which comes when nothing is left
                verb(index, name)
        assert index.memory() is not None
        assert index.warnings() == []
    assert guarded.execute_command("ACL", "LOG") == []


def test_the_user_may_erase_and_the_reader_may_look_what_there_is(
    private_redis: RedisServer, guarded: redis.Redis
) -> None:
    salt = salt_id("alice")
    with opened(private_redis, "kvstore") as index:
        name = index.register(namespace(), expected_blocks=1000)
        segment = put(index, name, chain(2), salt=salt)
        with opened(private_redis, "kvstore-reader") as reader:
            assert [one.segment for one in reader.of_salt(name, salt)] == [segment]
            assert list(reader.holdings(name, 0)) == [salt] and reader.forbidden(name) == {}
            with pytest.raises(PermissionDenied):
                reader.forbid(name, salt)
        guarded.execute_command("ACL", "LOG", "RESET")
        until = index.forbid(name, salt)
        assert index.forbidden(name) == {salt: until}
        assert index.evict(name, [segment], delete_after_s=0, rule="erased") == 1
        assert index.reapable(name, None, 9) == [(segment, 1)]
        index.reaped(name, [segment])
        assert index.erase(name, 100) == "erased"
    assert guarded.execute_command("ACL", "LOG") == []


def test_the_user_may_tell_of_sessions_and_the_reader_may_look_at_them(
    private_redis: RedisServer, guarded: redis.Redis
) -> None:
    session, hint = session_id(NO_SALT, "chat"), Hint(retain_s=9e9)
    allowance = Allowance(1 << 30, 1 << 30, 1 << 30)
    with opened(private_redis, "kvstore") as index:
        name = index.register(namespace(), expected_blocks=1000)
        segment, other = new_segment_id(), put(index, name, chain(2, seed="b"))
        index.commit(name, segment, chain(1), record(1), rank=0, ranks=1, session=session)
        told = index.session(name, session, [segment, other], CREATED_S, hint, allowance=allowance)
        assert told.retained_bytes == record(1).nbytes + record(2).nbytes
        assert guarded.execute_command("ACL", "LOG") == []
        with opened(private_redis, "kvstore-reader") as reader:
            assert [one.session for one in reader.sessions(name)] == [session]
            assert reader.find_sessions(name, [session])[0] is not None
            assert reader.owners(name, [segment, other]) == [session, b""]
            assert list(reader.owned(name, session)) == [segment]
            assert reader.retained(name)[NO_SALT] == told.retained_bytes
            assert guarded.execute_command("ACL", "LOG") == []
            with pytest.raises(PermissionDenied):
                reader.session(name, session, [segment], CREATED_S)
        assert index.expire(name) == 0
        index.session(name, session, [], CREATED_S, Hint(end=True))
        assert index.cull(name, keep_bytes=0, delete_after_s=0, limit=9, rule="capacity")


def test_the_reader_may_look(private_redis: RedisServer, guarded: redis.Redis) -> None:
    with opened(private_redis, "kvstore") as index:
        name = index.register(namespace(), expected_blocks=1000)
        segments = put_all(index, name, chain(6), [2, 2, 2])
        index.set_quota("store", 1 << 40)
    guarded.config_set("maxmemory-policy", "allkeys-lru")
    with opened(private_redis, "kvstore-reader") as index:
        assert index.accounts()[0].usage.segments == 3
        assert name in index.namespaces() and index.quotas() == {"store": 1 << 40}
        assert [one.segment for one in index.segments(name)] and index.get(name, segments)
        assert index.match(name, chain(6)) and index.find(name, chain(6))
        assert len(list(index.entries(name))) == 6 and len(index.order(name, 9)) == 3
        assert index.sample(name, 2) and index.states(name, segments) == ["visible"] * 3
        assert index.events(name) and index.last_position(name)
        assert (index.outcomes(name, 9), index.seen(name), index.ghosts(name)) == ([], {}, [])
        assert index.hottest(name, 9) == [] and index.reapable(name, None, 9) == []
        assert index.memory() is not None
        # What it can't read any more of the configuration, the server says where everybody may ask.
        [text] = index.warnings()
        assert "allkeys-lru" in text
        assert guarded.execute_command("ACL", "LOG") == []
        for change in (lambda: put(index, name, chain(1, seed="x")), index.ping, lambda: index.cool(name)):
            with pytest.raises(PermissionDenied):
                change()
