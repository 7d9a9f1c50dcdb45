"""The servers that other tests stand on do what their verbs say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.redis import RedisServer
from tests.waiting import until


def test_a_shared_server_is_empty_for_each_test(redis_server: RedisServer) -> None:
    assert redis_server.command("DBSIZE") == b":0"
    assert redis_server.command("SET", "k", b"\x00\xff") == b"+OK"
    assert redis_server.command("GET", "k") == b"\x00\xff"


def test_a_shared_server_is_empty_again(redis_server: RedisServer, redis_url: str) -> None:
    assert redis_server.command("DBSIZE") == b":0"
    assert redis_url == f"redis://127.0.0.1:{redis_server.port}/0"


def test_a_private_server_stops_hangs_and_comes_back_empty(private_redis: RedisServer) -> None:
    private_redis.command("SET", "k", "v")
    url = private_redis.url
    private_redis.pause()
    with pytest.raises(TimeoutError):
        private_redis.command("PING", timeout_s=0.2)
    private_redis.resume()
    assert private_redis.command("GET", "k") == b"v"
    private_redis.restart_empty()
    assert private_redis.command("DBSIZE") == b":0"
    for end in (private_redis.stop, private_redis.kill):
        end()
        assert not private_redis.running
        with pytest.raises(ConnectionRefusedError):
            private_redis.command("PING")
        private_redis.start()
        assert private_redis.command("PING") == b"+PONG"
    private_redis.pause()
    private_redis.stop()
    assert not private_redis.running
    assert private_redis.url == url


@pytest.mark.servers
def test_a_server_does_not_outlive_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.servers.redis import RedisServer\n"
        f"s = RedisServer(Path({str(tmp_path)!r})).start(); print(s.pid, flush=True); time.sleep(600)"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert not Path(f"/proc/{pid}").exists()
