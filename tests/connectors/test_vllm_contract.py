"""What connectors/ take from vLLM, pinned: with a new version of vLLM this is what fails first, in words.

    names    everything imported and every attribute read is in the table, and this vLLM has it
    calls    what is called can be called so
    hooks    what we override is a hook, with the same parameters; what we don't is listed, with a reason
    kinds    every kind of KV cache that vLLM has is one we have decided about

The tables are tests/connectors/vllm_contract.py and the ones below; what no signature shows is in
test_vllm_facts.py. To try another version, tools/try-vllm.sh. That an engine then does the right thing is for
tests/e2e to say.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import connectors
from connectors.engine.version import NEWEST, OLDEST, check_vllm_version
from kvstore.errors import ConfigError
from tests.connectors.vllm_contract import NAMES, RESULTS, SINCE, TAKEN, UNSEEN
from tests.connectors.vllm_uses import Found, Known, find
from tests.fake_vllm import STANDS_FOR

FOLDER = Path(connectors.__file__).parent
ROOT = FOLDER.parent

#: Short names of the table's entries, as the source of connectors/ has them.
PATHS = {path.partition(":")[2] or path.partition(":")[0]: path for path in TAKEN}


@pytest.fixture(scope="module")
def found() -> Found:
    return find(FOLDER, Known(RESULTS, NAMES))


# ---- names: the table against connectors/ (needs no vLLM) -------------------------------------------


@pytest.mark.slow
def test_every_import_is_in_the_table(found: Found) -> None:
    missing = [
        f"{one.where}: {one.module}:{one.name}"
        for one in found.imports
        if (one.module if one.module == one.name else f"{one.module}:{one.name}") not in TAKEN
    ]
    assert not missing, (
        "connectors/ import from vLLM what tests/connectors/vllm_contract.py doesn't list; add it to TAKEN "
        f"with the reason why it is needed: {missing}"
    )


def test_every_attribute_is_in_the_table(found: Found) -> None:
    missing = sorted(
        f"{one.owner}.{one.name} ({one.where})"
        for one in found.uses
        if one.owner not in PATHS or one.name not in TAKEN[PATHS[one.owner]].names
    )
    assert not missing, (
        "connectors/ read of vLLM's objects what tests/connectors/vllm_contract.py doesn't list; add it to "
        f"its type in TAKEN with the reason, or correct RESULTS or NAMES if it isn't vLLM's: {missing}"
    )


def test_nothing_in_the_table_is_unused(found: Found) -> None:
    used = {f"{one.owner}.{one.name}" for one in found.uses} | UNSEEN
    used |= {f"{one.owner}.{keyword}" for one in found.calls if not one.name for keyword in one.keywords}
    listed = {f"{name}.{attribute}" for name, path in PATHS.items() for attribute in TAKEN[path].names}
    assert not (unused := listed - used), f"no longer used, take it out of TAKEN: {sorted(unused)}"
    imported = {one.name for one in found.imports}
    reached = {type_ for owner_, type_ in RESULTS.items()} | set(NAMES.values())
    assert not (unused := PATHS.keys() - imported - reached), f"not imported any more: {sorted(unused)}"


def test_what_only_newer_versions_have_is_read_with_a_default(found: Found) -> None:
    newer = {name for name, since in SINCE.items() if since > OLDEST}
    bare = [
        f"{one.owner}.{one.name} ({one.where})"
        for one in found.uses
        if f"{one.owner}.{one.name}" in newer and not one.safe
    ]
    assert not bare, f"vLLM {'.'.join(map(str, OLDEST))} doesn't have it; use getattr with a default: {bare}"


def test_one_module_reads_requests_and_steps(found: Found) -> None:
    """So that a name which vLLM changes there is changed in one place."""
    owners = {"Request", "SchedulerOutput", "NewRequestData", "CachedRequestData", "KVConnectorBlockState"}
    elsewhere = [
        f"{one.owner}.{one.name} ({one.where})"
        for one in found.uses
        if one.owner in owners and not one.where.startswith("engine/step.py")
    ]
    assert not elsewhere, f"give connectors/engine/step.py a name for it: {elsewhere}"


# ---- names and calls: the table against this vLLM ---------------------------------------------------


def resolve(path: str) -> Any:
    pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")
    module, _, name = path.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def running() -> tuple[int, int]:
    import vllm

    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


def attributes(kind: Any) -> set[str]:
    """What objects of a class have, those set by its methods included; of anything else, what it has."""
    names = set(dir(kind))
    if inspect.isclass(kind):
        names |= {"name", "value"} if issubclass(kind, enum.Enum) else set()
        for base in kind.__mro__[:-1]:
            names |= set(vars(base).get("__annotations__", {}))
            if base.__module__.startswith("vllm"):
                names |= set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(base)))
    return names


@pytest.mark.engine
@pytest.mark.parametrize("path", TAKEN)
def test_vllm_has_it(path: str) -> None:
    why, names = TAKEN[path]
    try:
        thing = resolve(path)
    except (ImportError, AttributeError) as exc:
        pytest.fail(
            f"this vLLM has no {path} (needed: {why or 'see its names in the table'}): {exc}", pytrace=False
        )
    has = attributes(thing) | {name for name in names if not inspect.isclass(thing) and hasattr(thing, name)}
    if path.endswith(":KVCacheSpec"):
        has = has.union(*map(attributes, kv_cache_kinds().values()))
    short = path.partition(":")[2]
    lost = {
        name: reason
        for name, reason in names.items()
        if name not in has and SINCE.get(f"{short}.{name}", OLDEST) <= running()
    }
    assert not lost, f"this vLLM's {path} lacks what connectors/ read of it, and why it does: {lost}"


@pytest.mark.engine
@pytest.mark.parametrize("name", STANDS_FOR)
def test_the_tests_own_stand_ins_have_what_vllm_has(name: str) -> None:
    fake = STANDS_FOR[name]
    made_up = {one for one in dir(fake) if not one.startswith("_")} - attributes(resolve(PATHS[name]))
    assert not made_up, f"this vLLM's {name} has no such things, correct tests/fake_vllm.py: {made_up}"


@pytest.mark.engine
def test_vllm_can_be_called_so(found: Found) -> None:
    wrong = []
    for call in found.calls:
        thing = owner = resolve(PATHS[call.owner])
        itself = False
        if call.name:
            thing = getattr(owner, call.name)
            itself = inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, call.name))
        try:
            signature = inspect.signature(thing)
        except ValueError:
            continue  # written in C
        try:
            signature.bind(*[None] * (call.positional + itself), **dict.fromkeys(call.keywords))
        except TypeError as exc:
            wrong.append(f"{call.where}: {call.owner}.{call.name}{signature}: {exc}")
    assert not wrong, f"this vLLM wants to be called otherwise: {wrong}"


# ---- hooks ------------------------------------------------------------------------------------------

_KEPT = "vLLM's own bookkeeping, fine as it is"


_NOTHING = "stores and loads nothing: what the base does, or answers, is right"


class Interface(NamedTuple):
    """One of our classes that vLLM calls."""

    path: str
    #: Hooks of the base that are left as they are, and why.
    left: dict[str, str]
    #: Public methods that this vLLM doesn't call, and who does.
    own: dict[str, str] = {}  # noqa: RUF012  # never changed
    #: Hooks that only newer versions have.
    since: dict[str, tuple[int, int]] = {}  # noqa: RUF012  # never changed


INTERFACES = [
    Interface(
        "connectors.kv.connector:KVStoreConnector",
        {
            "role": _KEPT,
            "bind_connector_metadata": _KEPT,
            "clear_connector_metadata": _KEPT,
            "has_connector_metadata": _KEPT,
            "bind_kv_cache_manager": "the scheduler's own calls name the blocks; the manager isn't touched",
            "finish_forward": "for connectors that work layer by layer",
            "reset_capture_state": "the same",
            "requires_piecewise_for_cudagraph": "the same: nothing happens inside a forward pass",
            "get_mem_pool_context": "any memory will do: payloads go through staging",
            "set_host_xfer_buffer_ops": "for devices that can't be copied from directly, which are refused",
            "get_required_kvcache_layout": "every layout with [block, head, token, content] is understood",
            "get_finished": "get_transfer_results, which says more, is what the model runner calls",
            "get_finished_count": "every rank reports every load: vLLM waits for all of them",
            "get_loaded_kv_cache_group_ids": "the default is right: every group that is found by hashes",
            "has_pending_push_work": "nothing is pushed to another engine",
            "has_pending_block_frees": "no block is kept that a running request could wait for",
            "register_finished_partial_tail": "what is shorter than a block is not stored",
            "supports_divergent_local_hybrid_hits": "the local hit is taken as every group agrees on it",
            "get_kv_connector_kv_cache_events": "the scheduler's half tells of events: take_events",
            "supports_sleep_mode": "the default is yes: unregister_kv_caches waits for copies under way",
        },
        {"name_weights": "connectors.weights calls it, for weights that are replaced in place"},
        {"unregister_kv_caches": (0, 33), "restore_kv_caches": (0, 33)},
    ),
    Interface(
        "connectors.ec.connector:ECStoreConnector",
        {
            "role": _KEPT,
            "is_producer": _KEPT,
            "is_consumer": _KEPT,
            "clear_connector_metadata": _KEPT,
            "register_caches": "has no caller",
            "get_finished": "items are loaded before they are promised: nothing is pending",
            "start_worker_services": "nothing listens in a worker",
            "has_pending_push_work": "nothing is pushed to another engine",
            "update_state_after_free": "the step's list of freed items says the same",
        },
        {},
    ),
    Interface(
        "connectors.observing.kv:ObservingKVConnector",
        dict.fromkeys(
            (
                *("role", "bind_connector_metadata", "clear_connector_metadata", "has_connector_metadata"),
                *("bind_kv_cache_manager", "bind_gpu_block_pool", "finish_forward", "reset_capture_state"),
                *("requires_piecewise_for_cudagraph", "get_mem_pool_context", "set_host_xfer_buffer_ops"),
                *("get_required_kvcache_layout", "get_finished", "get_finished_count"),
                *("get_loaded_kv_cache_group_ids", "has_pending_push_work", "has_pending_block_frees"),
                *("register_finished_partial_tail", "supports_divergent_local_hybrid_hits"),
                *("get_kv_connector_kv_cache_events", "supports_sleep_mode", "handle_preemptions"),
                *("get_transfer_results", "get_block_ids_with_load_errors", "build_connector_worker_meta"),
                *("get_external_cache_hit_sources", "update_connector_output", "get_kv_connector_stats"),
                *("build_kv_connector_stats", "build_prom_metrics"),
                *("unregister_kv_caches", "restore_kv_caches"),
            ),
            _NOTHING,
        ),
    ),
    Interface(
        "connectors.observing.ec:ObservingECConnector",
        dict.fromkeys(
            (
                *(
                    "role",
                    "is_producer",
                    "is_consumer",
                    "bind_connector_metadata",
                    "clear_connector_metadata",
                ),
                *("register_caches", "get_finished", "start_worker_services", "has_pending_push_work"),
                *("update_state_after_free", "start_save_caches", "build_connector_worker_meta"),
                *("ensure_cache_available", "update_connector_output", "take_unavailable_requests"),
                *("request_finished", "get_ec_connector_stats", "build_ec_connector_stats"),
                "build_prom_metrics",
            ),
            _NOTHING,
        ),
    ),
    Interface(
        "connectors.tier.connector:KVStoreTier",
        {
            "block_size_bytes": _KEPT,
            "bp_detector": _KEPT,
            "has_pending_work": "what is under way ends without steps; vLLM looks at the next one",
            "serve_external_requests": "nobody asks this engine's tier from outside",
            "touch": "a use is noted when a chunk is looked up or loaded",
        },
        {},
        {"config_info": (0, 33), "config_info_keys": (0, 33)},
    ),
    Interface("connectors.kv.messages:KVStoreHandshake", {}),
    Interface("connectors.kv.messages:KVStoreMetadata", {}),
    Interface("connectors.kv.messages:KVStoreWorkerMetadata", {}),
    Interface("connectors.ec.messages:ECStoreMetadata", {}),
    Interface("connectors.ec.messages:ECStoreWorkerMetadata", {}),
    Interface("connectors.kv.metrics:KVStoreStats", {"to_dict": "of the data as they are"}),
    Interface("connectors.kv.metrics:KVStorePromMetrics", {}),
    Interface("connectors.ec.metrics:ECStoreStats", {}),
    Interface("connectors.ec.metrics:ECStorePromMetrics", {}),
]


def hooks(kind: type) -> dict[str, Any]:
    """Public members of vLLM's own bases, nearest first."""
    made: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("vllm"):
            for name, member in vars(base).items():
                if not name.startswith("_") and callable(getattr(member, "__func__", member)) | isinstance(
                    member, property
                ):
                    made.setdefault(name, member)
    return made


