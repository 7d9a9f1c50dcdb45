"""vLLM itself reads the chart's configs, exactly as rendered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from kvstore.build import load_settings
from tests.helm.test_vllm import ALL, BUCKET, EVERY_KIND, config_map
from tests.helm.test_vllm_manifests import ENGINE, FOLDER

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_vllm_reads_every_file(tmp_path: Path) -> None:
    """As `--config`, with more flags beside it; the classes are ours; the settings they name are accepted."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from connectors.ec.connector import ECStoreConnector
    from connectors.kv.connector import KVStoreConnector

    files = config_map(ALL)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    seen = []
    for kind in EVERY_KIND:
        config = str(tmp_path / f"{kind}.yaml")
        given = parser.parse_args(["--model", "m", "--config", config, "--max-num-seqs", "7"])
        engine = EngineArgs.from_cli_args(given)
        assert engine.max_num_seqs == 7
        transfers = [one for one in (engine.kv_transfer_config,) if one is not None]
        for child in [*transfers]:
            inner = child.kv_connector_extra_config.get("connectors", [])
            transfers += [KVTransferConfig(**one) for one in inner]
        for one in transfers:
            assert one.kv_load_failure_policy == "recompute"
            made = KVConnectorFactory.get_connector_class(one)
            if one.kv_connector == "KVStoreConnector":
                assert made is KVStoreConnector
                seen.append(("kv", kind, accepted(one.kv_connector_extra_config, tmp_path)))
            for tier in one.kv_connector_extra_config.get("secondary_tiers", []):
                module = __import__(tier["module_path"], fromlist=["x"])
                assert getattr(module, tier["type"]).__name__ == "KVStoreTier"
                seen.append(("tier", kind, accepted({"settings": tier["settings"]}, tmp_path)))
        if engine.ec_transfer_config is not None:
            assert ECConnectorFactory.get_connector_class(engine.ec_transfer_config) is ECStoreConnector
            seen.append(("ec", kind, accepted(engine.ec_transfer_config.ec_connector_extra_config, tmp_path)))
    assert {kind for _, kind, _ in seen} == set(EVERY_KIND)
    assert {url for _, _, url in seen} == {"redis://cache-kvstore-redis.inference.svc:6379/0"}


def test_vllm_serve_reads_the_arguments_of_the_manifests(tmp_path: Path) -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name, text in config_map(BUCKET).items():
        (tmp_path / name).write_text(text)
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    [model] = yaml.safe_load((FOLDER / "production-stack.yaml").read_text())["servingEngineSpec"]["modelSpec"]
    for words in (ENGINE["args"], [model["modelURL"], *model["vllmConfig"]["extraArgs"]]):
        here = [word.replace("/etc/kvstore", str(tmp_path)) for word in words]
        given = parser.parse_args(["serve", *here])
        assert given.kv_transfer_config.kv_connector == "KVStoreConnector" and given.shutdown_timeout == 60


def accepted(extra: Mapping[str, str], folder: Path) -> str | None:
    """The index in the settings that a connector is told to read; the folder stands for /etc/kvstore."""
    name = extra["settings"].removeprefix("/etc/kvstore/")
    return load_settings({"settings": str(folder / name)}, environ={}).index
