"""The documentation: the site builds, links lead somewhere, and what pages name exists."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from kvstore.build import load_settings, open_store
from kvstore.cli.app import app
from kvstore.errors import ConfigError
from kvstore.format.segment import Slot
from kvstore.index.port import Outcome
from kvstore.keys import block_key, digests, new_segment_id
from kvstore.rules.hashing import DEFAULT_SEED, block_hashes, root_digest
from schemas.namespace import GroupSpec, Namespace
from schemas.settings import Settings
from tests import markdown
from tools import site

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md")])
#: Generated from the commands, synopses and all, and compared with them in tests/reference/test_commands.py.
REFERENCE = ROOT / "docs" / "cache-admin.md"
#: What looks like a metric and is none: keys of ec_transfer_params, and what a wheel is called.
NO_METRICS = {"kvstore_namespace", "kvstore_item", "kvstore_vllm"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# ---- links ----------------------------------------------------------------------------------------


@cache
def anchors_of(path: Path) -> set[str]:
    return markdown.anchors(path.read_text(encoding="utf-8"))


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    found = []
    for link in markdown.links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if target and not (file.is_relative_to(ROOT) and file.exists()):
            found.append(link)
        elif anchor and file.suffix == ".md":
            known = anchors_of(file) if target else markdown.anchors(text)
            found += [] if anchor in known else [link]
    return found


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    text = "# A b\n[x](nothing.md) [y](#a-b) [z](#b) `[no](link.md)`\n"
    text += "[w](production.md#redis) [v](production.md#rd)\n"
    assert broken_links(ROOT / "docs" / "x.md", text) == ["nothing.md", "#b", "production.md#rd"]


# ---- commands -------------------------------------------------------------------------------------


def commands(block: str) -> Iterator[list[str]]:
    """The arguments of every cache-admin in a block of shell."""
    for line in block.replace("\\\n", " ").splitlines():
        # A digit before > is a file descriptor's.
        line = re.sub(r" \d(?=>)", " ", line)
        for found in re.findall(
            r"(?:^|[\s(])cache-admin(?= |$)((?:'[^']*'|\"[^\"]*\"|[^|;&<>)#'\"])*)", line
        ):
            yield shlex.split(found)


@cache
def _root() -> Any:
    return typer.main.get_command(app)


def refused(arguments: list[str], *, whole: bool = True) -> str | None:
    """Why the command line doesn't parse; None if it does. Not `whole`: arguments may be missing."""
    command, context = _root(), None
    try:
        while True:
            context = command.make_context(command.name, list(arguments), parent=context)
            rest = [*getattr(context, "_protected_args", ()), *context.args]
            if not hasattr(command, "commands") or not rest:
                return None
            _, command, arguments = command.resolve_command(context, rest)
    except Exception as exc:
        # By name: which click it is that raises them is typer's own business.
        kinds = {kind.__name__ for kind in type(exc).__mro__}
        if kinds & {"Exit", "NoArgsIsHelpError"} or (not whole and "MissingParameter" in kinds):
            return None
        if "ClickException" not in kinds:
            raise
        return str(exc.format_message())  # type: ignore[attr-defined]


def wrong_commands(text: str) -> list[str]:
    lines = [(one, True) for block in markdown.blocks(text) for one in commands(block)]
    for code in markdown.inline_code(text):
        if code.startswith("cache-admin ") and "[" not in code:
            lines += [(one, False) for one in commands(code)]
    return [f"{' '.join(one)}: {why}" for one, whole in lines if (why := refused(one, whole=whole))]


@each_page
def test_every_command_line_parses(page: Path) -> None:
    if page != REFERENCE:
        assert wrong_commands(page.read_text(encoding="utf-8")) == []


def test_a_command_line_that_does_not_parse_is_noticed() -> None:
    text = "`cache-admin fsck --nothing` `cache-admin namespaces diff`\n\n```sh\ncache-admin stauts | jq .\n"
    text += 'eval "x $(cache-admin vllm-config --ceci)"\n'
    text += "cache-admin namespaces diff a\ncache-admin status 2>&1 #\ncache-admin ls --limit 1 | cat\n```\n"
    text += "\n    cache-admin ls --wrong\n"
    assert [line.split(":")[0] for line in wrong_commands(text)] == [
        "stauts", "vllm-config --ceci", "namespaces diff a", "ls --wrong", "fsck --nothing",
    ]  # fmt: skip


# ---- settings -------------------------------------------------------------------------------------


def models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for one in get_args(annotation) for model in models(one)]


