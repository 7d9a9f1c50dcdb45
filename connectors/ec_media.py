"""What a request brings of a multimodal item, and what a producer tells about one.

An item may come as media, which this engine's encoder can take; as finished embeddings of the client's;
or, on a consumer, as a mere description: the few fields that say how many placeholders it has (Qwen's
patch grid), its name, and the expectation that the embeddings come by the connector. A producer returns
these fields with its answer, so that a proxy can send them instead of the media.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Modalities that share an encoder.
_VISION = {"image", "video"}

log = logging.getLogger(__name__)


class Media:
    """Knows which fields of a model describe an item and which are the item itself.

    `described_by` maps a modality to the former, as vLLM's own utilities ask for them (`fields_for`);
    `without_encoder` are modalities whose encoder this engine has not loaded.
    """

    def __init__(self, described_by: Mapping[str, set[str]], without_encoder: Iterable[str] = ()) -> None:
        self._described_by = described_by
        self.without_encoder = frozenset(without_encoder)

    def fields_for(self, modality: str) -> set[str]:
        """Fields that describe an item of this modality; empty where none would do without the media."""
        return self._described_by.get(modality, set())

    def is_here(self, feature: Any) -> bool:
        """Whether the request brings the item itself, as media or embeddings, not its description only."""
        if feature.data is None:
            return False
        described_by = self.fields_for(feature.modality)
        return any(
            element.data is not None for name, element in feature.data.items() if name not in described_by
        )

    def is_output(self, feature: Any) -> bool:
        """Whether the request brings the encoder's output itself, which no encoder of ours has computed."""
        if feature.modality == "prompt_embeds":
            return True
        return feature.data is not None and any(
            element.data is not None and name.endswith("_embeds") for name, element in feature.data.items()
        )

    def describe(self, features: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """By identifier, what vLLM's proxies expect of a producer: `item_indices` and `metadata`."""
        from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata

        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(list(features), self)
        return items


def media_of(model_config: Any) -> Media:
    """What vLLM's processor of this model says. Built now, so that no request waits for it later."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    try:
        info = MULTIMODAL_REGISTRY.create_processor(model_config).info
        parser = info.data_parser
        fields = {one: set(parser.placeholder_metadata_fields(one)) for one in info.supported_mm_limits}
        limit = model_config.multimodal_config.get_limit_per_prompt
        # vLLM leaves out an encoder that no request may use; one encodes images and videos alike. Then it
        # takes embeddings of the language model's own width only, no DeepStack levels beside them.
        off = {one for one in fields if limit(one) == 0}
        if not fields.keys() & _VISION <= off:
            off -= _VISION
        return Media(fields, off)
    except Exception:
        # A model whose processor can't say: then every item must come as media.
        log.warning("kvstore: this model's processor does not say what describes an item", exc_info=True)
        return Media({})