def parameters(member: Any) -> str:
    """How it is called, in words."""
    if isinstance(member, property):
        return "as a property"
    function = getattr(member, "__func__", member)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    return ", ".join(
        f"{stars.get(one.kind, '')}{one.name}{' by name' if one.kind is keyword else ''}" for one in found
    )


def test_every_class_that_vllm_calls_is_listed(found: Found) -> None:
    listed = {one.path for one in INTERFACES}
    assert not (new := set(found.classes) - listed), f"derived from vLLM's classes, add to INTERFACES: {new}"


@pytest.fixture(params=INTERFACES, ids=lambda one: one.path.partition(":")[2])
def interface(request: pytest.FixtureRequest) -> Interface:
    one: Interface = request.param
    return one


@pytest.mark.engine
def test_what_we_override_is_a_hook(interface: Interface) -> None:
    ours = resolve(interface.path)
    theirs = hooks(ours)
    public = {
        name for name, one in vars(ours).items() if not name.startswith("_") and callable_or_property(one)
    }
    newer = {name for name, since in interface.since.items() if since > running()}
    lost = public - theirs.keys() - interface.own.keys() - newer
    assert not lost, f"this vLLM has renamed or dropped hooks, which nobody calls now: {sorted(lost)}"
    called = interface.own.keys() & theirs.keys()
    assert not called, f"listed as not vLLM's, but this vLLM has them: {sorted(called)}"
    for name in sorted(public & theirs.keys()):
        mine, base = vars(ours)[name], theirs[name]
        assert type(mine) is type(base), f"{name} is a {type(base).__name__} in this vLLM"
        assert parameters(mine) == parameters(base), (
            f"this vLLM calls {name} with ({parameters(base)}), ours takes ({parameters(mine)})"
        )


