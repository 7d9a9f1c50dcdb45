"""The form in which a request brings a multimodal item, and what a producer tells about one.

An item may come as media, which this engine's encoder can encode; as finished embeddings, made by the client;
or, on a consumer, as a description only: its identifier and the few fields that say how many placeholders it
has (Qwen's patch grid). Its embeddings are then expected through the connector. A producer returns these
fields with its answer, so that a proxy can send them instead of the media.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Modalities that share an encoder.
_VISION = {"image", "video"}

log = logging.getLogger(__name__)


class Media:
    """Knows which of a model's fields describe an item and which are the item itself.

    `described_by` maps a modality to the fields that describe it; vLLM's own utilities call `fields_for` to
    learn them. `without_encoder` are modalities whose encoder this engine has not loaded.
    """

    def __init__(self, described_by: Mapping[str, set[str]], without_encoder: Iterable[str] = ()) -> None:
        self._described_by = described_by
        self.without_encoder = frozenset(without_encoder)

    def fields_for(self, modality: str) -> set[str]:
        """Returns the fields that describe such an item; none where the media can't be left out."""
        return self._described_by.get(modality, set())

    def is_here(self, feature: Any) -> bool:
        """Returns whether the request brings the item itself, as media or embeddings, not only described."""
        if feature.data is None:
            return False
        described_by = self.fields_for(feature.modality)
        return any(
            element.data is not None for name, element in feature.data.items() if name not in described_by
        )

    def is_output(self, feature: Any) -> bool:
        """Returns whether the request brings finished embeddings, which no engine has computed."""
        if feature.modality == "prompt_embeds":
            return True
        return feature.data is not None and any(
            element.data is not None and name.endswith("_embeds") for name, element in feature.data.items()
        )

    def describe(self, features: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Returns what vLLM's proxies expect of a producer, by identifier: `item_indices` and `metadata`."""
        from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata

        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(list(features), self)
        return items


def media_of(model_config: Any) -> Media:
    """Returns what vLLM's processor of this model says about its fields.

    The processor is built now, so that no request waits for it later.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY

    try:
        info = MULTIMODAL_REGISTRY.create_processor(model_config).info
        parser = info.data_parser
        fields = {one: set(parser.placeholder_metadata_fields(one)) for one in info.supported_mm_limits}
        limit = model_config.multimodal_config.get_limit_per_prompt
        # vLLM does not load an encoder that no request may use; images and videos share one. Without the
        # encoder it takes embeddings of the language model's own width only, no DeepStack levels beside them.
        off = {one for one in fields if limit(one) == 0}
        if not fields.keys() & _VISION <= off:
            off -= _VISION
        return Media(fields, off)
    except Exception:
        # This model's processor can't say, so every item must come as media.
        log.warning("kvstore: this model's processor does not say what describes an item", exc_info=True)
        return Media({})
