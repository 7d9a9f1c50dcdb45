"""Verbs on a cache that nobody has made yet."""

from __future__ import annotations

from pathlib import Path

from tests.admin.conftest import Admin


def test_verbs_on_nothing_make_nothing(admin: Admin, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    options = ["--payloads", f"file://{folder}"]
    for words in (
        ["status", "--hits", "--top", "3"],
        ["fsck", "--list"],
        ["events"],
        ["events", "--operators"],
        ["quota"],
        ["quota", "store", "--size", "1GiB", "--ttl", "30d"],
        ["pin"],
        ["pin", "--remove", "--apply"],
        ["evict", "--unused-for", "1d", "--apply"],
        ["evict", "--keep", "1GiB", "--apply"],
    ):
        ran = admin(*words, *options)
        assert ran.code == 0, (words, ran.err)
        assert not folder.exists(), words
    assert admin("quota", "store", "--size", "1GiB", "--apply", *options).code == 0
    assert (folder / "index.sqlite").exists(), "a quota may be set before the first save"
