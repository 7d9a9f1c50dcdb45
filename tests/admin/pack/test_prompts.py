"""The file that names prompts, and an engine that does not come: what was wrong is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.admin.pack.engine import EngineFailed, compute
from kvstore.admin.pack.prompts import read_prompts
from kvstore.admin.progress import Silent
from kvstore.errors import ConfigError
from schemas.settings import Settings
from tests.admin.conftest import Admin


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
    ("text", "said"),
    [
        ("prompts: []", "at least 1 item"),
        ("[1", "is neither YAML nor JSON"),
        ("prompt: []", "unknown key 'prompt'; allowed here: prompts"),
        ("prompts: [{name: a}]", "prompt 'a' has one of text, file, messages and tokens"),
        (
            "prompts: [{name: a, text: b, tokens: [1]}]",
            "prompt 'a' has one of text, file, messages and tokens",
        ),
        ("prompts: [{name: a, text: b, tools: [{}]}]", "prompt 'a' has tools, which go with messages"),
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


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ConfigError, match="more than 64 MiB"):
        read_prompts(path)


def test_without_vllm_it_says_so(tmp_path: Path, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('there is none')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prompts = written(tmp_path, "prompts: [{name: a, tokens: [1]}]")
    ran = admin("pack", "build", str(prompts), "--to", str(tmp_path / "a.tar"), "--", "my-model")
    assert ran.code == 1 and "which can't be imported here (there is none)" in ran.err
    assert not (tmp_path / "a.tar").exists()


def test_what_an_engine_said_last_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text("print('no such GPU'); raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = Settings(payloads=f"file://{tmp_path}/store")
    with pytest.raises(EngineFailed, match="the end of what it said:\nno such GPU"):
        compute([], [], settings, tmp_path / "log", Silent())


def test_nothing_is_computed_for_a_pack_that_is_there(tmp_path: Path, admin: Admin) -> None:
    prompts, there = written(tmp_path, "prompts: [{name: a, tokens: [1]}]"), tmp_path / "a.tar"
    there.write_bytes(b"")
    ran = admin("pack", "build", str(prompts), "--to", str(there), "--", "my-model")
    assert ran.code == 1 and "exists; --force overwrites it" in ran.err
