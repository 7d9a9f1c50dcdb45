"""`cache-admin` and the documents, with a bucket at AWS (tests/servers/s3/aws.py): its URL names no endpoint.

Every s3:// URL, settings file, connector's config and command line of the documents that names none is found
and used as it stands. Where a text names a Redis, the environment puts another one in its place.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from kvstore.admin.archive.place import writable
from kvstore.build import load_settings, open_object, open_payloads
from tests import markdown
from tests.admin.archive.test_pack import Packed
from tests.admin.conftest import Admin
from tests.admin.serve.process import ServeProcess
from tests.helm.chart import render, run
from tests.servers.redis import RedisServer
from tests.servers.s3.aws import PATIENT_ENVIRON, Aws
from tests.test_docs_site import _extra_configs, _files, commands
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("README.md", "docs/**/*.md", "helm/*.md", "helm/values.yaml", "helm/ci/*.yaml")
    for page in ROOT.glob(pattern)
)
#: Of a tool whose own store is elsewhere.
ANY = load_settings({"payloads": "file:///nowhere"}, PATIENT_ENVIRON)
URL = re.compile(r"s3://[A-Za-z0-9][^\s'\"`|,;})>\]]*")


def at_aws(url: str) -> bool:
    return url.startswith("s3://") and "endpoint=" not in url


@cache
def urls() -> tuple[tuple[str, str], ...]:
    """Every URL at AWS of the documents, with the page that names it first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for url in URL.findall(page.read_text(encoding="utf-8")):
            if at_aws(url := url.rstrip(".:")) and "%s" not in url:
                found.setdefault(url, page.relative_to(ROOT).as_posix())
    return tuple((page, url) for url, page in found.items())


@cache
def trees() -> tuple[tuple[str, str], ...]:
    """Every settings file and connector's config whose bucket is at AWS, as JSON, with its page."""
    found = []
    for page in PAGES:
        if page.suffix == ".md":
            text = page.read_text(encoding="utf-8")
            for tree in [*_files(text), *_extra_configs(text)]:
                payloads = tree.get("payloads", "")
                if at_aws(payloads if isinstance(payloads, str) else payloads["slow"]):
                    found.append((page.relative_to(ROOT).as_posix(), json.dumps(tree, sort_keys=True)))
    return tuple(sorted(set(found)))


@cache
def lines() -> tuple[tuple[str, ...], ...]:
    """Every command line that names a URL at AWS."""
    found = {
        tuple(words)
        for page in PAGES
        if page.suffix == ".md"
        for text in [page.read_text(encoding="utf-8")]
        for block in [*markdown.blocks(text), *markdown.inline_code(text)]
        for words in commands(block)
        if any(at_aws(word) for word in words)
    }
    return tuple(sorted(found))


@cache
def installs() -> tuple[tuple[str, ...], ...]:
    """The --set of every `helm install` with a bucket at AWS, and every file of values with one."""
    found: set[tuple[str, ...]] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^helm install (.*payloads\.s3\.bucket.*)$", text, re.MULTILINE):
            if "s3.endpoint" not in line:
                given = re.findall(r"--set (?:'([^']+)'|(\S+))", line)
                found.add(tuple(word for pair in given for word in ("--set", pair[0] or pair[1])))
    for file in (ROOT / "helm" / "ci").glob("*.yaml"):
        if re.search(r"^ +bucket:", text := file.read_text(encoding="utf-8"), re.MULTILINE):
            if not re.search(r"^ +endpoint: .*https?:", text, re.MULTILINE):
                found.add(("-f", str(file.relative_to(ROOT))))
    return tuple(sorted(found))


def test_what_is_found_is_not_nothing() -> None:
    """A floor, so that a search that breaks is noticed."""
    assert "s3://my-bucket/kvstore?region=eu-central-1" in {url for _, url in urls()}
    assert len(trees()) >= 6
    assert {words[0] for words in lines()} >= {"vllm-config", "import"}
    assert ("--set", "payloads.s3.bucket=my-bucket", "--set", "payloads.s3.region=eu-central-1") in installs()


