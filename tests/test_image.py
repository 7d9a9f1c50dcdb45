"""The image: what its Dockerfile says, what reaches the builder, what is pinned, its health check at work.

Nothing is built here; CI builds it, starts it read-only and waits until its health check is content.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner

from kvstore.cli.app import app
from tests.admin.serve.process import ServeProcess

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "Dockerfile"
#: What the image runs, for the markers of requirements.
PLATFORM = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "sys_platform": "linux",
    "extra": "cli",
}
SECRET = re.compile(r"(?i)pass|secret|token|credential|key|auth|login")


def instructions() -> list[tuple[str, str]]:
    """What the Dockerfile tells, in order, on one line each: ("RUN", "pip install ...")."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text())
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def told(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def pins(name: str) -> dict[str, tuple[str, int]]:
    """Package -> its version and how many hashes there are of it."""
    found: dict[str, tuple[str, int]] = {}
    package = ""
    for line in (ROOT / "docker" / name).read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==(\S+) \\$", line):
            package = canonicalize_name(match[1])
            assert package not in found
            found[package] = match[2], 0
        elif re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}(?: \\)?", line):
            found[package] = found[package][0], found[package][1] + 1
        else:
            assert line.startswith("#"), f"neither a pin nor a hash: {line}"
    return found


# Dockerfile


def test_hadolint_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    assert hadolint, "no hadolint: install the dev extra"
    ran = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_the_base_is_pinned_by_digest() -> None:
    stages: set[str] = set()
    for rest in told("FROM"):
        image, _, stage = rest.partition(" AS ")
        assert image in stages or re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), rest
        stages.add(stage)
    (version,) = re.findall(r"python:(\d+\.\d+)-", "\n".join(told("FROM")))
    assert version == PLATFORM["python_version"]
    assert f"--python-version {version} " in (ROOT / "docker" / "lock.sh").read_text()


def test_it_runs_as_nobody_in_particular() -> None:
    user = told("USER")[-1]
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user), "Kubernetes' runAsNonRoot wants a number"
    last = [name for name, _ in instructions()]
    assert "RUN" not in last[last.index("USER") :]
    assert not {"ADD", "ONBUILD", "VOLUME", "SHELL"} & set(last)


def test_signals_reach_the_process() -> None:
    assert told("ENTRYPOINT") == ['["cache-admin"]']
    assert json.loads(told("CMD")[-1]) == ["serve", "--listen", "0.0.0.0:9464"]
    assert told("STOPSIGNAL") == ["SIGTERM"]
    assert told("EXPOSE") == ["9464"]


def test_no_secret_has_a_place_in_a_layer() -> None:
    names = [rest.partition("=")[0] for rest in told("ARG")]
    names += [name for rest in told("ENV") for name in re.findall(r"(\w+)=", rest)]
    assert {"VERSION", "REVISION", "HOME", "PATH"} <= set(names)
    assert [name for name in names if SECRET.search(name)] == []
    assert "--mount=type=secret" not in DOCKERFILE.read_text()


def test_nothing_is_installed_that_is_not_pinned_by_hash() -> None:
    for rest in told("RUN"):
        for command in re.split(r"&&|;", rest):
            if re.search(r"\bpip\b.* (install|download|wheel)\b", command):
                assert "--require-hashes" in command or "--no-index" in command, command
                assert "--no-deps" in command, command
            assert not re.search(r"\b(curl|wget|apt-get|uv)\b", command), command


def test_labels_say_what_it_is() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', " ".join(told("LABEL"))))
    assert labels["version"] == "${VERSION}"
    assert labels["revision"] == "${REVISION}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (labels["title"], labels["description"]) == ("kvstore", project["description"])
    assert labels["licenses"] == project["license"]


# What reaches the builder