def is_setting(path: list[str], model: type[BaseModel] = Settings) -> bool:
    field = model.model_fields.get(path[0])
    if field is None or len(path) == 1:
        return field is not None
    return any(is_setting(path[1:], inner) for inner in models(field.annotation))


@cache
def chart() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "helm" / "values.yaml").read_text(encoding="utf-8")))


def is_chart_value(path: list[str]) -> bool:
    """Whether the chart's values have such a key. What they leave open, users may fill."""
    here: Any = chart()
    for name in path:
        if here in ({}, None):
            return True
        if not isinstance(here, dict) or name not in here:
            return False
        here = here[name]
    return True


def wrong_settings(text: str) -> list[str]:
    """Dotted names in code that begin as a setting does and are none, nor a value of the chart."""
    found = []
    for code in markdown.inline_code(text):
        match = re.fullmatch(r"([a-z][a-z0-9_]*(?:\.[a-zA-Z][a-zA-Z0-9_]*)+)(?:\.\*| *[:=].*)?", code)
        if not match or match[1].endswith((".py", ".md", ".yaml", ".json", ".lua", ".sqlite")):
            continue
        path = match[1].split(".")
        if path[0] in Settings.model_fields and not is_setting(path) and not is_chart_value(path):
            found.append(code)
    return found


def wrong_trees(text: str) -> list[str]:
    """Settings files and connectors' configs on a page that would be refused."""
    found = []
    for tree in [*_files(text), *_extra_configs(text)]:
        try:
            load_settings(tree, environ={})
        except ConfigError as exc:
            found.append(str(exc))
    return found


def _files(text: str) -> Iterator[dict[str, Any]]:
    for fence in markdown.fences(text):
        if fence.language != "yaml" or "---" in fence.text or "{{" in fence.text:
            continue  # manifests and templates
        tree = yaml.safe_load(fence.text)
        if isinstance(tree, dict) and (payloads := tree.get("payloads")):
            if isinstance(payloads, str) or "fast" in payloads:
                yield tree


def _extra_configs(text: str) -> Iterator[dict[str, Any]]:
    for fence in markdown.fences(text):
        for quoted in re.findall(r"-transfer-config '(\{[^']*\})'", fence.text):
            if "…" in quoted:
                continue
            extra = (
                json.loads(quoted).get("kv_connector_extra_config")
                or json.loads(quoted)["ec_connector_extra_config"]
            )
            for tier in extra.get("secondary_tiers", [extra]):
                yield {key: value for key, value in tier.items() if key not in ("type", "module_path")}


def wrong_variables(text: str) -> list[str]:
    return sorted(
        name
        for name in set(re.findall(r"\bKVSTORE_[A-Z0-9_]*[A-Z0-9]\b", text))
        if not is_setting(name.removeprefix("KVSTORE_").lower().split("__"))
        and name not in variables_of_the_code()
    )


@cache
def variables_of_the_code() -> set[str]:
    folders = ("kvstore", "connectors", "tools", "helm", "docker")
    files = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".sh", ".tpl")
    ]
    files += [ROOT / "Dockerfile", ROOT / "Makefile"]
    texts = (file.read_text(encoding="utf-8") for file in files if file.exists())
    return {name for text in texts for name in re.findall(r"\bKVSTORE_[A-Z_]+\b", text)}


@each_page
def test_every_setting_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert wrong_settings(text) == []
    assert wrong_trees(text) == []
    assert wrong_variables(text) == []


def test_a_setting_that_does_not_exist_is_noticed() -> None:
    assert wrong_settings(
        "`kv.nothing` `redis.builtIn.enabled` `segment.*` `s3.addressing_style: path` `payloads.fast`"
    ) == ["kv.nothing"]
    assert wrong_settings("`s3.client: boto3` `journal.event`") == ["s3.client: boto3", "journal.event"]
    assert wrong_variables("KVSTORE_KV__HANDOFF KVSTORE_KV__HANDOF KVSTORE_SETTINGS KVSTORE_<KEY>") == [
        "KVSTORE_KV__HANDOF"
    ]
    assert wrong_trees("```yaml\npayloads: file:///x\ncapacity: 1GiB\n```\n")
    assert wrong_trees("""```sh
vllm serve M --kv-transfer-config '{"kv_connector_extra_config": {"payloads": "s3://b/p", "inde": "redis://r"}}'
```
""")


# ---- metrics --------------------------------------------------------------------------------------

_METRIC = r"(?:vllm:kvstore_|(?<![\w:/.-])kvstore_)[a-z0-9_]++"


