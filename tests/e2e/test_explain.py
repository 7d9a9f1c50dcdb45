"""Every reason that an engine can be brought to show is told as what it is, by tokens and request.

One engine lives through all of them, one after the other, so that each is told from those before it; another
one, of another namespace, has a prompt that the first one lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.explain.explain import explain_request, explain_tokens
from kvstore.admin.explain.lookup import Lookup
from kvstore.admin.explain.reports import Chain, ExplainReport, Told
from kvstore.build import load_settings, open_store
from kvstore.index.eviction import Scope
from kvstore.keys import NamespaceId, payload_name
from kvstore.store.store import Store
from tests.e2e.engine import Engine, random_image
from tests.e2e.sharing import BLOCK, prompt
from tests.waiting import PATIENCE_S
from tools.models import IMAGE_TOKEN

pytestmark = pytest.mark.engine

LONG = prompt(320 + 5, 1)  # 10 blocks
OTHER = prompt(160, 2)  # 5 blocks
NEVER = prompt(200, 3)
#: Begins as LONG does, for one block.
BRANCH = {"prompt_token_ids": LONG["prompt_token_ids"][:BLOCK] + prompt(100, 4)["prompt_token_ids"]}


def picture(name: str, seed: int) -> dict[str, Any]:
    words = f"w20 w30 {IMAGE_TOKEN['image']} w40"
    return {"prompt": words, "images": [random_image(seed)], "uuids": [name]}


class Story:
    """An engine, its store from outside, and what is explained of it."""

    def __init__(self, engine: Engine, config: Mapping[str, Any], store: Store) -> None:
        self.engine = engine
        self.settings = load_settings(config, environ={})
        self.store = store
        self.asked = 0
        self.cold: list[int] = []
        [self.kv] = [one.namespace for one in self._accounts("kv") if not one.usage.segments]
        [self.ec] = [one.namespace for one in self._accounts("ec")]

    def _accounts(self, kind: str) -> list[Any]:
        return [one for one in self.store.maintenance.accounts() if one.kind == kind]

    def ask(self, one: Mapping[str, Any]) -> tuple[str, int]:
        """Run a prompt from an empty engine cache: the engine's name of the request, and what was loaded."""
        self.engine.reset_prefix_cache()
        [result] = self.engine.generate([one], max_tokens=32)
        name, self.asked = f"{self.asked}-", self.asked + 1
        # What ended after its last step is told with the next ones.
        self.engine.idle(0.3)
        if one is LONG:
            self.cold = self.cold or result.token_ids
            assert result.token_ids == self.cold
        return name, result.external_tokens

    def _question(self, verb: Callable[..., ExplainReport], *words: Any, **more: Any) -> ExplainReport:
        with Cache(self.settings) as cache:
            return verb(Lookup(cache, time.time(), verify=more.pop("verify", False)), *words, **more)

    def request(self, name: str, op: str, namespace: str = "") -> Told:
        """What was told of a request, of one kind; of its blocks, unless another namespace is named."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            report = self._question(explain_request, name, namespace=namespace or self.kv)
            found = [one for one in report.told if one.op == op and one.request.startswith(name)]
            if found:
                [told] = found
                return told
            self.engine.idle(0.2)
        raise AssertionError(f"nothing was told of {name}")

    def tokens(self, one: Mapping[str, Any], **more: Any) -> ExplainReport:
        return self._question(explain_tokens, one["prompt_token_ids"], namespace=self.kv, **more)

    def chain(self, one: Mapping[str, Any], **more: Any) -> Chain:
        made = self.tokens(one, **more).chain
        assert made is not None
        return made

    def causes(self, one: Mapping[str, Any]) -> tuple[int | None, list[tuple[str, str]]]:
        """Where a prompt's chain stops, and why."""
        [group] = self.chain(one).groups
        assert group.stop is not None
        return group.stop.block, [(one.cause, one.rule) for one in group.stop.findings]

    def seen(self, namespace: NamespaceId) -> Mapping[str, int]:
        return self.store.maintenance.seen(namespace)


