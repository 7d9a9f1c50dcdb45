"""Every kind of request: the same tokens with the store off, cold and warm, and nothing left behind.

One engine without a store answers everything once. An engine with a store answers it twice: cold, and then
warm, when it has forgotten its own KV blocks and finds them in the store. Each kind has prompts of its own.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, EngineError, Result, random_image, random_tokens
from tests.e2e.sharing import BLOCK, check_store, full_blocks, prompt
from tests.waiting import PATIENCE_S
from tools.models import IMAGE_TOKEN

pytestmark = pytest.mark.engine

#: Blocks that requests can have, and the tokens of the longest request.
POOL = 71
LONGEST = 70 * BLOCK
ARGUMENTS: dict[str, Any] = {
    # One more is vLLM's null block.
    "num_gpu_blocks_override": POOL + 1,
    "max_model_len": LONGEST,
    # A prompt of more than four blocks is computed in chunks.
    "max_num_batched_tokens": 4 * BLOCK,
    "max_num_seqs": 8,
}
PLAIN = {"enable_lora": True, "enable_prompt_embeds": True}
#: Late enough to be met at it.
LATE_S = 0.1
#: Of a draft model's weights, relative: about half of its guesses are right.
NOISE = 0.01


@dataclass
class Asked:
    """An engine, and what those who ask it need to know."""

    engine: Engine
    adapters: list[Path]
    #: None without a store.
    store: dict[str, Any] | None = None

    def forget(self) -> None:
        """Lets transfers end, then the engine forget its KV blocks: what it has next is from the store."""
        if self.store is not None:
            until = time.monotonic() + PATIENCE_S
            while self.engine.held()["transfers"] and time.monotonic() < until:
                self.engine.idle(0.02)
            self.engine.idle(0.02)  # takes the workers' last reports
        assert self.engine.reset_prefix_cache()


@dataclass
class Answers:
    """What one pass over a kind of requests gave; `tokens` must be what an engine without a store gave."""

    tokens: list[list[int]]
    #: Prompt tokens that came from the store.
    external: list[int] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def answers(results: list[Result], **more: Any) -> Answers:
    return Answers([r.token_ids for r in results], [r.external_tokens for r in results], more)


def one_by_one(asked: Asked, prompts: list[dict[str, Any]], **options: Any) -> list[Result]:
    return [asked.engine.generate([each], **options)[0] for each in prompts]


# ---- the kinds ----------------------------------------------------------------------------------

CHUNKED = [prompt(1000, 1), prompt(1024, 2), prompt(96, 3), prompt(20, 4)]


def chunked(asked: Asked) -> Answers:
    """Many chunks, whole blocks only, one chunk, less than a block."""
    return answers(one_by_one(asked, CHUNKED))


CROWD = [prompt(256 + 32 * i, 20 + i) for i in range(8)]


def preempted(asked: Asked) -> Answers:
    """Together more than the pool holds: some lose their blocks and start again."""
    before = asked.engine.metrics()["vllm:num_preemptions_total"]
    for _ in range(5):
        results = asked.engine.generate(CROWD, max_tokens=64)
        preemptions = asked.engine.metrics()["vllm:num_preemptions_total"] - before
        # On a busy machine loads may come so far apart that the first requests end before the last begin.
        if preemptions:
            break
        asked.forget()
    return answers(results, preemptions=preemptions)


WHOLE = prompt(LONGEST - 16, 40)


def whole_pool(asked: Asked) -> Answers:
    """All of the pool but one block; what would need more is refused by vLLM, and the next is served."""
    with pytest.raises(EngineError, match="maximum context length is"):
        asked.engine.generate([prompt(LONGEST + 1, 41)])
    return answers(asked.engine.generate([WHOLE]))


#: Of each, question and answer are a whole number of blocks.
DECODED = [(prompt(256 + i, 100 + i), 64 - i) for i in range(6)]


def decoded(asked: Asked) -> Answers:
    """Answers, and then prompts that begin with a question and its answer."""
    first = [asked.engine.generate([one], max_tokens=count)[0] for one, count in DECODED]
    asked.forget()
    histories = [
        {"prompt_token_ids": one["prompt_token_ids"] + result.token_ids + [20]}
        for (one, _), result in zip(DECODED, first, strict=True)
    ]
    return answers([*first, *one_by_one(asked, histories)])


ABORTED = [prompt(288 + 32 * i, 50 + i) for i in range(6)]
_passes = itertools.count(1)


def aborted(asked: Asked) -> Answers:
    """Requests that end in every state, beside others that get the blocks they leave."""
    engine = asked.engine
    if asked.store is None:
        return answers(one_by_one(asked, ABORTED, max_tokens=8))
    met: dict[int | str, bool] = {}
    engine.delay_transfers(read_s=LATE_S, write_s=LATE_S)

    def abort(
        state: int | str, prompts: list[dict[str, Any]], which: tuple[int, ...], **options: Any
    ) -> None:
        results = engine.generate(prompts, max_tokens=8, abort_after=dict.fromkeys(which, state), **options)
        met[state] = [i for i, one in enumerate(results) if one.finish_reason == "abort"] == list(which)
        asked.forget()

    unread = {"skip_reading_prefix_cache": True}
    abort(0, ABORTED, (0, 5))
    abort("waiting", ABORTED, (2, 4), **unread)
    abort("loading", ABORTED, (1, 3))
    abort("prefilling", ABORTED, (0, 2), **unread)
    new = [prompt(320, 1000 + 10 * next(_passes) + i) for i in range(4)]
    abort("saving", new, (0, 1, 2, 3))
    engine.delay_transfers()
    # What was being saved when its request ended is stored, and is right.
    loaded = one_by_one(asked, new)
    computed = one_by_one(asked, new, **unread)
    return answers(
        one_by_one(asked, ABORTED, max_tokens=8),
        met=met,
        saved=[r.external_tokens for r in loaded],
        same=[r.token_ids for r in loaded] == [r.token_ids for r in computed],
    )


TURNS = [random_tokens(200, 60), random_tokens(100, 61), random_tokens(50, 62)]


def session(asked: Asked) -> Answers:
    """A streaming session whose prompt grows by turns and answers; then all of it as one prompt."""
    turns = asked.engine.session(TURNS, max_tokens=10)
    asked.forget()
    history: list[int] = []
    for tokens, turn in zip(TURNS, turns, strict=True):
        # The last token of an answer was never computed; a session drops it when it goes on.
        history += tokens + turn.token_ids[:-1]
    again = {"prompt_token_ids": history[:-9]}
    return answers([*turns, *asked.engine.generate([again], max_tokens=10)])


SALTED = prompt(320, 70)


def salted(asked: Asked) -> Answers:
    """One prompt under two salts and under none."""
    salts = [{"cache_salt": "one"}, {"cache_salt": "two"}, {}]
    return answers(one_by_one(asked, [SALTED | salt for salt in salts]))


ADAPTED = prompt(320, 75)


def lora(asked: Asked) -> Answers:
    """One prompt for two adapters and for the model as it is."""
    adapters = [{"lora": str(folder)} for folder in asked.adapters]
    return answers(one_by_one(asked, [ADAPTED | adapter for adapter in [*adapters, {}]]))


EMBEDDED = random_tokens(330, 80)


def embeds(asked: Asked) -> Answers:
    """A prompt handed in as embeddings, and as the tokens they belong to."""
    return answers(one_by_one(asked, [{"embeds_of": EMBEDDED}, {"prompt_token_ids": EMBEDDED}]))


UNREAD = prompt(330, 85)


def unread(asked: Asked) -> Answers:
    """Requests that must not be served from a cache: on demand, and since their logprobs are asked for."""
    options: list[dict[str, Any]] = [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}, {}]
    return answers([asked.engine.generate([UNREAD], **each)[0] for each in options])


WAITED_FOR = prompt(330, 90)


def waited_for(asked: Asked) -> Answers:
    """Nothing to run while a load is under way: steps without tokens."""
    asked.engine.delay_transfers(read_s=3 * LATE_S)
    before = asked.engine.idle_steps()
    [result] = asked.engine.generate([WAITED_FOR])
    asked.engine.delay_transfers()
    return answers([result], ttft_s=result.ttft_s, steps=asked.engine.idle_steps() - before)


KINDS: dict[str, Callable[[Asked], Answers]] = {
    kind.__name__: kind
    for kind in (
        *(chunked, preempted, whole_pool, decoded, aborted, session),
        *(salted, lora, embeds, unread, waited_for),
    )
}


def loaded_when_warm(kind: str, config: str) -> list[int] | None:
    """Tokens from the store, request by request, when all is stored; None where it is no fixed number."""
    everything = {
        "chunked": [full_blocks(one) for one in CHUNKED],
        "whole_pool": [full_blocks(WHOLE)],
        "decoded": [256] * len(DECODED) + [320] * len(DECODED),
        "aborted": [full_blocks(one) for one in ABORTED],
        # What is counted for a session is what its first turn found.
        "session": [192, 192, 192, (200 + 9 + 100 + 9 + 50) // BLOCK * BLOCK],
        "salted": [320, 320, 320],
        "lora": [320, 320, 320] if config == "async" else [0, 0, 320],
        "embeds": [320, 320],
        "unread": [0, 0, 0],
        "waited_for": [320],
    }
    return everything.get(kind)


# ---- the engines --------------------------------------------------------------------------------

DECODES: dict[str, Any] = {"kv": {"save_decode": True}}
#: Name -> engine arguments, settings of the store, kinds.
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "sync": (PLAIN, {}, tuple(KINDS)),
    "async": (
        PLAIN | {"async_scheduling": True},
        DECODES | {"identity": {"lora": "trust"}},
        tuple(KINDS),
    ),
    "ngram": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            }
        },
        DECODES,
        ("chunked", "preempted", "whole_pool", "decoded", "aborted", "session"),
    ),
    # `model` is filled in.
    "draft": (
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
        DECODES,
        ("preempted", "decoded"),
    ),
}


@dataclass
class Passes:
    """What one engine with a store answered: kind -> cold and warm, or what went wrong."""

    answers: dict[str, tuple[Answers, Answers] | Exception]
    metrics: dict[str, float]

    def of(self, kind: str) -> tuple[Answers, Answers]:
        found = self.answers[kind]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters of the text model that change its answers."""
    import torch
    from safetensors.torch import save_file

    folders = [tmp_path_factory.mktemp("adapters") / f"adapter-{number}" for number in (1, 2)]
    for seed, folder in enumerate(folders):
        draw = torch.Generator().manual_seed(seed)
        weights = {}
        for layer, (name, width) in itertools.product(range(4), [("q_proj", 256), ("v_proj", 128)]):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = 0.3 * torch.randn(8, 256, generator=draw)
            weights[f"{module}.lora_B.weight"] = 0.3 * torch.randn(width, 8, generator=draw)
        folder.mkdir()
        save_file(weights, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    return folders


@pytest.fixture(scope="module")
def expected(
    text_model: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answers]:
    """What an engine without a store answers."""
    log = tmp_path_factory.mktemp("off") / "engine.log"
    with Engine(text_model, log_path=log, **ARGUMENTS, **PLAIN) as engine:
        asked = Asked(engine, adapters)
        return {kind: ask(asked) for kind, ask in KINDS.items()}


@pytest.fixture(scope="module")
def passes(
    text_model: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Passes]:
    """Name -> every kind, asked of one engine, cold and then warm. Each engine is started once."""
    made: dict[str, Passes | Exception] = {}

    def run(name: str) -> Passes:
        if name not in made:
            try:
                made[name] = ask_all(name, text_model, adapters, tmp_path_factory.mktemp(name))
            except Exception as exc:  # it would be as slow and as bad for the next test
                made[name] = exc
        found = made[name]
        if isinstance(found, Exception):
            raise found
        return found

    return run


def ask_all(name: str, model: Path, adapters: list[Path], folder: Path) -> Passes:
    arguments, settings, kinds = CONFIGS[name]
    if name == "draft":
        draft = {"model": str(poor_copy(model, folder / "draft"))}
        arguments = arguments | {"speculative_config": arguments["speculative_config"] | draft}
    store = {"payloads": f"file://{folder}/payloads", **settings}
    store["kv"] = {"match_deadline_s": 20.0, "match_ttl_s": 30.0, **settings.get("kv", {})}
    made: dict[str, tuple[Answers, Answers] | Exception] = {}
    with Engine(model, kv=store, log_path=folder / "engine.log", **ARGUMENTS, **arguments) as engine:
        asked = Asked(engine, adapters, store)

        def turn(kind: str) -> Answers:
            answer = KINDS[kind](asked)
            asked.forget()
            answer.more["held"] = engine.held()
            return answer

        for kind in kinds:
            try:
                made[kind] = turn(kind), turn(kind)
            except Exception as exc:  # one kind's failure is not another's
                made[kind] = exc
        metrics = engine.metrics()
    check_store(store)
    return Passes(made, metrics)


def poor_copy(model: Path, folder: Path) -> Path:
    """A model that often, not always, guesses what `model` will say."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    draw = torch.Generator().manual_seed(0)
    weights = load_file(model / "model.safetensors")
    noisy = {
        name: one * (1 + NOISE * torch.randn(one.shape, generator=draw)) for name, one in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder


def asking(kind: str) -> list[str]:
    """The engines that were asked this kind."""
    return [name for name, (_, _, kinds) in CONFIGS.items() if kind in kinds]


Run = Callable[[str], Passes]


@pytest.mark.parametrize(("config", "kind"), [(name, kind) for name in CONFIGS for kind in CONFIGS[name][2]])
def test_the_same_tokens_cold_and_warm(
    config: str, kind: str, passes: Run, expected: dict[str, Answers]
) -> None:
    cold, warm = passes(config).of(kind)
    assert cold.tokens == expected[kind].tokens
    assert warm.tokens == expected[kind].tokens
    most = loaded_when_warm(kind, config)
    if most is not None:
        assert warm.external == most
    for answer in (cold, warm):
        assert not any(answer.more["held"].values()), answer.more["held"]


@pytest.mark.parametrize("config", asking("preempted"))
def test_preempted_requests_start_again(config: str, passes: Run) -> None:
    cold, warm = passes(config).of("preempted")
    for answer in (cold, warm):
        assert answer.more["preemptions"] > 0
    assert sum(warm.external) > 0


@pytest.mark.parametrize("config", asking("aborted"))
def test_requests_end_in_every_state(config: str, passes: Run) -> None:
    for answer in passes(config).of("aborted"):
        states = (0, "waiting", "loading", "prefilling", "saving")
        assert answer.more["met"] == dict.fromkeys(states, True)
        assert answer.more["saved"] == [320] * 4
        assert answer.more["same"]


@pytest.mark.parametrize("config", asking("decoded"))
def test_answers_are_stored_where_that_is_asked_for(config: str, passes: Run) -> None:
    cold, _ = passes(config).of("decoded")
    # The last token of an answer was never computed, and with it its block is not whole.
    stored = 288 if CONFIGS[config][1].get("kv") else 256
    assert cold.external == [0] * len(DECODED) + [stored] * len(DECODED)


@pytest.mark.parametrize("config", asking("session"))
def test_what_a_session_grew_by_is_stored(config: str, passes: Run) -> None:
    cold, _ = passes(config).of("session")
    assert cold.external == [0, 0, 0, (200 + 9 + 100 + 9 + 50) // BLOCK * BLOCK]


@pytest.mark.parametrize("config", asking("waited_for"))
def test_a_load_is_waited_for_in_steps_without_tokens(config: str, passes: Run) -> None:
    _, warm = passes(config).of("waited_for")
    assert warm.more["ttft_s"] > 3 * LATE_S
    assert warm.more["steps"] > 10


def test_adapters_have_answers_of_their_own(expected: dict[str, Answers]) -> None:
    assert len({tuple(tokens) for tokens in expected["lora"].tokens}) == 3


@pytest.mark.parametrize("config", ["ngram", "draft"])
def test_drafts_were_right_and_wrong(config: str, passes: Run) -> None:
    metrics = passes(config).metrics
    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert drafted - accepted > 100
    # In a random model's answers nothing comes twice.
    assert config == "ngram" or accepted > 100


def test_images_in_prompts(image_model: Path, tmp_path: Path, store_config: Any) -> None:
    words = " ".join(f"w{token}" for token in random_tokens(150, 95))
    token = IMAGE_TOKEN["image"]

    def ask(*seeds: int) -> dict[str, Any]:
        images = [random_image(seed) for seed in seeds]
        return {"prompt": f"{words} {token} {words} {token} w40", "images": images}

    # The same words and other pictures share what precedes the first of those.
    prompts = [ask(1, 2), ask(1, 3), ask(2, 1)]
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2}, "max_num_batched_tokens": 128}
    with Engine(image_model, log_path=tmp_path / "off.log", **options) as engine:
        expected = [engine.generate([one])[0].token_ids for one in prompts]
    assert len({tuple(tokens) for tokens in expected}) == 3
    config = store_config("sqlite")
    with Engine(image_model, kv=config, log_path=tmp_path / "on.log", **options) as engine:
        asked = Asked(engine, [], config)
        found = []
        for _ in range(2):
            results = []
            for one in prompts:
                asked.forget()
                results += engine.generate([one])
            assert [r.token_ids for r in results] == expected
            found.append([r.external_tokens for r in results])
        # 150 words, a picture of 16 tokens, 150 words, a picture, a word: 10 blocks.
        assert found == [[0, 288, 128], [320, 320, 320]]
    check_store(config)
