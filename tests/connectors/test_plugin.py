"""The connectors by their names alone, as vLLM's plug-in loader finds them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from kvstore.admin.doctor.vllm_config import vllm_config
from kvstore.build import load_settings

pytestmark = pytest.mark.engine

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import connectors.ec
import connectors.kv
from connectors.plugin import register


def test_the_package_says_that_it_is_a_plugin() -> None:
    found = [one for one in entry_points(group="vllm.general_plugins") if one.name == "kvstore"]
    said = [(one.dist.name if one.dist else "", one.value) for one in found]
    assert said == [("kvstore-vllm", "connectors.plugin:register")], "install the package, once: make setup"


def test_both_connectors_are_found_by_name() -> None:
    register()
    register()
    made = vllm_config(load_settings({"payloads": "file:///d"}, environ={}), kv=True, ec=True, role="both")
    assert made.kv_transfer_config is not None and made.ec_transfer_config is not None
    kv = KVConnectorFactory.get_connector_class(KVTransferConfig(**made.kv_transfer_config))
    assert kv is connectors.kv.KVStoreConnector
    ec = ECConnectorFactory.get_connector_class(ECTransferConfig(**made.ec_transfer_config))
    assert ec is connectors.ec.ECStoreConnector


def test_it_costs_an_engine_without_the_connectors_next_to_nothing() -> None:
    """The connectors themselves, the store and its clients are imported only where they are used."""
    code = (
        "import sys\n"
        "from connectors.plugin import register\n"
        "register()\n"
        "heavy = ('kvstore', 'schemas', 'connectors.kv', 'connectors.ec', 'boto3', 'obstore')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