@cache
def metrics() -> set[str]:
    """The names in the tables of metrics, which other tests compare with what is exported."""
    names = set()
    for page in ("metrics.md", "tier.md", "router-feed.md", "regions.md"):
        for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("|"):
                names |= set(re.findall(f"`({_METRIC})`", line.split("|")[1]))
    return names


def wrong_metrics(text: str) -> list[str]:
    code = "\n".join([*(fence.text for fence in markdown.fences(text)), *markdown.inline_code(text)])
    found = set()
    for name in set(re.findall(_METRIC + r"(?![*(])", code)) - NO_METRICS:
        stem = re.sub(r"_(bucket|sum|count)$", "", name)
        begins = name.endswith("_") and any(metric.startswith(name) for metric in metrics())
        if not {name, stem, f"{name}_total"} & metrics() and not begins:
            found.add(name)
    return sorted(found)


@each_page
def test_every_metric_exists(page: Path) -> None:
    assert wrong_metrics(page.read_text(encoding="utf-8")) == []


def test_every_metric_of_the_connectors_is_named_in_their_code() -> None:
    files = (ROOT / "connectors").glob("*/metrics.py")
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    engines = {name for name in metrics() if name.startswith("vllm:")}
    assert len(engines) > 40
    for name in engines:
        stem = re.sub(r"^vllm:kvstore_(kv|ec|tier)_|_total$", "", name)
        assert f'"{stem}"' in code or f'"{name.removesuffix("_total")}"' in code or f"_{stem}" in code, name


def test_a_metric_that_does_not_exist_is_noticed() -> None:
    text = "`kvstore_up` `vllm:kvstore_kv_match_seconds_bucket` `vllm:kvstore_ec_*` `kvstore_upp`\n"
    text += "```promql\nrate(vllm:kvstore_kv_lodes_total[5m]) / kvstore_evictions_total\n```\n"
    assert wrong_metrics(text) == ["kvstore_upp", "vllm:kvstore_kv_lodes_total"]


# ---- what security.md says of Redis ---------------------------------------------------------------


def test_the_users_of_redis_are_those_of_the_chart() -> None:
    chart_text = (ROOT / "helm" / "templates" / "redis" / "_conf.tpl").read_text(encoding="utf-8")
    looks, changes = (
        re.findall(r'"([^"]+)"', re.search(rf"\${name} := list (.*?) -?}}}}", chart_text)[1])  # type: ignore[index]
        for name in ("looks", "changes")
    )
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    for user, allowed in (("kvstore", [*looks, *changes]), ("kvstore-reader", looks)):
        rule = re.search(rf"^user {user} on >PASSWORD (.*)$", page, re.MULTILINE)
        assert rule, user
        assert rule[1].split() == ["~kvs:*", "-@all", *(f"+{command}" for command in allowed)], user


# ---- the quickstart -------------------------------------------------------------------------------


def stored(folder: Path, prompt: list[int]) -> None:
    """What the quickstart's first engine leaves there, of smaller blocks."""
    group = GroupSpec(kind="full", block_tokens=32, dtype="F32", shape=(1, 1, 32, 2))
    namespace = Namespace(
        kind="kv", model="text-0", weights="w", dtype="float32", block_tokens=32, hash_algo="sha256",
        hash_root=root_digest(DEFAULT_SEED), kv_dtype="auto", page_order="LHNC", groups=(group,),
    )  # fmt: skip
    hashes = block_hashes(prompt, algorithm="sha256", block_tokens=32)
    with open_store({"payloads": f"file://{folder}"}) as store:
        space = store.open(namespace, block_bytes=256)
        space.register()
        slots = [Slot(block_key(one, 0), memoryview(bytes(256)), "F32", (1, 1, 32, 2)) for one in hashes]
        assert space.save(slots, depth=0, segment=new_segment_id()).stored == 46
        assert space.tell([Outcome(time.time(), "cmpl-1", "match", 46, 0, "absent", 0, digests(hashes))])