@pytest.fixture
def network(moto_aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """AWS, and a key for it in the environment."""
    for name, value in moto_aws.user().environ.items():
        monkeypatch.setenv(name, value)
    return moto_aws


def made(aws: Aws, url: str) -> str:
    """Makes the bucket of a URL, in the region that it says. Returns the URL, its placeholders filled in."""
    url = url.replace("BUCKET", "my-bucket").replace("region=NAME", "region=us-west-2")
    parts = urlsplit(url)
    region = parse_qs(parts.query).get("region", ["us-east-1"])[0]
    aws.make(parts.netloc, region)
    return url


@pytest.mark.parametrize(("page", "url"), urls())
def test_every_url_of_the_documents_is_reached(page: str, url: str, network: Aws) -> None:
    url = made(network, url)
    if url.partition("?")[0].endswith(".tar"):
        size, payloads = open_object(url, ANY)
        with payloads:
            assert size() is None
            payloads.put("", [memoryview(b"abc")])
            assert size() == 3
    else:
        with open_payloads(
            load_settings({"payloads": url, "index": "redis://redis:6379/0"}, PATIENT_ENVIRON)
        ) as payloads:
            payloads.ping()
    assert network.seen


@pytest.mark.parametrize(("page", "text"), trees())
def test_every_config_of_the_documents_reaches_its_bucket(page: str, text: str, network: Aws) -> None:
    tree: dict[str, Any] = json.loads(text)
    payloads = tree["payloads"]
    if isinstance(payloads, str):
        tree["payloads"] = made(network, payloads)
    else:
        tree["payloads"] = payloads | {"slow": made(network, payloads["slow"])}
    with open_payloads(load_settings(tree, PATIENT_ENVIRON)) as opened:
        opened.ping()
    assert network.seen


@pytest.mark.parametrize("words", lines(), ids=" ".join)
def test_every_command_line_of_the_documents_runs(
    words: tuple[str, ...], network: Aws, admin: Admin, tmp_path: Path
) -> None:
    for word in words:
        if at_aws(word):
            made(network, word)
    if words[0] == "vllm-config":
        ran = admin(*words, "--json")
        assert ran.code == 0, ran.err
        flag = ran.json["kv_transfer_config"] or ran.json["ec_transfer_config"]
        tree = flag.get("kv_connector_extra_config") or flag["ec_connector_extra_config"]
        with open_payloads(load_settings(tree, PATIENT_ENVIRON)) as opened:
            opened.ping()
    elif words[0] == "export":
        # All but the engine: what is asked before it, and the upload.
        with writable(words[words.index("--to") + 1], ANY, overwrite=False) as path:
            path.write_bytes(b"abc")
    elif words[0] == "import":
        of = Packed(tmp_path)
        where = next(word for word in words if at_aws(word))
        with writable(where, ANY, overwrite=False) as path:
            path.write_bytes(of.made().read_bytes())
        # The weights and the namespace of a document are not those of this one.
        given = words[: words.index(where) + 1]
        ran = admin(*given, env={"KVSTORE_PAYLOADS": f"file://{tmp_path}/target"} | PATIENT_ENVIRON)
        assert ran.code == 0, ran.err
        assert of.pack.stat().st_size and tarfile.is_tarfile(of.pack)
    else:
        raise AssertionError(f"say here how `cache-admin {' '.join(words)}` is run")
    assert network.seen


# ---- a store at AWS -------------------------------------------------------------------------------------


EUROPE = "s3://my-bucket/kvstore?region=eu-central-1"


@pytest.fixture
def store(aws: Aws, admin: Admin, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options of a store at AWS in Europe, over a real S3 server, and a user's key in the environment."""
    aws.make("my-bucket", "eu-central-1")
    # After `admin`, which takes the variables of this machine away.
    for name, value in (aws.user().environ | PATIENT_ENVIRON).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("kvstore.build.PROBE_S", PATIENCE_S)
    return ["--index", redis_server.url, "--payloads", EUROPE]


def test_the_doctor_finds_it_well(store: list[str], admin: Admin) -> None:
    ran = admin("doctor", *store, "--json")
    states = {check["name"]: check["state"] for check in ran.json["checks"]}
    # On a busy machine the index answers late, which is a warning.
    assert (ran.code, states["payloads"]) == (0, "ok") and states["index"] in ("ok", "warning"), ran.out


def test_status_is_told(store: list[str], admin: Admin) -> None:
    ran = admin("status", *store)
    assert ran.code == 0, ran.err


def test_serve_is_ready(store: list[str], tmp_path: Path) -> None:
    with ServeProcess(tmp_path, store, PATIENT_ENVIRON) as serve:
        serve.until(lambda: serve.get("/readyz")[0] == 200)


def test_the_doctor_names_the_region_and_no_permission(
    store: list[str], aws: Aws, admin: Admin, tmp_path: Path
) -> None:
    index = ["--index", store[1]]
    ran = admin("doctor", *index, "--payloads", "s3://my-bucket/kvstore", "--json")
    (check,) = [each for each in ran.json["checks"] if each["name"] == "payloads"]
    assert "the bucket is in region eu-central-1" in check["found"]
    assert check["advice"] == "add ?region=eu-central-1 to payloads: bucket my-bucket is there"


# ---- the chart ------------------------------------------------------------------------------------------


def _manifests(words: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    import yaml

    done = run("template", "kvstore", str(ROOT / "helm"), "--namespace", "inference", *words)
    assert done.returncode == 0, done.stderr
    yield from (each for each in yaml.safe_load_all(done.stdout) if each)


def _settings_of(manifests: list[dict[str, Any]], folder: Path) -> tuple[Path, Mapping[str, Any]]:
    import yaml

    (text,) = [
        each["data"]["settings.yaml"]
        for each in manifests
        if each["kind"] == "ConfigMap"
        and "settings.yaml" in each["data"]
        and not each["metadata"]["name"].endswith("-vllm")
    ]
    file = folder / "settings.yaml"
    file.write_text(text)
    return file, yaml.safe_load(text)


@pytest.mark.slow
@pytest.mark.parametrize("words", installs(), ids=" ".join)
def test_every_chart_of_the_documents_reaches_its_bucket(
    words: tuple[str, ...], network: Aws, tmp_path: Path
) -> None:
    whole = tuple(str(ROOT / word) if word.startswith("helm/") else word for word in words)
    file, tree = _settings_of(list(_manifests(whole)), tmp_path)
    payloads = tree["payloads"]
    made(network, payloads if isinstance(payloads, str) else payloads["slow"])
    settings = load_settings({"settings": str(file)}, PATIENT_ENVIRON)
    settings = settings.model_copy(update={"s3": settings.s3.model_copy(update={"sse_kms_key_id": None})})
    with open_payloads(settings) as opened:
        opened.ping()
    assert network.seen


@pytest.mark.slow
def test_the_charts_janitor_is_ready_and_its_test_passes(
    store: list[str], aws: Aws, admin: Admin, tmp_path: Path
) -> None:
    """The commands of README's `helm install`, with the rendered settings; Redis is the test's."""
    manifests = render({"payloads": {"s3": {"bucket": "my-bucket", "region": "eu-central-1"}}})
    file, _ = _settings_of(manifests, tmp_path)
    environ = {"KVSTORE_SETTINGS": str(file), "KVSTORE_INDEX": store[1], "KVSTORE_REDIS__USERNAME": ""}
    environ |= PATIENT_ENVIRON
    (pod,) = [each for each in manifests if each["kind"] == "Pod"]
    (doctor,) = [each for each in pod["spec"]["initContainers"] if each["name"] == "doctor"]
    ran = admin(*doctor["args"], env=environ)
    assert ran.code == 0, ran.out
    (deployment,) = [each for each in manifests if each["kind"] == "Deployment"]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[:3] == ["serve", "--listen", "0.0.0.0:9464"]
    # On a port that is free here.
    with ServeProcess(tmp_path, arguments[3:], environ) as serve:
        serve.until(lambda: serve.get("/readyz")[0] == 200)
