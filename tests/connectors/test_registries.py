"""The plug-in in a vLLM that has its registries elsewhere. Stand-ins for vLLM's packages cost little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: What a vLLM of another version may have where this one has a registry.
ELSEWHERE = {
    "no module": None,
    "no such name": "",
    "another interface": "class KVConnectorFactory: ...\nclass ECConnectorFactory: ...\n",
    "broken": "raise RuntimeError('no such device')\n",
}
REGISTRY = """
class {kind}ConnectorFactory:
    known = []
    @classmethod
    def register_connector(cls, name, module, kind):
        cls.known.append(name)
"""


@pytest.mark.parametrize("how", ELSEWHERE)
@pytest.mark.parametrize("which", ["kv", "ec"])
def test_a_vllm_with_another_registry_starts(which: str, how: str, tmp_path: Path) -> None:
    """As vLLM does it: the plug-in's function is called, and nobody catches what it raises."""
    for kind in ("kv", "ec"):
        folder = tmp_path / "vllm" / "distributed" / f"{kind}_transfer" / f"{kind}_connector"
        folder.mkdir(parents=True)
        for package in (folder, *folder.parents[: len(folder.parents) - len(tmp_path.parents) - 1]):
            (package / "__init__.py").touch()
        text = ELSEWHERE[how] if kind == which else REGISTRY.format(kind=kind.upper())
        if text is not None:
            (folder / "factory.py").write_text(text)
    other = "ec" if which == "kv" else "kv"
    code = (
        f"import logging, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "from connectors.plugin import register\n"
        "register()\n"
        f"from vllm.distributed.{other}_transfer.{other}_connector import factory\n"
        f"print('started', factory.{other.upper()}ConnectorFactory.known)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    names = {"kv": "KVStoreConnector", "ec": "ECStoreConnector"}
    assert ran.stdout.splitlines() == [f"started {[names[other]]}"], "the other one is registered"
    [warned] = ran.stderr.splitlines()
    assert warned.startswith("WARNING kvstore: ") and names[which] in warned and names[other] not in warned