def test_the_quickstart_prints_what_it_says(tmp_path: Path) -> None:
    """The commands of its first sections, on such a store: every line shown begins as one that is printed."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    page = page.partition("### 4.")[0].replace("/tmp/kvstore-quickstart", str(tmp_path))
    prompt = random.Random(1).choices(range(16, 1024), k=1500)
    (tmp_path / "prompt.json").write_text(json.dumps(prompt))
    (tmp_path / "salt.txt").write_text("someone-else")
    stored(tmp_path / "cache", prompt)
    environ = {"KVSTORE_PAYLOADS": f"file://{tmp_path}/cache", "COLUMNS": "200"}
    ran = 0
    for block, shown in pairwise(markdown.fences(page)):
        lines = [line for line in block.text.splitlines() if not line.startswith(("export ", "printf "))]
        if (
            block.language != "sh"
            or not all(line.startswith("cache-admin ") for line in lines)
            or "serve" in block.text
        ):
            continue
        printed = ""
        for line in lines:
            words = shlex.split(re.sub(r"(prompt\.json|salt\.txt)", rf"{tmp_path}/\1", line))[1:]
            result = CliRunner().invoke(app, words, env=environ)
            assert result.exit_code == 0, (line, result.output)
            printed += result.stdout
            ran += 1
        if shown.language == "text":
            for line in shown.text.replace("...\n", "").splitlines():
                label = re.split(r"  +|\d", line.strip())[0]
                assert not label or re.search(rf"^ *{re.escape(label)}", printed, re.MULTILINE), (
                    line,
                    printed,
                )
    assert ran >= 8


# ---- the site -------------------------------------------------------------------------------------


class Loaded(HTMLParser):
    """What a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "object", "embed"):
            self.urls += [url for url in (given.get("src"), given.get("data")) if url]
        if tag == "link" and given.get("rel") not in ("prev", "next", "canonical", "edit"):
            self.urls.append(given.get("href") or "")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, strictly built, with links to code. (With --quiet MkDocs doesn't count its warnings.)"""
    folder = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "DOCS_REPO_URL": "https://code.example/kvstore"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(built: Path) -> None:
    pages = list(built.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert [url for url in loaded.urls if re.match(r"(https?:)?//", url)] == [], page
    for style in built.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_search_finds_every_page(built: Path) -> None:
    index = json.loads((built / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"production/", "security/", "cache-admin/", "chart/", "changelog/", "adr/0015-codecs/"} <= found


def test_code_is_linked_to_where_it_is_and_charts_are_no_pages(built: Path) -> None:
    page = (built / "contributing" / "index.html").read_text(encoding="utf-8")
    assert 'href="https://code.example/kvstore/blob/main/kvstore/index/port.py"' in page
    assert "../kvstore/index/port.py" not in page
    for file in built.rglob("*.html"):
        left = re.findall(
            r'href="(?!https?:)[^"]*\.(?:py|tpl|yaml|lua|sh)"', file.read_text(encoding="utf-8")
        )
        assert not left, (file, left)
    assert not [file for file in (built / "kubernetes").rglob("*") if file.suffix in (".yaml", ".tpl")]


def test_links_of_the_site() -> None:
    def made(
        target: str, text: str = "text", source: str = "docs/a/b.md", base: str = "https://h/r"
    ) -> str | None:
        page = site.ELSEWHERE.get(source, source.removeprefix("docs/"))
        pages = {"a/b.md", "pd.md", "chart.md", "changelog.md"}
        return site.relinked(target, text, source=source, page=page, pages=pages, base=base)

    assert made("https://elsewhere/x") is None and made("#here") is None and made("nothing.md") is None
    assert made("../pd.md#in-the-handle") == "[text](../pd.md#in-the-handle)"
    assert made("../../helm/README.md") == "[text](../chart.md)"
    assert made("docs/pd.md", source="CHANGELOG.md") == "[text](pd.md)"
    assert made("../docs/pd.md", source="helm/README.md") == "[text](pd.md)"
    assert made("../../kvstore/index/port.py#L3") == "[text](https://h/r/kvstore/index/port.py#L3)"
    assert made("../../kvstore/index/port.py", base="") == "text (`kvstore/index/port.py`)"
    assert made("../../kvstore/keys.py", "`kvstore/keys.py`", base="") == "`kvstore/keys.py`"


def test_lists_and_code_of_the_site() -> None:
    def made(text: str) -> str:
        return "\n".join(site._lines(text, lambda target, words: f"<{words}>"))

    assert made("Either\n- [a](x)\n- b\n") == "Either\n\n- <a>\n- b\n"
    assert made("```sh\nword\n- [c](x)\n```\n\n    - [d](x)\n\n[e](x)") == (
        "```sh\nword\n- [c](x)\n```\n\n    - [d](x)\n\n<e>"
    )
    assert made("`[e](x)` [`f`](x)") == "`[e](x)` <`f`>"
    listed = "1. a\n\n    ```sh\n    [c](x)\n    ```\n\n    [d](x)\n\nText\n\n    [code](x)\n"
    assert made(listed) == listed.replace("[d](x)", "<d>")
