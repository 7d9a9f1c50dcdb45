"""Views of a request and of a step: the only readers of vLLM's Request and SchedulerOutput.

A name that vLLM changes in them is changed here, in the tests' stand-ins (tests/fake_vllm.py) and in the
table that says why it is read (tests/connectors/vllm_contract.py). All other modules use the names of this
one, which are vLLM's present names where those are clear. A name that only some of the supported versions
have is read with a default. All other names have no default: if a request's adapter can't be seen any more,
"none" would be a guess that serves wrong blocks, while an error costs a miss (connectors.engine.guard).

The views read on demand and keep nothing: a request moves on between two steps, a session's prompt grows, and
a hand-off may shorten one. A connector makes a request's view once and keeps it with the request's state. It
makes a step's view once per step, so that an idle step costs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


#: Most hints of one request that are read.
MOST_HINTS: Final = 16


class RequestView:
    """A view of a request in the scheduler."""

    __slots__ = ("_request", "request_id")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.request_id: str = request.request_id

    def is_of(self, request: Request) -> bool:
        """Returns whether it views this very request, not another one of the same name."""
        return self._request is request

    # ---- tokens ---------------------------------------------------------------------------------

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Returns the hashes of its full blocks."""
        return self._request.block_hashes

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Returns the token ids of the prompt and of what was generated."""
        return self._request.all_token_ids

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens the prompt and what was generated have."""
        return self._request.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Returns how many tokens the prompt has."""
        return self._request.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Returns how many tokens are computed before this step, including those a load has only promised."""
        return self._request.num_computed_tokens

    @property
    def max_tokens(self) -> int:
        """Returns how many tokens may be generated."""
        return self._request.max_tokens

    # ---- properties -----------------------------------------------------------------------------

    @property
    def resumable(self) -> bool:
        """Returns whether it is a streaming session, whose prompt may go on."""
        return self._request.resumable

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Returns whether all of it must be computed, for the log-probabilities of its prompt."""
        return self._request.skip_reading_prefix_cache

    @property
    def lora_request(self) -> LoRARequest | None:
        """Returns its LoRA adapter, or None."""
        return self._request.lora_request

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """Returns the W3C trace headers that a client has sent, or None without them, or if vLLM does not
        trace. A client can send anything in them."""
        return self._request.trace_headers

    @property
    def cache_salt(self) -> str:
        """Returns the salt that keeps what is cached of it apart; "" if it has none."""
        return self._request.cache_salt or ""

    @property
    def mm_features(self) -> Sequence[MultiModalFeatureSpec]:
        """Returns its multimodal inputs: images and others."""
        return self._request.mm_features

    def get_num_encoder_embeds(self, index: int) -> int:
        """Returns how many rows the encoder's output of its multimodal input `index` has."""
        return self._request.get_num_encoder_embeds(index)

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """Returns what a proxy sent about prefill, or {}. A client can send anything in it."""
        params = self._request.kv_transfer_params
        return params if isinstance(params, dict) else {}

    @property
    def ec_transfer_params(self) -> Mapping[str, Any]:
        """Returns what a proxy sent about encoding, or {}. A client can send anything in it."""
        params = self._request.ec_transfer_params
        return params if isinstance(params, dict) else {}

    @property
    def session_id(self) -> object:
        """Returns the client's name of its session, which may be anything, or None without one. If the prompt
        goes on, the name came with its first part."""
        return self._request.session_id

    @property
    def kv_hints(self) -> Sequence[tuple[object, object, object]]:
        """Returns type, version and payload of the first MOST_HINTS actions in the envelope of hints, with
        whatever in them; none if there is no envelope."""
        envelope = self._request.kv_hints
        if envelope is None:
            return ()
        actions = envelope.actions[:MOST_HINTS]
        return [(action.action_type, action.action_version, action.payload) for action in actions]

    def finished_well(self) -> bool:
        """Returns whether it has ended regularly, with all of its prompt computed."""
        from vllm.v1.request import RequestStatus

        return self._request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

    # ---- hand-off -------------------------------------------------------------------------------

    def shorten(self, tokens: int, hash_tokens: int) -> bool:
        """Drop the last `tokens` tokens of the prompt; this connector's decode engine goes on from there.
        Returns False if the prompt has to stay as it is."""
        request = self._request
        prompt = request.prompt_token_ids
        if prompt is None or request.prompt_embeds is not None:
            return False
        # Prompt logprobs would lack those of the last tokens.
        if request.get_skip_reading_prefix_cache():
            return False
        rest = request.num_prompt_tokens - tokens
        if items_ahead(request, rest):
            return False
        # Samples of one request share their prompt's list, so it is replaced; `_all_token_ids` is the
        # request's own and has views, so it is changed in place.
        request.prompt_token_ids = prompt[:rest]
        del request._all_token_ids[rest:]
        del request.block_hashes[rest // hash_tokens :]
        request.num_prompt_tokens = rest
        # Tokens after the shortened prompt don't continue the whole prompt, so only one is sampled.
        request.max_tokens = 1
        return True

    def name_of_tail(self, tokens: int, hash_tokens: int, hash_function: Callable[[Any], bytes]) -> bytes:
        """Returns the name of the partial block at the end of `tokens` tokens, made by vLLM's own means: its
        hash as if it were full, but of fewer tokens and with a mark. `hash_tokens` is how many tokens a block
        hash stands for."""
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

        request = self._request
        start = tokens // hash_tokens * hash_tokens
        parent = request.block_hashes[start // hash_tokens - 1] if start else None
        extra = generate_block_hash_extra_keys(request, start, tokens, 0)[0] if tokens > start else None
        rest = request.all_token_ids[start:tokens]
        # The extra keys of a full block never start with this mark.
        return bytes(hash_block_tokens(hash_function, parent, rest, ("kvstore tail", extra)))


def items_ahead(request: Request | RequestView, computed: int) -> list[int]:
    """Returns the indices of the items that the engine still needs when `computed` tokens are computed.

    The EC connector calls it for every running request in every step, so it takes no view.
    """
    return [
        index
        for index, feature in enumerate(request.mm_features)
        if feature.mm_position.offset + feature.mm_position.length > computed
    ]


class StepView:
    """A view of what the scheduler has decided for one step."""

    __slots__ = ("_output", "num_scheduled_tokens")

    def __init__(self, output: SchedulerOutput) -> None:
        self._output = output
        #: Request -> how many of its tokens this step computes.
        self.num_scheduled_tokens: Mapping[str, int] = output.num_scheduled_tokens

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Returns how many tokens this step computes of all requests together."""
        return self._output.total_num_scheduled_tokens

    @property
    def begun(self) -> Iterable[str]:
        """Returns the requests that get their first turn to compute with this step: also a session with each
        of its inputs and, in some runners, a request after a preemption."""
        return [one.req_id for one in self._output.scheduled_new_reqs]

    @property
    def preempted(self) -> Iterable[str]:
        """Returns the requests that lose their blocks with this step."""
        return self._output.preempted_req_ids or ()

    @property
    def has_sync_kv_loads(self) -> bool:
        """Returns whether another connector loads within this step, and may fail to."""
        return self._output.has_sync_kv_loads

    @property
    def has_block_ids(self) -> bool:
        """Returns whether the step has block tables; only then may `block_ids` be called."""
        return self._output.kv_connector_block_state is not None

    def block_ids(self, request_id: str) -> Sequence[Sequence[int]] | None:
        """Returns a request's block tables, one per KV cache group of vLLM's, or None if the step lacks the
        request."""
        return self._output.kv_connector_block_state.get_block_ids(request_id)

    @property
    def boundary_offers(self) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """Returns, by request, the states that this step completes (Mamba mode "align"): (block table, block,
        number of tokens before it) each; none if it has no block tables."""
        state = self._output.kv_connector_block_state
        return {} if state is None else state.boundary_state_offloads

    def given_blocks(self) -> set[int]:
        """Returns the blocks that this step hands out, or zeroes before a connector can read them."""
        output = self._output
        tables = [one.block_ids for one in output.scheduled_new_reqs]
        tables += [one for one in output.scheduled_cached_reqs.new_block_ids if one is not None]
        given = {block for one in tables for blocks in one for block in blocks}
        given.update(output.new_block_ids_to_zero or ())
        return given

    @property
    def scheduled_encoder_inputs(self) -> Mapping[str, Sequence[int]]:
        """Returns, by request, which of its items this step encodes."""
        return self._output.scheduled_encoder_inputs

    @property
    def free_encoder_mm_hashes(self) -> Sequence[str]:
        """Returns the items that leave the workers' encoder caches with this step."""
        return self._output.free_encoder_mm_hashes
