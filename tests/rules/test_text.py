"""Names and sentences of strangers, as logs, terminals and JSON show them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvstore.build import load_settings, open_store
from kvstore.cli.app import app
from kvstore.index.port import Outcome
from kvstore.index.redis.errors import classified
from kvstore.payloads.s3.errors import classify, of_obstore
from kvstore.rules.text import readable
from schemas.namespace import Namespace

#: C0 and C1 controls, overrides and isolates of direction, line ends of other kinds, and DEL.
HOSTILE = "a\x1b[2Jb\x9b31mc\u202ed\u2066e\u2028f\x85g\x7fh"


def steers(text: str) -> str:
    """What of a text a terminal would obey, or a reader would not see."""
    return "".join(letter for letter in text if not letter.isprintable() and letter != "\n")


def test_what_is_readable_is_one_bounded_line() -> None:
    assert readable(HOSTILE) == r"a\x1b[2Jb\x9b31mc\u202ed\u2066e\u2028f\x85g\x7fh"
    assert readable("\ud800 caf\u00e9 \U0001f600") == "\\ud800 caf\u00e9 \U0001f600"
    assert readable("x" * 500) == "x" * 128
    assert readable("a\nb", None, keep="\n") == "a\nb"


#: Verbs that show names, with what they are given; SELF is the namespace.
VERBS = (
    "namespaces", "status", "du", "stats", "top", "ls", "events", "operations", "pin", "quota", "gc", "fsck",
    "rebuild --dry-run", "doctor", "explain --request HOSTILE", "show SELF", "namespaces diff SELF SELF",
    "invalidate SELF", "drop SELF", "erase --tenant HOSTILE", "vllm-config", "serve --once --no-janitor",
)  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A store with a hostile namespace, and a request of such a name; its URL and the namespace's id."""
    url = f"file://{tmp_path_factory.mktemp('hostile')}"
    with open_store(load_settings({"payloads": url}, environ={})) as store:
        namespace = Namespace(
            kind="ec", tenant=HOSTILE, model=f"model {HOSTILE}", weights="w", dtype="float32"
        )
        space = store.open(namespace)
        space.register()
        store.index.tell(space.id, [Outcome(1.0, HOSTILE, "load", 1, 0, "corrupt", 0, bytes(16))])
    return url, space.id


def run(words: str, hostile: tuple[str, str], *more: str) -> str:
    """All that a command says."""
    given = {"HOSTILE": HOSTILE, "SELF": hostile[1]}
    ran = CliRunner().invoke(app, [*(given.get(word, word) for word in words.split()), *more])
    assert not isinstance(ran.exception, Exception), ran.exception
    return ran.output


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("json_too", [False, True])
def test_a_hostile_name_steers_no_terminal(hostile: tuple[str, str], verb: str, json_too: bool) -> None:
    said = run(verb, hostile, "--payloads", hostile[0], *(["--json"] if json_too else []))
    assert said and steers(said) == ""
    if json_too and verb == "namespaces":
        # Whoever reads it as JSON has the names as they are.
        assert HOSTILE in json.dumps(json.loads(said), ensure_ascii=False).replace(
            json.dumps(HOSTILE, ensure_ascii=False)[1:-1], HOSTILE
        )


ARGUMENTS = (
    "show HOSTILE", "evict HOSTILE", "pin HOSTILE", "drop HOSTILE", "invalidate HOSTILE", "ls HOSTILE",
    "HOSTILE", "status --index HOSTILE", "status --settings HOSTILE", "status --HOSTILE", "top HOSTILE",
    "ls --namespace HOSTILE", "quota set HOSTILE 1GiB", "quota set store HOSTILE", "import HOSTILE",
    "explain --digest HOSTILE", "explain --tokens HOSTILE", "erase --salt-file HOSTILE", "export HOSTILE",
    "advise HOSTILE", "feed --once --model HOSTILE", "feed --publish HOSTILE", "feed --hashes HOSTILE",
)  # fmt: skip


@pytest.mark.parametrize("words", ARGUMENTS)
def test_a_hostile_argument_steers_no_terminal(hostile: tuple[str, str], words: str) -> None:
    said = run(words, hostile, "--payloads", hostile[0])
    assert said and steers(said) == ""


@pytest.mark.parametrize(
    "name", ["PAYLOADS", "INDEX", "TENANT", "CODEC", "GRACE_S", "REDIS__USERNAME", "S3__PROFILE", HOSTILE]
)
def test_a_hostile_setting_steers_no_terminal(
    hostile: tuple[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_PAYLOADS", hostile[0])
    monkeypatch.setenv(f"KVSTORE_{name}", HOSTILE)
    for verb in ("status", "doctor", "vllm-config"):
        assert steers(run(verb, hostile)) == ""


def test_a_hostile_servers_sentence_steers_no_log() -> None:
    body = f"status code 403: <Error><Code>AccessDenied</Code><Message>{HOSTILE}</Message></Error>"
    for error in (
        classify("bucket b: list", 403, f"Access{HOSTILE}", HOSTILE * 50),
        of_obstore("bucket b: read", RuntimeError(body)),
        of_obstore("bucket b: read", RuntimeError(f"broke off {HOSTILE}")),
        of_obstore("bucket b: read", RuntimeError("")),
        classified(OSError(HOSTILE), "redis here: match"),
    ):
        assert steers(str(error)) == "" and len(str(error)) < 600, repr(str(error))
