"""vllm-config: makes the flags with which vLLM uses this cache, without a credential in them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SecretStr

from kvstore.admin.doctor.machine import redis_is_remote
from kvstore.admin.doctor.reports import VllmConfigReport
from kvstore.build import PREFIX
from schemas.settings import Settings

Role = Literal["both", "producer", "consumer"]

#: Variables that boto3 itself reads.
_AWS = {
    "s3__access_key_id": "AWS_ACCESS_KEY_ID",
    "s3__secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "s3__session_token": "AWS_SESSION_TOKEN",
}


def vllm_config(settings: Settings, *, kv: bool, ec: bool, role: Role) -> VllmConfigReport:
    """Returns the connectors' configurations: every setting that isn't a default, but no secret."""
    notes: list[str] = []
    tree = _public(settings.model_dump(exclude_defaults=True), "", notes)
    # The URLs come first: they are what a reader looks for.
    tree = {key: tree[key] for key in ("index", "payloads") if key in tree} | tree
    for key in ("index", "payloads"):
        if isinstance(tree.get(key), str):
            tree[key], had_credentials = without_credentials(tree[key])
            if had_credentials:
                notes.append(
                    f"the {key} URL's credentials are left out: set {PREFIX}REDIS__USERNAME and "
                    f"{PREFIX}REDIS__PASSWORD, or {PREFIX}{key.upper()} with the whole URL, in the engines' "
                    "environment"
                )
    if redis_is_remote(settings) and settings.origin.startswith("file:"):
        notes.append("every machine must see the same folder under the payloads URL (a shared mount)")
    if settings.origin.startswith("s3:") and not redis_is_remote(settings):
        notes.append("engines on other machines share the bucket only through one index: redis://HOST:PORT/0")
    if settings.tiers is not None:
        notes.append(
            "every machine needs a disk of its own under payloads.fast (in Kubernetes a hostPath or emptyDir "
            "volume)"
        )
    return VllmConfigReport(
        kv_transfer_config={
            "kv_connector": "KVStoreConnector",
            "kv_role": f"kv_{role}",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": tree,
        }
        if kv
        else None,
        ec_transfer_config={
            "ec_connector": "ECStoreConnector",
            "ec_role": f"ec_{role}",
            "ec_connector_extra_config": tree,
        }
        if ec
        else None,
        notes=tuple(notes),
    )


def _public(value: Any, path: str, notes: list[str]) -> Any:
    """Returns `value` without its secrets; a note names the variable that takes the place of each."""
    if not isinstance(value, dict):
        return value
    public = {}
    for key, inner in value.items():
        name = f"{path}__{key}" if path else key
        if isinstance(inner, SecretStr):
            variable = _AWS.get(name)
            either = f"{PREFIX}{name.upper()}" + (f" or {variable}" if variable else "")
            notes.append(f"{name.replace('__', '.')} is left out: set {either} for the engines")
        elif (kept := _public(inner, name, notes)) not in ({}, None):
            public[key] = kept
    return public


def without_credentials(url: str) -> tuple[str, bool]:
    """Returns a URL without user information, and whether it had any."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    _, at, place = authority.rpartition("@")
    return (f"{scheme}://{place}{slash}{path}", True) if at else (url, False)
