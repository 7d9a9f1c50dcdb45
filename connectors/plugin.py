"""A plug-in for vLLM by which it finds the connectors by name alone, without a module path.

vLLM calls `register` in each of its processes, whether or not the connectors are used there. An error would
end every engine of that environment. So this module imports nothing but vLLM's two registries, and does
without those that it doesn't find. vLLM finds the plug-in once the package is installed; `VLLM_PLUGINS`, if
that is set, must name it (`kvstore`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging

log = logging.getLogger(__name__)

#: (Module of a registry of vLLM's, its name there, name of our connector, its module).
_REGISTRIES = (
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        "KVStoreConnector",
        "connectors.kv",
    ),
    (
        "vllm.distributed.ec_transfer.ec_connector.factory",
        "ECConnectorFactory",
        "ECStoreConnector",
        "connectors.ec",
    ),
)


def register() -> None:
    """Make the connectors' names known to vLLM. May be called any number of times, and never raises."""
    missing = []
    for module, registry, name, path in _REGISTRIES:
        try:
            factory = getattr(importlib.import_module(module), registry)
            # ValueError: the name is known, from an earlier call, or because vLLM has one by now.
            with contextlib.suppress(ValueError):
                factory.register_connector(name, path, name)
        except Exception as exc:  # noqa: BLE001 - whatever a stranger's module does, the engine starts
            missing.append(f"{name} ({type(exc).__name__}: {exc})")
    if missing:
        log.warning(
            "kvstore: this vLLM has no registry of connectors in the expected place, so it doesn't know "
            "these by name: %s. Engines start without them; docs/vllm-versions.md names the right vLLM",
            "; ".join(missing),
        )
