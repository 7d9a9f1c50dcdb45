"""Every verb that changes something records by whom before it does, in words that are one line."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.operators import among, janitor, operator, written
from kvstore.admin.serve.server import Serving
from kvstore.build import OPERATOR, load_settings, open_index
from kvstore.cli.app import VERBS
from kvstore.errors import PermissionDenied
from kvstore.index.sessions import Hint
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NO_SALT, NamespaceId, session_id
from tests.admin.conftest import Admin, Filled
from tests.waiting import PATIENCE_S

ANNA = {OPERATOR: "anna"}


def listed(admin: Admin, filled: Filled) -> list[dict[str, Any]]:
    return list(admin("operations", "--json", *filled.options).json["operations"])


def archive(filled: Filled, admin: Admin) -> list[str]:
    target = filled.folder.parent / "cache.tar"
    assert admin("export", filled.kv_id, "--to", str(target), *filled.options).code == 0
    assert admin("drop", filled.kv_id, "--now", "--apply", *filled.options).code == 0
    return ["import", str(target), "--new-namespaces"]


def tiers(filled: Filled, _: Admin) -> list[str]:
    settings = filled.folder.parent / "tiers.yaml"
    fast = filled.folder.parent / "fast"
    settings.write_text(
        f"payloads: {{fast: 'file://{fast}', slow: 'file://{filled.folder}', fast_capacity: 1GiB}}\n"
        f"index: {filled.settings.get('index') or f'sqlite:///{filled.folder}/index.sqlite'}\n"
    )
    return ["warm", filled.kv_id, "--settings", str(settings)]


def a_session(filled: Filled, _: Admin) -> list[str]:
    with closing(open_index(load_settings(filled.settings, {}))) as index:
        namespace = NamespaceId(filled.kv_id)
        index.session(namespace, session_id(NO_SALT, "trip"), [], time.time(), Hint(priority="high"))
    return ["sessions", "end", "--name", "trip", "--apply"]


#: Verbs that change something, as they are told to do it.
CHANGES: dict[str, Callable[[Filled, Admin], list[str]]] = {
    "evict": lambda filled, _: ["evict", "--keep", "1B", "--apply"],
    "pin": lambda filled, _: ["pin", "--namespace", filled.kv_id, "--depth", "1", "--apply"],
    "quota": lambda filled, _: ["quota", "set", "store", "1GiB", "--apply"],
    "ttl": lambda filled, _: ["ttl", "set", "store", "30d", "--apply"],
    "invalidate": lambda filled, _: ["invalidate", filled.kv_id, "--apply"],
    "drop": lambda filled, _: ["drop", filled.kv_id, "--now", "--apply"],
    "erase": lambda filled, _: ["erase", "--tenant", filled.kv.tenant, "--apply"],
    "gc": lambda filled, _: ["gc", "--apply"],
    "fsck": lambda filled, _: ["fsck", "--apply"],
    "rebuild": lambda filled, _: ["rebuild"],
    "import": archive,
    "warm": tiers,
    "sessions": a_session,
    "bench": lambda filled, _: ["bench", "--seconds", "1"],
}
#: Verbs that change nothing of the cache's. `serve` is the janitor, whose name is at each event; doctor's
#: probes are gone when it ends.
HARMLESS = {
    "status", "ls", "namespaces", "namespaces diff", "show", "stats", "top", "du", "events", "operations",
    "explain", "advise", "doctor", "vllm-config", "export", "serve", "feed",
}  # fmt: skip


def test_every_verb_is_among_those_that_change_something_or_nothing() -> None:
    said = {name.split()[0] for name in (*CHANGES, *HARMLESS)} | {"unpin", "reshard"}
    assert {each.name.split()[0] for each in VERBS} - said == set()


@pytest.mark.parametrize("verb", CHANGES)
def test_what_was_done_has_a_name(filled: Filled, admin: Admin, verb: str) -> None:
    words = CHANGES[verb](filled, admin)
    before = len(listed(admin, filled))
    options = [] if "--settings" in words else filled.options
    ran = admin(*words, *options, env=ANNA)
    assert ran.code == 0, ran.out + ran.err
    made = listed(admin, filled)[before:]
    assert [(one["by"], one["verb"]) for one in made] == [("anna", verb)]
    assert made[0]["what"] and abs(made[0]["at_s"] - time.time()) < PATIENCE_S
    text = admin("operations", *filled.options).out
    assert f"anna  {verb}  {made[0]['what']}" in text


@pytest.mark.parametrize(
    "verb", ["evict", "pin", "quota", "ttl", "invalidate", "drop", "erase", "gc", "fsck", "sessions"]
)
def test_a_plan_is_nothing_that_was_done(filled: Filled, admin: Admin, verb: str) -> None:
    words = [word for word in CHANGES[verb](filled, admin) if word not in ("--apply", "--repair")]
    assert admin(*words, *filled.options, env=ANNA).code == 0
    assert listed(admin, filled) == []


def test_unpin_is_recorded(filled: Filled, admin: Admin) -> None:
    chosen = {"pin": ["--depth", "1"], "unpin": ["--all"]}
    for verb, which in chosen.items():
        words = [verb, "--namespace", filled.kv_id, *which, "--apply"]
        assert admin(*words, *filled.options, env=ANNA).code == 0
    assert [one["verb"] for one in listed(admin, filled)] == ["pin", "unpin"]


@pytest.mark.parametrize(
    "verb", ["evict", "invalidate", "drop", "erase", "quota", "ttl", "gc", "pin", "sessions"]
)
def test_what_cannot_be_recorded_is_not_done(
    filled: Filled, admin: Admin, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionDenied("no right to write")

    monkeypatch.setattr(SqliteIndex, "record_operation", refuse)
    for payload in filled.payload_files():
        os.utime(payload, (1, 1))
    ran = admin(*CHANGES[verb](filled, admin), *filled.options, env=ANNA)
    assert ran.code == 5, ran.out + ran.err
    assert "no right to write" in ran.out + ran.err
    status = admin("status", "--json", *filled.options).json
    assert (status["total"]["segments"], len(filled.payload_files())) == (5, 5)
    assert admin("quota", "--json", *filled.options).json["quotas"][0]["source"] != "operator"
    assert admin("pin", "--json", *filled.options).json["pinned"]["segments"] == 0


def test_events_and_explanations_have_the_name(either: Filled, admin: Admin) -> None:
    admin("evict", "--keep", "1B", "--apply", *either.options, env=ANNA)
    events = admin("events", either.kv_id, "--json", *either.options).json["events"]
    assert {(one["op"], one["by"]) for one in events} == {("commit", ""), ("evict", "anna")}
    line = admin("events", either.kv_id, *either.options).out.splitlines()[-1]
    assert line.endswith("admin  by anna")


HOSTILE = "anna\x1b[2J\u009b31m\u202e\u2066\n\r\udc80" + "x" * 200


@pytest.mark.slow
def test_a_name_is_one_short_line_whatever_it_is(either: Filled, admin: Admin) -> None:
    admin("quota", "set", "store", "1GiB", "--apply", *either.options, env={OPERATOR: HOSTILE})
    admin("evict", "--keep", "1B", "--apply", *either.options, env={OPERATOR: HOSTILE})
    [quota, _] = listed(admin, either)
    assert quota["by"].startswith("anna\\x1b[2J\\x9b31m\\u202e\\u2066")
    assert (len(quota["by"]), quota["by"].isprintable()) == (64, True)
    for verb in ("operations", "events"):
        for words in ([verb], [verb, "--json"]):
            ran = admin(*words, *either.options)
            assert ran.code == 0
            assert all(c.isprintable() or c == "\n" for c in ran.out), words


def test_what_others_wrote_into_the_index_is_cleaned_too(filled: Filled, admin: Admin) -> None:
    with open_index(load_settings(filled.settings, {}), by="\x1b[2J\u202e" * 100) as index:
        index.record_operation("\u009b", "\u2066" * 1000)
        index.invalidate(NamespaceId(filled.kv_id))
    for verb in ("operations", "events"):
        out = admin(verb, "--json", *filled.options).out
        assert all(c.isprintable() or c == "\n" for c in out)
        assert len(out) < 20_000


def test_without_the_variable_it_is_the_user_at_this_machine(
    filled: Filled, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin("quota", "set", "store", "1GiB", "--apply", *filled.options)
    [one] = listed(admin, filled)
    assert one["by"] == f"{getpass.getuser()}@{socket.gethostname()}"[:64]
    assert operator({OPERATOR: "  "}) == one["by"]

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert operator({}) == f"{os.getuid()}@{socket.gethostname()}"[:64]


def test_the_variable_is_no_setting() -> None:
    assert load_settings({"payloads": "file:///cache"}, {OPERATOR: "anna"}).capacity_bytes


def test_a_janitors_evictions_have_its_hosts_name(filled: Filled, admin: Admin) -> None:
    tight = {**filled.settings, "capacity_bytes": 1}
    with Cache(load_settings(tight, {}), by=janitor()) as cache:
        Serving(cache).once()
    events = admin("events", filled.kv_id, "--json", *filled.options).json["events"]
    gone = [one for one in events if one["op"] == "evict"]
    assert gone and {(one["rule"], one["by"]) for one in gone} == {("capacity", socket.gethostname())}


def test_words_are_bounded() -> None:
    assert written("x" * 400) == "x" * 400
    assert (len(written("x" * 401)), len(written("\x00" * 400, 64))) == (400, 64)
    assert among(str(number) for number in range(20)) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert among(["a", "a"]) == "a"
