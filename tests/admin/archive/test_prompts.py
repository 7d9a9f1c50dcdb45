"""The file that names prompts: what may stand in it, and what was wrong with it is said."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvstore.admin.archive.prompts import read_prompts
from kvstore.errors import ConfigError


def written(folder: Path, text: str, name: str = "prompts.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_every_kind_of_prompt(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "rules.md").write_text("Be kind.\n")
    path = written(
        tmp_path,
        """
        prompts:
          - {name: said, text: You are kind.}
          - {name: team-a/rules, file: texts/rules.md}
          - {name: ids, tokens: [1, 2, 3]}
          - name: chat
            messages:
              - {role: system, file: texts/rules.md}
              - {role: user, content: Hello}
            tools: [{type: function, function: {name: look}}]
        """,
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    messages = [{"role": "system", "content": "Be kind.\n"}, {"role": "user", "content": "Hello"}]
    assert read_prompts(path) == [
        {"name": "said", "text": "You are kind."},
        {"name": "team-a/rules", "text": "Be kind.\n"},
        {"name": "ids", "tokens": [1, 2, 3]},
        {"name": "chat", "messages": messages, "tools": tools},
    ]


def test_a_file_may_be_json(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompts": [{"name": "a", "tokens": [7]}]}', "prompts.json")
    assert read_prompts(path) == [{"name": "a", "tokens": [7]}]


@pytest.mark.parametrize(
    "tagged", ['!!int "1:2:3"', "!!bool x", "!!timestamp x", "!!python/name:os.system x"]
)
def test_yaml_has_no_tags(tmp_path: Path, tagged: str) -> None:
    with pytest.raises(ConfigError, match="line 1 has a tag"):
        read_prompts(written(tmp_path, f"prompts: {tagged}\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompts: []", "at least 1 item"),
        ("[1", "is neither YAML nor JSON"),
        ("prompt: []", "unknown key 'prompt'; allowed here: prompts"),
        ("prompts: [{name: a}]", "prompt 'a' needs exactly one of text, file, messages and tokens"),
        (
            "prompts: [{name: a, text: b, tokens: [1]}]",
            "prompt 'a' needs exactly one of text, file, messages and tokens",
        ),
        ("prompts: [{name: a, text: b, tools: [{}]}]", "prompt 'a' has tools without messages"),
        ("prompts: [{name: a, text: b}, {name: a, text: c}]", "several prompts are called a"),
        ("prompts: [{name: '../a b', text: b}]", "prompts.0.name = '../a b'"),
        ("prompts: [{name: a, tokens: [-1]}]", "prompts.0.tokens.0"),
        ("prompts: [{name: a, file: none.txt}]", "none.txt can't be read: No such file"),
        ("prompts: [{name: a, file: binary}]", "binary is not in UTF-8"),
        ("prompts: [{name: a, messages: [{content: b}]}]", "prompt 'a': a message has no role"),
        (
            "prompts: [{name: a, messages: [{role: user, content: b, file: c}]}]",
            "prompt 'a': a message has content, or the name of a file",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as found:
        read_prompts(written(tmp_path, text))
    assert said in str(found.value)


@pytest.mark.parametrize(
    "entry",
    [
        "{name: a, file: ../secret}",
        "{name: a, file: below/../../secret}",
        "{name: a, file: '%(outside)s/secret'}",
        "{name: a, file: link}",
        "{name: a, file: folder/secret}",
        "{name: a, file: /proc/self/environ}",
        "{name: a, messages: [{role: system, file: ../secret}]}",
    ],
)
def test_what_lies_outside_of_the_folder_is_not_read(tmp_path: Path, entry: str) -> None:
    (tmp_path / "secret").write_text("a token")
    folder = tmp_path / "prompts"
    (folder / "below").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    path = written(folder, f"prompts: [{entry % {'outside': tmp_path}}]")
    with pytest.raises(ConfigError, match="is not below the folder of the prompts' file"):
        read_prompts(path)


def test_hidden_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("a token")
    (tmp_path / "link").symlink_to(tmp_path / ".git" / "config")
    for file in (".git/config", "link"):
        with pytest.raises(ConfigError, match="is hidden"):
            read_prompts(written(tmp_path, f"prompts: [{{name: a, file: {file}}}]"))


def test_files_of_a_config_map_are_read(tmp_path: Path) -> None:
    """Kubernetes mounts them as links to links."""
    there = tmp_path / "..2026_11_24"
    there.mkdir()
    (there / "rules.md").write_text("Be kind.")
    (tmp_path / "..data").symlink_to(there.name)
    (tmp_path / "rules.md").symlink_to("..data/rules.md")
    written(there, "prompts: [{name: a, file: rules.md}]")
    (tmp_path / "prompts.yaml").symlink_to("..data/prompts.yaml")
    assert read_prompts(tmp_path / "prompts.yaml") == [{"name": "a", "text": "Be kind."}]


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
    assert "no regular file" in within(60, written(tmp_path, "prompts: [{name: a, file: fifo}]"))
    assert "no regular file" in within(60, tmp_path / "fifo")
    assert "no regular file" in within(60, written(tmp_path, "prompts: [{name: a, file: .}]"))


def test_yaml_stands_for_no_more_than_it_says(tmp_path: Path) -> None:
    """Ten lines of aliases are 10 GB of text; a message that holds itself has no end."""
    lines = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 10)]
    message = "\n".join(f"      {line}" for line in ["x0: &x0 ten letters", *lines])
    path = written(tmp_path, f"prompts:\n- name: a\n  messages:\n    - role: user\n{message}\n")
    assert "*x0 is an alias" in within(60, path)
    path = written(tmp_path, "prompts: [{name: a, messages: [&me {role: user, content: b, self: *me}]}]")
    assert "*me is an alias" in within(60, path)


@pytest.mark.parametrize("text", ["[", "{a: ", "- ", "? "])
def test_deep_yaml_is_read_no_further_than_it_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    read, scan = [], yaml.scan

    def counted(stream: str) -> Iterator[yaml.Token]:
        for token in scan(stream):
            read.append(token)
            yield token

    monkeypatch.setattr(yaml, "scan", counted)
    with pytest.raises(ConfigError, match="line 1 is more than 64 levels deep"):
        read_prompts(written(tmp_path, text * 600))
    assert len(read) < 6 * 64
    # A level that has ended does not count.
    lines = "".join(f"\n  - {{role: user, content: [{{type: text, text: '{n}'}}]}}" for n in range(100))
    assert read_prompts(written(tmp_path, f"prompts:\n- name: a\n  messages:{lines}\n"))


def test_a_number_to_base_60_has_a_bound(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2 has a number of too many digits"):
        read_prompts(written(tmp_path, f"prompts:\n- {{name: a, text: {'1:' * 501}1}}"))
    words = "1 2 " * 500 + "3"
    assert read_prompts(written(tmp_path, f"prompts: [{{name: a, text: {words}}}]"))[0]["text"] == words


def test_yaml_has_a_bound_that_json_has_not(tmp_path: Path) -> None:
    text = '{"prompts": [{"name": "a", "text": "' + "x" * (4 << 20) + '"}]}'
    with pytest.raises(ConfigError, match="more than 4 MiB of YAML"):
        read_prompts(written(tmp_path, text))
    assert read_prompts(written(tmp_path, text, "prompts.json"))


def test_all_files_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 64 MiB that is named four million times would fill any memory."""
    monkeypatch.setattr("kvstore.admin.archive.prompts._MOST_TOGETHER", 1000)
    (tmp_path / "a.txt").write_text("a" * 300)
    path = written(tmp_path, "prompts: [" + ", ".join(f"{{name: p{n}, file: a.txt}}" for n in range(4)) + "]")
    with pytest.raises(ConfigError, match="make several packs"):
        read_prompts(path)