@pytest.mark.engine
def test_every_hook_is_decided(interface: Interface) -> None:
    ours = resolve(interface.path)
    theirs = hooks(ours)
    own = [base for base in ours.__mro__ if base.__module__.startswith("connectors")]
    overridden = {name for name in theirs if any(name in vars(base) for base in own)}
    new = theirs.keys() - overridden - interface.left.keys()
    assert not new, (
        f"vLLM {running()} has hooks that {interface.path} neither overrides nor leaves for a reason; "
        f"decide, and implement them or list them in INTERFACES: {sorted(new)}"
    )
    both = overridden & interface.left.keys()
    assert not both, f"overridden now, take them out of INTERFACES: {sorted(both)}"
    if running() == NEWEST:
        gone = interface.left.keys() - theirs.keys()
        assert not gone, f"vLLM has dropped these hooks, take them out of INTERFACES: {sorted(gone)}"


def callable_or_property(member: Any) -> bool:
    return isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("ours", "base"),
    [
        ("connectors.kv.connector:KVStoreConnector", "KVConnectorBase_V1"),
        ("connectors.ec.connector:ECStoreConnector", "ECConnectorBase"),
    ],
)
def test_connectors_are_made_as_vllm_makes_them(ours: str, base: str) -> None:
    theirs = parameters(resolve(PATHS[base]).__init__)
    assert parameters(resolve(ours).__init__) == theirs, "this vLLM's factory gives other arguments"


