"""The folder of signing keys: what is a key, what is refused, and that no error shows one."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import describe, load_settings, open_store
from kvstore.errors import ConfigError
from kvstore.format.keyring import Keyring
from kvstore.keyfiles import exposed, open_keyring

KEY = bytes(range(100, 132))
HEX, BASE64 = KEY.hex(), base64.b64encode(KEY).decode()


def settings(folder: Path, **more: Any) -> Any:
    signing = {"keys": str(folder), "key": "a"} | more
    return load_settings({"payloads": "memory://keys", "index": "memory://keys", "signing": signing}, {})


def opened(folder: Path, **more: Any) -> Keyring:
    return open_keyring(settings(folder, **more).signing)


def refused(folder: Path, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(folder, **more)
    for text in (str(caught.value), repr(caught.value), str(caught.value.__cause__)):
        assert HEX not in text and BASE64 not in text and repr(KEY) not in text
    return str(caught.value)


def test_keys_are_hex_or_base64(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(HEX + "\n")
    (tmp_path / "b.2_-").write_text(BASE64)
    keyring = opened(tmp_path)
    assert (list(keyring.ids), keyring.key, keyring.encrypts) == (["a", "b.2_-"], "a", False)
    assert keyring._keys["a"].mac == keyring._keys["b.2_-"].mac != keyring._keys["a"].wrap
    assert not keyring.accepts_unsigned
    assert opened(tmp_path, unsigned="accept").accepts_unsigned


def test_a_mounted_secret(tmp_path: Path) -> None:
    """Its keys are links into a folder that a dot hides."""
    real = tmp_path / "..2026_11_22"
    real.mkdir()
    (real / "a").write_text(HEX)
    (tmp_path / "..data").symlink_to(real.name)
    (tmp_path / "a").symlink_to("..data/a")
    assert opened(tmp_path).ids == ["a"]
    assert exposed(tmp_path) == []


def test_who_else_may_read_keys(tmp_path: Path) -> None:
    for name, mode in (("a", 0o600), ("b", 0o640), ("c", 0o604), ("d", 0o400)):
        (tmp_path / name).write_text(HEX)
        (tmp_path / name).chmod(mode)
    assert exposed(tmp_path) == ["b", "c"]


def test_what_is_refused_and_in_which_words(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "nowhere")
    assert "there is no key in" in refused(tmp_path)
    (tmp_path / "b").write_text(HEX)
    assert "signing.key: there is no key a in" in refused(tmp_path) and "there are b" in refused(tmp_path)
    for text, why in (
        ("", "0 bytes, not 32"),
        (HEX[:-2], "neither hex nor base64"),
        (base64.b64encode(KEY[:16]).decode(), "16 bytes, not 32"),
        ("x" * 64, "neither hex nor base64"),
        (HEX + "!", "neither hex nor base64"),
        (BASE64 * 100, "neither hex nor base64"),
    ):
        (tmp_path / "a").write_text(text)
        found = refused(tmp_path)
        assert why in found and "/a" in found and "openssl rand -hex 32" in found
    (tmp_path / "a").write_bytes(KEY)
    refused(tmp_path)
    (tmp_path / "a").write_text(HEX)
    (tmp_path / "no key.txt").write_text(HEX)
    assert "no key's id" in refused(tmp_path)
    (tmp_path / "no key.txt").unlink()
    (tmp_path / "folder").mkdir()
    assert "folder is not a file" in refused(tmp_path)
    (tmp_path / "folder").rmdir()
    for number in range(64):
        (tmp_path / f"n{number}").write_text(HEX)
    assert "more than 64 keys" in refused(tmp_path)


@pytest.mark.parametrize(
    ("signing", "why"),
    [
        ({"keys": "/k"}, "given both or neither"),
        ({"key": "a"}, "given both or neither"),
        ({"encrypt": True}, "needs signing.keys"),
        ({"keys": "k", "key": "a"}, "absolute path"),
        ({"keys": HEX, "key": "a"}, "is a key itself"),
        ({"keys": "/k", "key": HEX}, "is a key itself"),
        ({"keys": "/k", "key": BASE64}, "is a key itself"),
        ({"keys": "/k", "key": HEX[:40]}, "pattern"),
        ({"keys": "/k", "key": "a", "unsigned": HEX}, "'refuse' or 'accept'"),
        ({"keys": "/k", "key": "a", HEX: 1}, "unknown key"),
    ],
)
def test_settings_that_cannot_work(signing: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"payloads": "file:///x", "signing": signing}, {})
    assert why in str(caught.value)
    if HEX not in signing:  # the name of a setting is quoted, as it must be
        assert HEX not in str(caught.value) and BASE64 not in str(caught.value)
        assert HEX[:40] not in str(caught.value)


def test_an_id_that_yaml_takes_for_a_date_or_a_number(tmp_path: Path) -> None:
    for written, name in (("2026-11-22", "2026-11-22"), ("2026", "2026")):
        (tmp_path / "s.yaml").write_text(f"payloads: file:///x\nsigning: {{keys: /k, key: {written}}}\n")
        assert load_settings({"settings": str(tmp_path / "s.yaml")}, {}).signing.key == name


def test_a_store_does_not_open_without_its_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"signing\.keys"):
        open_store(settings(tmp_path / "nowhere"))
    (tmp_path / "a").write_text(HEX)
    made = settings(tmp_path, encrypt=True)
    with open_store(made) as store:
        assert store.backends.keyring.encrypts
        for text in (repr(store.backends), repr(made), str(made), made.model_dump_json(), describe(made)):
            assert HEX not in text and BASE64 not in text and repr(KEY) not in text
    assert describe(made).endswith(", signed and encrypted with key a (unsigned: refuse)")
