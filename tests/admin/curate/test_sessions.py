"""sessions: what clients have told of theirs, listed, ended and retained by an operator."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.index.sessions import LONGEST_RETAINED_S, Hint
from kvstore.keys import NO_SALT, SegmentId, SessionId, namespace_id, salt_id, session_id
from tests.admin.conftest import Admin, Filled, chain, opened, snapshot

TRIP = session_id(NO_SALT, "user-81/trip")


def used(filled: Filled, session: SessionId, *segments: SegmentId, hint: Hint = Hint()) -> None:
    with opened(filled) as index:
        index.session(namespace_id(filled.kv), session, segments, time.time(), hint)


@pytest.fixture
def told(either: Filled) -> Filled:
    """A cache with two sessions, of which one has ended and the other has saved a segment of its own."""
    used(either, session_id(NO_SALT, "over"), hint=Hint(end=True))
    with opened(either) as index:
        [record] = [one.record for one in index.segments(namespace_id(either.ec)) if one.record.nbytes > 5000]
        index.commit(
            namespace_id(either.kv), SegmentId(b"tripsegm"), bytes(range(16)) * record.slots, record,
            rank=0, ranks=1, session=TRIP,
        )  # fmt: skip
    return either


def test_what_there_is_is_listed(told: Filled, admin: Admin) -> None:
    report = admin("sessions", "--json", *told.options).json
    assert (report["live"], report["retained"], report["ended"], report["retained_bytes"]) == (1, 0, 1, 0)
    first, last = report["sessions"]
    assert (first["session"], first["state"], first["segments"]) == (TRIP.hex(), "live", 1)
    assert first["stored_bytes"] > 5000 and first["until_s"] is None and first["namespace"] == told.kv_id
    assert (last["state"], last["segments"], last["stored_bytes"]) == ("ended", 0, 0)
    [only] = admin("sessions", "--state", "ended", "--json", *told.options).json["sessions"]
    assert only == last
    assert admin("sessions", "--limit", "1", "--json", *told.options).json["sessions"] == [first]
    text = admin("sessions", *told.options).out
    assert "1 live, 0 retained, 1 ended" in text and TRIP.hex() in text
    assert admin("sessions", "--state", "dead", *told.options).code == 2
    assert admin("sessions", "beef", *told.options).code == 1


def test_without_an_index_there_are_none(tmp_path: Path, admin: Admin) -> None:
    options = ["--payloads", f"file://{tmp_path}/nothing"]
    assert admin("sessions", "--json", *options).json["sessions"] == []
    ran = admin("sessions", "--session", "x", "--end", "--apply", *options)
    assert ran.code == 1 and "remembers no such session" in ran.err
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("which", ["user-81/trip", TRIP.hex(), TRIP.hex()[:20].upper()])
def test_one_is_ended(told: Filled, admin: Admin, which: str) -> None:
    before = snapshot(told)
    planned = admin("sessions", "--session", which, "--end", *told.options)
    assert planned.code == 0 and "--apply" in planned.err and snapshot(told) == before
    assert admin("sessions", "--json", *told.options).json["ended"] == 1
    report = admin("sessions", "--session", which, "--end", "--apply", "--json", *told.options).json
    assert (report["action"], report["applied"]) == ("end", True)
    [done] = report["sessions"]
    assert (done["session"]["session"], done["session"]["state"], done["moved"]) == (TRIP.hex(), "ended", 1)
    with opened(told) as index:
        least = min(index.segments(namespace_id(told.kv)), key=lambda one: one.last_use_s)
        assert least.segment == b"tripsegm"
    text = admin("sessions", "--session", which, "--end", "--apply", *told.options).out
    assert "0 segments that only it has used go before all else" in text, "they do already"


def test_one_is_retained(told: Filled, admin: Admin) -> None:
    words = ["sessions", "--session", "user-81/trip", "--retain", "2h"]
    assert admin(*words, *told.options).code == 0
    assert admin("sessions", "--json", *told.options).json["retained"] == 0
    report = admin(*words, "--apply", "--json", *told.options).json
    [done] = report["sessions"]
    assert done["session"]["state"] == "retained" and done["refused_bytes"] == 0
    assert done["retained_bytes"] == done["session"]["stored_bytes"] > 0
    assert report["until_s"] == pytest.approx(time.time() + 7200, abs=60)
    assert done["session"]["until_s"] == pytest.approx(report["until_s"], abs=1)
    listed = admin("sessions", "--json", *told.options).json
    assert (listed["retained"], listed["retained_bytes"]) == (1, done["retained_bytes"])
    assert "go after all else, for 2.0h" in admin(*words, "--apply", *told.options).out


def test_what_may_be_retained_is_bounded(told: Filled, admin: Admin) -> None:
    env = {"KVSTORE_SESSIONS__RETAIN_SHARE": "0"}
    words = ["sessions", "--session", TRIP.hex(), "--retain", "1h", "--apply"]
    [done] = admin(*words, "--json", *told.options, env=env).json["sessions"]
    assert done["retained_bytes"] == 0 < done["refused_bytes"]
    assert "more than sessions.retain_share" in admin(*words, *told.options, env=env).out


def test_a_salted_session_is_another_one(told: Filled, admin: Admin, tmp_path: Path) -> None:
    salt = tmp_path / "salt"
    salt.write_text("a secret\n")
    words = ["sessions", "--session", "user-81/trip", "--end", "--salt-file", str(salt), "--apply"]
    assert admin(*words, *told.options).code == 1
    theirs = session_id(salt_id("a secret"), "user-81/trip")
    used(told, theirs, hint=Hint(priority="high"))
    [done] = admin(*words, "--json", *told.options).json["sessions"]
    assert done["session"]["session"] == theirs.hex() != TRIP.hex()
    assert admin("sessions", "--json", *told.options).json["live"] == 1


def test_a_start_of_several_ids_is_refused(told: Filled, admin: Admin) -> None:
    # Sessions of one salt begin alike.
    ran = admin("sessions", "--session", TRIP.hex()[:8], "--end", "--apply", *told.options)
    assert ran.code == 1 and "several sessions" in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ["--end"],
        ["--session", TRIP.hex()],
        ["--session", TRIP.hex(), "--end", "--retain", "1h"],
        ["--session", TRIP.hex(), "--end", "--state", "live"],
        ["--apply"],
        ["--salt-file", "/dev/null"],
        ["--session", TRIP.hex(), "--retain", "soon"],
        ["--session", TRIP.hex(), "--retain", "0"],
        ["--session", TRIP.hex(), "--retain", f"{LONGEST_RETAINED_S + 1}"],
    ],
)
def test_what_cannot_be_meant_is_refused(told: Filled, admin: Admin, words: list[str]) -> None:
    assert admin("sessions", *words, *told.options).code == 2


@pytest.mark.parametrize("name", ["", "zz", "../../etc", "5c" * 17, "x" * 257])
def test_what_is_no_id_is_no_session(told: Filled, admin: Admin, name: str) -> None:
    assert admin("sessions", "--session", name, "--end", *told.options).code == 1


def test_an_ended_sessions_segments_are_those_that_are_evicted_first(told: Filled, admin: Admin) -> None:
    assert admin("sessions", "--session", TRIP.hex(), "--end", "--apply", *told.options).code == 0
    held = sum(one.record.nbytes for one in chain(told)) - 1
    ran = admin("evict", told.kv_id, "--keep", f"{held}B", "--apply", *told.options)
    assert ran.code == 0, ran.err
    assert b"tripsegm" not in {one.segment for one in chain(told)} and len(chain(told)) == 3
