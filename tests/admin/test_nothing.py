"""Verbs on a cache that nobody has made yet."""

from __future__ import annotations

from pathlib import Path

from tests.admin.conftest import Admin


def test_verbs_on_nothing_make_nothing(admin: Admin, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    options = ["--payloads", f"file://{folder}"]
    for words in (
        ["stats"],
        ["top"],
        ["fsck", "--list"],
        ["events"],
        ["quota"],
        ["quota", "set", "store", "1GiB"],
        ["ttl"],
        ["ttl", "set", "store", "30d"],
        ["pin"],
        ["unpin", "--all", "--apply"],
        ["evict", "--unused-for", "1d", "--apply"],
        ["evict", "--keep", "1GiB", "--apply"],
    ):
        ran = admin(*words, *options)
        assert ran.code == 0, (words, ran.err)
        assert not folder.exists(), words
    assert admin("quota", "set", "store", "1GiB", "--apply", *options).code == 0
    assert (folder / "index.sqlite").exists(), "a quota may be set before the first save"
