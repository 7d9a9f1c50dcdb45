"""The file that names prompts: what may stand in it, and what was wrong with it is said."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.archive.prompts import read_prompts
from kvstore.errors import ConfigError


def written(folder: Path, *prompts: Any) -> Path:
    """A file that names these prompts, each of which is called `a` if it has no name."""
    named = [one if "name" in one else {"name": "a", **one} for one in prompts]
    (folder / "prompts.json").write_text(json.dumps({"prompts": named}))
    return folder / "prompts.json"


def test_every_kind_of_prompt(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "rules.md").write_text("Be kind.\n")
    tools = [{"type": "function", "function": {"name": "look"}}]
    hello = {"role": "user", "content": "Hello"}
    parts = {
        "role": "user",
        "content": ["b", {"type": "text", "text": "c"}, {"type": "refusal", "refusal": "d"}],
    }
    path = written(
        tmp_path,
        {"name": "said", "text": "You are kind."},
        {"name": "team-a/rules", "file": "texts/rules.md"},
        {"name": "ids", "tokens": [1, 2, 3]},
        {
            "name": "chat",
            "messages": [{"role": "system", "file": "texts/rules.md"}, hello, parts],
            "tools": tools,
        },
    )
    assert read_prompts(path) == [
        {"name": "said", "text": "You are kind."},
        {"name": "team-a/rules", "text": "Be kind.\n"},
        {"name": "ids", "tokens": [1, 2, 3]},
        {
            "name": "chat",
            "messages": [{"role": "system", "content": "Be kind.\n"}, hello, parts],
            "tools": tools,
        },
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompts": []}', "at least 1 item"),
        ("prompts: [{name: a, text: b}]", "prompts.json is not JSON: Expecting value"),
        ("[" * 100_000, "prompts.json is not JSON"),
        ('{"prompts": ' + "9" * 5000 + "}", "prompts.json is not JSON"),
        ('{"prompt": []}', "unknown key 'prompt'; allowed here: prompts"),
    ],
)
def test_a_file_that_names_no_prompts(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "prompts.json").write_text(text)
    with pytest.raises(ConfigError) as found:
        read_prompts(tmp_path / "prompts.json")
    assert said in str(found.value)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([{}], "prompt 'a' needs exactly one of text, file, messages and tokens"),
        (
            [{"text": "b", "tokens": [1]}],
            "prompt 'a' needs exactly one of text, file, messages and tokens",
        ),
        ([{"text": "b", "tools": [{}]}], "prompt 'a' has tools without messages: leave them out"),
        ([{"text": "b"}, {"text": "c"}], "several prompts are called a"),
        ([{"name": "../a b", "text": "b"}], "prompts.0.name = '../a b'"),
        ([{"tokens": [-1]}], "prompts.0.tokens.0"),
        ([{"file": "none.txt"}], "none.txt can't be read: No such file"),
        ([{"file": "binary"}], "binary is not in UTF-8"),
        ([{"messages": [{"content": "b"}]}], "prompt 'a': a message has no role"),
        (
            [{"messages": [{"role": "user", "content": "b", "file": "c"}]}],
            "prompt 'a': a message has content, or the name of a file",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, prompts: list[Any], said: str) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as found:
        read_prompts(written(tmp_path, *prompts))
    assert said in str(found.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"file": "../secret"},
        {"file": "below/../../secret"},
        {"file": "%(outside)s/secret"},
        {"file": "link"},
        {"file": "folder/secret"},
        {"file": "/proc/self/environ"},
        {"messages": [{"role": "system", "file": "../secret"}]},
    ],
)
def test_what_lies_outside_of_the_folder_is_not_read(tmp_path: Path, entry: dict[str, Any]) -> None:
    (tmp_path / "secret").write_text("a token")
    folder = tmp_path / "prompts"
    (folder / "below").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    path = written(folder, json.loads(json.dumps(entry) % {"outside": tmp_path}))
    with pytest.raises(ConfigError, match="is not below the folder of the prompts' file"):
        read_prompts(path)


def test_hidden_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("a token")
    (tmp_path / "link").symlink_to(tmp_path / ".git" / "config")
    for file in (".git/config", "link"):
        with pytest.raises(ConfigError, match="is hidden"):
            read_prompts(written(tmp_path, {"file": file}))


def test_files_of_a_config_map_are_read(tmp_path: Path) -> None:
    """Kubernetes mounts them as links to links."""
    there = tmp_path / "..2026_11_24"
    there.mkdir()
    (there / "rules.md").write_text("Be kind.")
    (tmp_path / "..data").symlink_to(there.name)
    (tmp_path / "rules.md").symlink_to("..data/rules.md")
    written(there, {"file": "rules.md"})
    (tmp_path / "prompts.json").symlink_to("..data/prompts.json")
    assert read_prompts(tmp_path / "prompts.json") == [{"name": "a", "text": "Be kind."}]


def within(seconds: float, path: Path) -> str:
    """Reads prompts on a thread, for an old reader never ended; returns why it gave up."""
    said: list[str] = []

    def read() -> None:
        try:
            read_prompts(path)
        except ConfigError as exc:
            said.append(str(exc))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    assert said, "it is still reading" if thread.is_alive() else "it was read"
    return said[0]


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in written(tmp_path, {"file": "fifo"}), tmp_path / "fifo", written(tmp_path, {"file": "."}):
        assert "no regular file" in within(60, path)


def test_all_files_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 64 MiB that is named four million times would fill any memory."""
    monkeypatch.setattr("kvstore.admin.archive.prompts._MOST_TOGETHER", 1000)
    (tmp_path / "a.txt").write_text("a" * 300)
    path = written(tmp_path, *({"name": f"p{n}", "file": "a.txt"} for n in range(4)))
    with pytest.raises(ConfigError, match="make several exports"):
        read_prompts(path)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data/"}}],
        [{"type": "text", "text": "a"}, {"image_url": "http://169.254.169.254/"}],
        [{"type": "text", "text": "a", "image_url": "http://169.254.169.254/"}],
        [{"type": "input_image", "image_url": "http://169.254.169.254/"}],
        [{"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}],
        [{"type": "audio_url", "audio_url": {"url": "https://other.example/a.wav"}}],
        [{"type": "text", "text": {"image_url": "http://169.254.169.254/"}}],
        {"image_url": "http://169.254.169.254/"},
        [[{"image_url": "http://169.254.169.254/"}]],
        [{"type": ["image_url"], "image_url": "http://169.254.169.254/"}],
    ],
)
def test_no_address_is_asked(tmp_path: Path, content: Any) -> None:
    path = written(tmp_path, {"messages": [{"role": "user", "content": content}]})
    with pytest.raises(ConfigError, match="prompt 'a': a message's content is text"):
        read_prompts(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ConfigError, match="more than 64 MiB"):
        read_prompts(path)