def adds_up(seen: Mapping[str, int]) -> bool:
    def total(prefix: str) -> int:
        return sum(value for name, value in seen.items() if name.startswith(prefix))

    served, stored = seen.get("served", 0), seen.get("stored", 0)
    return seen["asked"] == served + total("miss:") and seen["offered"] == stored + total("unsaved:")


def test_every_reason_is_told_as_what_it_is(
    image_model: Path, tmp_path: Path, store_config: Any, private_redis: Any
) -> None:
    config = store_config("sqlite") | {
        "index": private_redis.url,
        "redis": {"timeout_s": 1.0, "connect_timeout_s": 1.0},
        "breaker": {"failures": 2, "backoff_s": 0.2, "max_backoff_s": 0.5},
        "segment": {"max_blocks": 4},
        "kv": {"match_deadline_s": 10.0, "min_load_blocks": 2},
    }
    lz4 = config | {"segment": {"codec": "lz4"}}
    with Engine(image_model, kv=lz4, ec=config, log_path=tmp_path / "0.log") as engine:
        engine.generate([OTHER, picture("dog", 2)])
    config["admission"] = {"second_use": True}
    with (
        Engine(image_model, kv=config, ec=config, log_path=tmp_path / "1.log") as engine,
        open_store(load_settings(config, environ={})) as store,
    ):
        story = Story(engine, config, store)
        _is_never_stored_or_not_admitted(story)
        _is_stored_and_what_it_saved_is_told(story)
        _is_in_another_namespace(story)
        _is_below_the_threshold(story)
        _is_damaged(story, tmp_path / "payloads")
        _is_evicted_by_a_quota(story)
        _is_invalidated(story)
        _is_not_asked_for_while_the_index_is_down(story, private_redis)
        _is_a_picture(story)
        assert adds_up(story.seen(story.kv)), story.seen(story.kv)
        assert adds_up(story.seen(story.ec)), story.seen(story.ec)
        # The pictures' prompts are shorter than a block, so nothing of them was looked up.
        assert story.seen(story.kv)["requests"] == story.asked - 2


def _is_never_stored_or_not_admitted(story: Story) -> None:
    assert story.causes(NEVER) == (0, [("never_stored", "")])
    name, _ = story.ask(LONG)
    told = story.request(name, "match")
    assert (told.asked, told.served, told.reason, told.position) == (10, 0, "absent", 0)
    told = story.request(name, "save")
    assert (told.asked, told.served, told.position) == (10, 0, 0)
    # On a busy machine a short answer is over before the index has said that nobody asked for it before.
    assert told.reason in ("not_admitted", "deadline")
    rule = "second_use" if told.reason == "not_admitted" else ""
    assert story.causes(LONG) == (0, [(told.reason, rule)])


def _is_stored_and_what_it_saved_is_told(story: Story) -> None:
    while story.ask(LONG)[1] == 0 and story.chain(LONG).resumable_tokens == 0:
        assert story.asked < 6, story.causes(LONG)
    assert story.chain(LONG, verify=True).resumable_tokens == 320
    [account] = [one for one in story.store.maintenance.accounts() if one.namespace == story.kv]
    assert account.usage.cost_us > 0
    before = story.engine.metrics()["vllm:kvstore_kv_saved_compute_seconds_total"]
    assert story.ask(LONG)[1] == 320
    saved = story.engine.metrics()["vllm:kvstore_kv_saved_compute_seconds_total"]
    assert saved - before == pytest.approx(account.usage.cost_us / 1e6, rel=0.01)


def _is_in_another_namespace(story: Story) -> None:
    [group] = story.chain(OTHER).groups
    assert group.stop is not None
    assert [one.cause for one in group.stop.findings] == ["never_stored", "elsewhere"]
    [codec] = group.stop.findings[1].differences
    assert (codec.path, codec.a, codec.b) == ("codec", "none", "lz4")
    name, _ = story.ask(OTHER)
    told = story.request(name, "match")
    assert told.block is not None
    assert "elsewhere" in {one.cause for one in told.block.findings}