# ---- kinds of KV cache ------------------------------------------------------------------------------

#: Every kind that vLLM has, and what was decided about it.
KINDS = {
    "AttentionSpec": "base of others",
    "UniformTypeKVCacheSpecs": "its layers' kinds count",
    "FullAttentionSpec": "cached",
    "MLAAttentionSpec": "cached",
    "SlidingWindowSpec": "cached",
    "ChunkedLocalAttentionSpec": "cached",
    "MambaSpec": "cached",
    "SlidingWindowMLASpec": "refused: DeepSeek-V4's windows, which may be computed anew; not looked into",
    "RSWASpec": "refused: blocks between a prompt and the window of what was generated are given back",
    "SinkFullAttentionSpec": "refused: what every request starts with isn't in its own blocks",
    "HiddenStateCacheSpec": "refused: nobody computes from hidden states that were kept for being read out",
    "CircularBufferSpec": "refused: scratch space of a request, overwritten in turns",
    "HiSparseHotSpec": "refused: a copy of what is kept in host memory",
    "HiSparseResidentSpec": "refused: a copy of what is kept in host memory",
    "EncoderOnlyAttentionSpec": "refused: has no pages",
    "CrossAttentionSpec": "refused: belongs to an encoder's input, not to a prefix",
}


def kv_cache_kinds() -> dict[str, type]:
    base = resolve(PATHS["KVCacheSpec"])

    def below(kind: type) -> Iterator[type]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    return {one.__name__: one for one in below(base) if one.__module__ == base.__module__}


