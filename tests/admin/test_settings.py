"""Where settings come from, what a failure looks like, and that no secret is ever printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.admin.backends import Sources
from kvstore.admin.inspect import ls
from kvstore.cli import exits, main
from tests.admin.conftest import Admin, Filled, fill, kv_slots
from tests.servers.redis import RedisServer
from tests.waiting import PATIENCE_S


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("payloads: file:///from/file\nindex: sqlite:///from/file.db\ncapacity_bytes: 1GiB\n")
    environ = {"KVSTORE_PAYLOADS": "file:///from/environment", "KVSTORE_CAPACITY_BYTES": "2GiB"}
    by_file = Sources(file=str(file), environ={}).settings()
    assert (by_file.payloads, by_file.capacity_bytes) == ("file:///from/file", 1 << 30)
    by_environment = Sources(file=str(file), environ=environ).settings()
    assert (by_environment.payloads, by_environment.capacity_bytes) == ("file:///from/environment", 2 << 30)
    assert by_environment.index == "sqlite:///from/file.db"
    by_option = Sources(str(file), "redis://h/1", "file:///from/option", environ).settings()
    assert (by_option.index, by_option.payloads) == ("redis://h/1", "file:///from/option")
    assert by_option.capacity_bytes == 2 << 30
    named = Sources(environ={"KVSTORE_SETTINGS": str(file)}).settings()
    assert named.payloads == "file:///from/file"
    text = Sources(str(file), "redis://h/1", None, environ).describe()
    assert text == f"--index, KVSTORE_CAPACITY_BYTES, KVSTORE_PAYLOADS, file {file}"


def test_the_environment_is_enough(admin: Admin, filled: Filled) -> None:
    ran = admin("status", "--json", env={"KVSTORE_PAYLOADS": f"file://{filled.folder}"})
    assert ran.code == 0
    assert ran.json["total"]["segments"] == 5
    wins = admin("status", "--json", *filled.options, env={"KVSTORE_PAYLOADS": "file:///not/there"})
    assert wins.json["total"]["segments"] == 5


@pytest.mark.parametrize(
    ("options", "env", "word"),
    [
        ([], {}, "payloads"),
        (["--payloads", "nonsense"], {}, "payloads"),
        (["--payloads", "file:///x", "--index", "http://x"], {}, "index"),
        (["--payloads", "file:///x"], {"KVSTORE_CAPACITY_BITES": "1"}, "KVSTORE_CAPACITY_BYTES"),
        (["--settings", "/not/there.yaml"], {}, "/not/there.yaml"),
    ],
)
@pytest.mark.parametrize(
    "verb", [["status"], ["ls"], ["show", "x"], ["namespaces"], ["doctor"], ["vllm-config"]]
)
def test_wrong_settings_exit_with_2(
    admin: Admin, verb: list[str], options: list[str], env: dict[str, str], word: str
) -> None:
    ran = admin(*verb, *options, env=env)
    assert (ran.code, ran.out) == (exits.ExitCode.USAGE, "")
    assert word in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "words",
    [
        "ls --sort size",
        "ls --limit -1",
        "nonsense",
        "show",
        "vllm-config --role x",
        "vllm-config --no-kv",
        "namespaces --json diff a b",
        "namespaces diff a",
    ],
)
def test_wrong_usage_exits_with_2(admin: Admin, filled: Filled, words: str) -> None:
    ran = admin(*words.split(), env={"KVSTORE_PAYLOADS": f"file://{filled.folder}"})
    assert (ran.code, ran.out) == (exits.ExitCode.USAGE, "")


def test_help_shows_the_exit_codes_and_the_order_of_settings(admin: Admin) -> None:
    text = " ".join(admin("--help").out.split())
    for code, meaning in exits.table():
        assert f"{code} {meaning}" in text
    assert "KVSTORE_SETTINGS" in text


@pytest.mark.slow
def test_no_signing_key_is_ever_printed(admin: Admin, tmp_path: Path) -> None:
    """Whatever verb looks, and whether the keys work, are gone, are others, or stand where none belongs."""
    key, other = "c3" * 32, "d4" * 32
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "2026").write_text(key)
    filled = Filled(tmp_path / "cache", ["--payloads", f"file://{tmp_path}/cache"], {})
    filled.settings |= {
        "payloads": f"file://{tmp_path}/cache",
        "signing": {"keys": str(folder), "key": "2026", "encrypt": True},
    }
    filled.save(filled.kv, kv_slots(4))
    environ = {
        "KVSTORE_SIGNING__KEYS": str(folder),
        "KVSTORE_SIGNING__KEY": "2026",
        "KVSTORE_SIGNING__ENCRYPT": "true",
    }
    segment = admin("ls", "--json", *filled.options).json["segments"][0]["segment"]
    every = [
        *(["status"], ["ls"], ["show", segment, "--verify"], ["doctor"], ["vllm-config"], ["fsck"]),
        *(["rebuild", "--dry-run"], ["explain", "--digest", "00" * 16]),
    ]
    codes = set()

    def look(env: dict[str, str]) -> None:
        for words in every:
            for extra in ([], ["--json"]):
                ran = admin("--debug", *words, *extra, *filled.options, env=env)
                codes.add(ran.code)
                for secret in (key, other):
                    assert secret not in (ran.out + ran.err).lower()
                    assert repr(bytes.fromhex(secret))[2:-1] not in ran.out + ran.err

    look(environ)
    assert codes <= {0, 1}
    shown = admin("show", segment, "--verify", *filled.options, env=environ)
    assert "with key 2026" in shown.out and "encrypted  yes" in shown.out
    [part] = admin("show", segment, "--json", *filled.options, env=environ).json["parts"]
    assert (part["key"], part["encrypted"], part["state"]) == ("2026", True, "ok")
    look({})
    [part] = admin("show", segment, "--json", *filled.options).json["parts"]
    assert part["state"] == "unreadable" and "written with key 2026" in part["problems"][0]
    (folder / "2026").write_text(other)
    look(environ)
    (folder / "2026").write_text(key[:-1])
    look(environ)
    look(environ | {"KVSTORE_SIGNING__KEY": key})
    look(environ | {"KVSTORE_SIGNING__KEYS": key})
    look(environ | {"KVSTORE_SIGNING__UNSIGNED": key})
    assert 2 in codes


SECRETS = ("hunter2-secret", "u-name-secret")


def test_no_secret_is_ever_printed(admin: Admin, tmp_path: Path, private_redis: RedisServer) -> None:
    password, user = SECRETS
    private_redis.command("ACL", "SETUSER", user, "on", f">{password}", "~*", "+@all")
    url = f"redis://{user}:{password}@127.0.0.1:{private_redis.port}/0"
    filled = fill(tmp_path / "cache", url)
    segment = admin("ls", "--json", *filled.options).json["segments"][0]["segment"]
    every = [
        *(["status"], ["ls"], ["show", segment], ["namespaces"], ["doctor"], ["vllm-config"]),
        ["namespaces", "diff", filled.kv_id, filled.ec_id],
        ["show", "ffff"],
    ]
    by_environment = {"KVSTORE_REDIS__PASSWORD": password, "KVSTORE_REDIS__USERNAME": user}
    plain = ["--payloads", f"file://{filled.folder}", "--index", private_redis.url]

    def look() -> None:
        for words in every:
            for extra in ([], ["--json"]):
                for ran in (
                    admin(*words, *extra, *filled.options),
                    admin(*words, *extra, *plain, env=by_environment),
                    admin("--debug", *words, *extra, *filled.options),
                ):
                    assert password not in ran.out + ran.err
                ran = admin(*words, *extra, *filled.options)
                assert user not in ran.out + ran.err

    look()
    private_redis.command("ACL", "SETUSER", user, "resetpass", ">another")
    look()
    private_redis.kill()
    look()
    for bad in (f"redis://{user}:{password}@h:x/0", f"redis://{user}:{password}/@h", f"{user}:{password}@h"):
        ran = admin("status", "--payloads", "file:///x", "--index", bad)
        assert ran.code == 2
        assert password not in ran.err


def test_an_unexpected_error_is_a_sentence_and_with_debug_a_traceback(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(ls, "ls", broken)
    ran = admin("ls", *filled.options)
    assert (ran.code, ran.out) == (1, "")
    assert "ZeroDivisionError: broken" in ran.err
    assert "--debug" in ran.err
    assert "Traceback" not in ran.err
    assert "Traceback" in admin("--debug", "ls", *filled.options).err


def test_ctrl_c_exits_with_130(admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "ls", interrupted)
    assert admin("ls", *filled.options).code == exits.ExitCode.CANCELLED


def run_module(
    *words: str, code: str = "from kvstore.cli import main; main()"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


@pytest.mark.slow
def test_the_real_process(filled: Filled) -> None:
    ran = run_module("status", "--json", *filled.options)
    assert ran.returncode == 0
    assert '"segments": 5' in ran.stdout
    assert run_module("show", "ffff", *filled.options).returncode == 1
    bad = ["--payloads", "file:///x", "--index", "redis://127.0.0.1:1/0"]
    assert run_module("ls", *bad).returncode == 5
    assert "Traceback" not in run_module("ls", *bad).stderr
    debugged = run_module("--debug", "ls", *bad)
    assert debugged.returncode == 5
    assert "Traceback" in debugged.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_it_says_how_to_install_it(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from kvstore.cli import main; main()"
    ran = run_module("status", code=code)
    assert (ran.returncode, ran.stdout) == (1, "")
    # A bare name leads to a stranger's package on PyPI, or to none.
    assert "'.[cli]' in a checkout" in ran.stderr and "kvstore" not in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_the_entry_point_is_the_one_in_pyproject() -> None:
    assert 'cache-admin = "kvstore.cli:main"' in Path("pyproject.toml").read_text()
    assert callable(main)