def sent(path: str) -> bool:
    """Whether .dockerignore lets this file through: of the lines that fit it or a folder of it, the last."""
    through = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keep, pattern = pattern.startswith("!"), pattern.removeprefix("!")
        anywhere, pattern = pattern.startswith("**/"), pattern.removeprefix("**/")
        expression = re.escape(pattern).replace(r"\*", "[^/]*")
        if re.match(f"{'(?:.*/)?' if anywhere else ''}{expression}(?:/|$)", path):
            through = keep
    return through


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "kvstore", "connectors", "schemas"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert len(tracked) > 100
    assert [path for path in tracked if not sent(path)] == []
    copied: set[str] = set()
    for rest in told("COPY"):
        *sources, _ = rest.split()
        if rest.startswith("--from="):
            continue
        assert not rest.startswith("--")
        copied |= set(sources)
        for source in sources:
            assert (ROOT / source).exists()
            assert sent(source) or (ROOT / source).is_dir(), source
    assert {"pyproject.toml", "README.md", "LICENSE", "kvstore", "connectors", "schemas"} <= copied
    assert "." not in copied


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".env",
        ".venv/bin/python",
        ".cache/x",
        "settings.yaml",
        "kvstore_vllm.egg-info/PKG-INFO",
        "tests/conftest.py",
        "helm/values.yaml",
        "shared/design.md",
        "build/lib/kvstore/store/store.py",
        "docker/secret.txt",
        "id_rsa",
        "kvstore/.env",
        "schemas/__pycache__/urls.cpython-312.pyc",
        "kvstore/index/.aws/credentials",
    ],
)
def test_what_must_not_reach_the_builder(path: str) -> None:
    assert not sent(path)


# Pins


def test_the_locks_satisfy_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["cli"]
    locked = pins("requirements.lock")
    for text in wanted:
        one = Requirement(text)
        assert one.specifier.contains(locked[canonicalize_name(one.name)][0]), f"{text}: run docker/lock.sh"
    (build,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert Requirement(build).specifier.contains(pins("build.lock")["setuptools"][0])


@pytest.mark.parametrize("name", ["requirements.lock", "wheels.lock", "build.lock"])
def test_a_lock_names_hashes_and_no_place(name: str) -> None:
    text = (ROOT / "docker" / name).read_text()
    assert "://" not in text
    assert "index" not in text.lower()
    for package, (version, hashes) in pins(name).items():
        Version(version)
        assert hashes >= 1, package


def test_what_the_locks_hold_needs_nothing_else() -> None:
    """It is installed without dependencies. What they are is read from what is installed here."""
    for name, there in [
        ("requirements.lock", set()),
        ("wheels.lock", {"blake3", "numpy", "pydantic", "pydantic-core", "pyyaml"}),
    ]:
        locked = set(pins(name))
        assert not locked & there
        for package in locked:
            for text in metadata.requires(package) or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate(PLATFORM | {"extra": ""}):
                    assert canonicalize_name(needed.name) in locked | there, f"{package} needs {text}"


def test_the_wheels_for_vllm_are_those_of_the_image() -> None:
    image = pins("requirements.lock")
    assert set(pins("wheels.lock").items()) <= set(image.items())


# Health


@pytest.mark.servers
@pytest.mark.slow
def test_the_health_check_tells_a_server_that_is_ready_from_one_that_is_not(tmp_path: Path) -> None:
    (check,) = told("HEALTHCHECK")
    program, *words = json.loads(check[check.index("[") :])
    assert program == "cache-admin"
    # By itself it asks the port that the image's server listens at.
    assert "--listen" not in words

    def code(url: str) -> int:
        address = url.removeprefix("http://").rstrip("/")
        return CliRunner().invoke(app, [*words, "--listen", address]).exit_code

    with ServeProcess(tmp_path, ["--payloads", f"file://{tmp_path / 'cache'}"]) as serve:
        serve.until(lambda: serve.get("/readyz")[0] == 200)
        assert code(serve.url) == 0
        assert serve.end(signal.SIGTERM) == 0
        assert code(serve.url) == 5
    with HTTPServer(("127.0.0.1", 0), Unready) as unready:
        threading.Thread(target=unready.handle_request, daemon=True).start()
        assert code(f"http://127.0.0.1:{unready.server_port}/") == 5


class Unready(BaseHTTPRequestHandler):
    """As serve answers while the index does not answer it."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b"no answer from index")

    def log_message(self, *_: object) -> None:
        pass