@pytest.mark.engine
def test_every_kind_of_kv_cache_is_decided() -> None:
    layout = resolve("connectors.engine.layout")
    decided = {kind for kind, decision in KINDS.items() if decision == "cached"}
    assert decided == set(layout._KINDS), "KINDS and connectors/engine/layout.py differ in what is cached"
    new = kv_cache_kinds().keys() - KINDS.keys()
    assert not new, (
        "this vLLM has kinds of KV cache that nobody has looked at: decide whether their blocks can be "
        f"shared and up to where a prefix needs them, then list them in KINDS: {sorted(new)}"
    )
    if running() == NEWEST:
        gone = KINDS.keys() - kv_cache_kinds().keys()
        assert not gone, f"vLLM has dropped these kinds, take them out of KINDS: {sorted(gone)}"


# ---- versions ---------------------------------------------------------------------------------------


#: Packages of which vLLM loads the connector by name.
LOADED = ("ec", "kv", "tier")


@pytest.mark.parametrize("package", LOADED)
def test_the_version_is_asked_before_a_name_can_be_missing(package: str) -> None:
    text = (FOLDER / package / "connector.py").read_text()
    asked = text.index("\ncheck_vllm_version()")
    later = [
        one.start()
        for one in re.finditer(r"^from (vllm|connectors)\b(?!\.engine\.version)", text, re.MULTILINE)
    ]
    assert asked < min(later)


def test_an_old_vllm_is_refused_in_words() -> None:
    older = f"{OLDEST[0]}.{OLDEST[1] - 1}.3"
    with pytest.raises(ConfigError, match=re.escape(f"vLLM {older} is too old")):
        check_vllm_version(older)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc2.dev3+g123", "0.33"])
def test_a_tried_vllm_is_not_mentioned(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_vllm_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", [f"{NEWEST[0]}.{NEWEST[1] + 1}.0", "1.0.0", "dev", "0.1.dev1+gabc"])
def test_a_vllm_nobody_has_tried_is_warned_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_vllm_version(version)
    [record] = caplog.records
    assert version in record.getMessage()


@pytest.mark.engine
def test_the_running_vllm_is_in_the_range() -> None:
    pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")
    assert OLDEST <= running() <= NEWEST, (
        "raise connectors.engine.version.NEWEST once these tests pass with it"
    )


def test_the_package_asks_for_that_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    low, high = ".".join(map(str, OLDEST)), f"{NEWEST[0]}.{NEWEST[1] + 1}"
    assert extras["vllm"] == [f"vllm>={low},<{high}"]