def _is_below_the_threshold(story: Story) -> None:
    name, loaded = story.ask(BRANCH)
    told = story.request(name, "match")
    assert (loaded, told.reason, told.asked, told.served, told.position) == (0, "below_threshold", 4, 0, 0)
    report = story.tokens(BRANCH)
    assert [one.reason for one in report.told if one.request.startswith(name)][-1] == "below_threshold"
    assert report.chain is not None
    assert report.chain.resumable_tokens == BLOCK


def _is_damaged(story: Story, payloads: Path) -> None:
    [group] = story.chain(LONG).groups
    assert group.leading == 10
    bad = next(one for one in story.store.maintenance.segments(story.kv) if one.record.depth == 4)
    file = payloads / payload_name(story.kv, bad.segment, 0)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    report = story.tokens(LONG, verify=True)
    assert report.chain is not None
    [group] = report.chain.groups
    assert group.stop is not None
    assert (report.damaged, group.stop.block, group.stop.findings[0].cause) == (1, 4, "corrupt")
    name, _ = story.ask(LONG)
    told = story.request(name, "load")
    assert (told.asked, told.served, told.reason, told.position) == (10, 4, "corrupt", 4)
    assert told.block is not None
    # Who found it bad has evicted it, and saved it again.
    assert ("evicted", "bad") in [(one.cause, one.rule) for one in told.block.findings]
    assert story.chain(LONG, verify=True).resumable_tokens == 320


def _is_evicted_by_a_quota(story: Story) -> None:
    scope = Scope.namespace(story.kv)
    sizes = sorted(one.record.nbytes for one in story.store.maintenance.segments(story.kv))
    story.store.maintenance.set_quota(scope, sizes[-1])
    story.store.rounds.housekeep()
    story.store.maintenance.set_quota(scope, None)
    stop, causes = story.causes(LONG)
    assert (stop, causes[0]) == (0, ("evicted", "namespace_quota"))
    name, _ = story.ask(LONG)
    told = story.request(name, "match")
    assert (told.reason, told.asked, told.served) == ("absent", 10, 0)
    assert told.because is not None
    assert (told.because.cause, told.because.rule) == ("evicted", "namespace_quota")


def _is_invalidated(story: Story) -> None:
    assert story.chain(LONG).resumable_tokens == 320
    story.store.maintenance.invalidate(story.kv)
    stop, causes = story.causes(LONG)
    assert (stop, causes[0]) == (0, ("invalidated", "invalidated"))
    name, _ = story.ask(LONG)
    told = story.request(name, "match")
    assert told.because is not None
    assert (told.reason, told.because.cause) == ("absent", "invalidated")
    assert story.ask(LONG)[1] == 320


def _is_not_asked_for_while_the_index_is_down(story: Story, redis: Any) -> None:
    redis.pause()
    name, loaded = story.ask(LONG)
    redis.resume()
    assert loaded == 0
    end = time.monotonic() + PATIENCE_S
    while not story.ask(LONG)[1]:
        assert time.monotonic() < end, "the index is back, and isn't asked"
    told = story.request(name, "match")
    assert told.reason in ("unavailable", "deadline", "breaker_open")
    assert (told.asked, told.served) == (10, 0)


def _is_a_picture(story: Story) -> None:
    name, _ = story.ask(picture("cat", 1))
    assert story.request(name, "save", story.ec).reason == "not_admitted"
    assert story.request(name, "match", story.ec).reason == "absent"
    # Another engine has stored it, by whatever name it came.
    story.ask(picture("also a dog", 2))
    assert story.engine.encoder_calls() == 1
    [item] = story.store.maintenance.segments(story.ec)
    assert item.record.cost_us > 0
    saved = story.engine.metrics()["vllm:kvstore_ec_saved_compute_seconds_total"]
    assert saved == pytest.approx(item.record.cost_us / 1e6, rel=0.01)