@pytest.mark.parametrize(
    "content",
    [
        "[{type: image_url, image_url: {url: 'http://169.254.169.254/latest/meta-data/'}}]",
        "[{type: text, text: a}, {image_url: 'http://169.254.169.254/'}]",
        "[{type: text, text: a, image_url: 'http://169.254.169.254/'}]",
        "[{type: input_image, image_url: 'http://169.254.169.254/'}]",
        "[{type: video_url, video_url: {url: 'file:///etc/passwd'}}]",
        "[{type: audio_url, audio_url: {url: 'https://other.example/a.wav'}}]",
        "[{type: text, text: {image_url: 'http://169.254.169.254/'}}]",
        "{image_url: 'http://169.254.169.254/'}",
        "[[{image_url: 'http://169.254.169.254/'}]]",
        "[{type: [image_url], image_url: 'http://169.254.169.254/'}]",
    ],
)
def test_no_address_is_asked(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, f"prompts: [{{name: a, messages: [{{role: user, content: {content}}}]}}]")
    with pytest.raises(ConfigError, match="prompt 'a': a message's content is text"):
        read_prompts(path)


def test_parts_of_text_are_text(tmp_path: Path) -> None:
    content = "[b, {type: text, text: c}, {type: refusal, refusal: d}]"
    path = written(tmp_path, f"prompts: [{{name: a, messages: [{{role: user, content: {content}}}]}}]")
    [message] = read_prompts(path)[0]["messages"]
    assert message["content"] == ["b", {"type": "text", "text": "c"}, {"type": "refusal", "refusal": "d"}]


def test_what_json_does_not_have_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "prompts: [{name: a, messages: [{role: user, content: b, day: 2026-11-24}]}]")
    with pytest.raises(ConfigError, match="is neither YAML nor JSON: Object of type date"):
        read_prompts(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ConfigError, match="more than 64 MiB"):
        read_prompts(path)
