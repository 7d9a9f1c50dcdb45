"""What is in the wheel, and that it works without the tree beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wheel import PACKAGES, ROOT, build_wheel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed: unpacked where nothing else is."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(build_wheel(folder / "wheels")) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run(site: Path, code: str) -> str:
    """What `code` prints where only the installed wheel is found."""
    path = {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", f"import kvstore\nassert kvstore.__file__.startswith({str(site)!r})\n{code}"],
        cwd=site,
        env=os.environ | path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def files_of(folder: Path) -> set[str]:
    found = (path for top in PACKAGES for path in (folder / top).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found if "__pycache__" not in path.parts}


def test_every_file_of_the_packages_is_in_it(site: Path) -> None:
    assert files_of(site) == files_of(ROOT)
    assert {"kvstore/index/scripted/lua/match.lua", "kvstore/admin/serve/page/index.html"} <= files_of(site)


def test_nothing_else_is_in_it(site: Path) -> None:
    others = {path.name for path in site.iterdir()} - set(PACKAGES)
    assert {name.rpartition(".")[2] for name in others} == {"dist-info"}


def test_its_scripts_are_read(site: Path) -> None:
    code = (
        "from kvstore.index.scripted.scripts import Script as S; print(len(S.load('match', 'walk').source))"
    )
    assert int(run(site, code)) > 1000


def test_its_page_is_served(site: Path, tmp_path: Path) -> None:
    code = f"""
from kvstore.admin.backends import Cache
from kvstore.admin.serve.server import Serving
from kvstore.build import load_settings
cache = Cache(load_settings({{"payloads": "file://{tmp_path}"}}))
print(len(Serving(cache)._routes()))"""
    assert int(run(site, code)) > 5


def test_the_public_names_of_the_store(site: Path) -> None:
    code = """
from kvstore.build import load_settings, open_index, open_store
from kvstore.store import Match, Saved, Space, Store
import kvstore.events, kvstore.testing
print(Store.__module__.partition(".")[0])"""
    assert run(site, code) == "kvstore"


def test_connectors_are_named_before_vllm_is_imported(site: Path) -> None:
    code = """
import sys
import connectors.ec, connectors.kv, connectors.plugin, connectors.tier, connectors.v0, connectors.weights
print(*(name for name in ("torch", "vllm") if name in sys.modules))"""
    assert run(site, code) == ""


@pytest.mark.engine
def test_connectors_are_found_by_their_public_names(site: Path) -> None:
    code = """
from connectors.ec import ECStoreConnector
from connectors.kv import KVStoreConnector
from connectors.tier import KVStoreTier
from connectors.v0 import KVStoreConnectorV0
from connectors.weights import NamedWeights
from connectors.plugin import register
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(KVConnectorFactory._registry["KVStoreConnector"]() is KVStoreConnector)"""
    assert run(site, code).endswith("True")


@pytest.mark.engine
def test_what_halves_tell_each_other_is_found_by_a_spawned_process(site: Path) -> None:
    code = """
import multiprocessing
from connectors.ec.messages import ECStoreMetadata
from connectors.kv.messages import KVStoreMetadata
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        print(*pool.map(type, [KVStoreMetadata(), ECStoreMetadata()]))"""
    out = run(site, code)
    assert "KVStoreMetadata" in out and "ECStoreMetadata" in out
