"""The language model of Gemma 3n (E2B, E4B), from checkpoints with images and audio: model_type ``gemma3n``.

The language model is ``gemma3n_text``. The towers of images and audio are not implemented: their tensors are kept in
host memory and saved unchanged, and the model refuses images, audio, and the tokens that stand for images or audio.

Source: https://ai.google.dev/gemma/docs/gemma-3n, transformers ``models/gemma3n``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from liger_models.arch.gemma3n import text
from liger_models.arch.registry import add_family
from liger_models.common.errors import check_tensors, check_values
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import WeightMap
from liger_models.layers.decoder import CausalLMOutput


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(text.Gemma3nTextConfig):
    """Sizes and constants of the language model of Gemma 3n."""


class LigerGemma3n(text.Gemma3nDecoder):
    """The language model of Gemma 3n with its head."""

    config_class = Gemma3nConfig

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        input_features: Tensor | None = None,
        input_features_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """See `Decoder.forward`. ``token_type_ids``, which transformers' processor returns, are ignored.

        Raises:
            ValueError: there are images, audio, or tokens that stand for images or audio. The model has no towers for
                these inputs.
        """
        media = {
            "pixel_values": pixel_values, "input_features": input_features, "input_features_mask": input_features_mask,
        }  # fmt: skip
        given = ", ".join(name for name, value in media.items() if value is not None)
        if given:
            raise ValueError(
                f"forward: {given} must be None, because {type(self).__name__} has no towers. Pass text alone."
            )
        check_tensors(input_ids=input_ids)
        if input_ids is not None and input_ids.numel():
            limit = self.config.vocab_size_per_layer_input
            check_values(
                input_ids.max() < limit,
                f"forward: input_ids must be below {limit}, the first token of images and audio, for which "
                f"{type(self).__name__} has no towers. Pass text alone.",
            )
        return super().forward(input_ids, **inputs)


TOP = ("tie_word_embeddings", "eos_token_id", "initializer_range")
"""Fields that are at the top level of config.json, and not in ``text_config``."""

OF_TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
"""Prefixes of the tensors for images and audio, which are kept unchanged."""

IGNORED_KEYS = (
    *text.IGNORED_KEYS,
    # Keys about images and audio.
    "vision_config", "audio_config", "audio_soft_tokens_per_image", "vision_soft_tokens_per_image", "boi_token_id",
    "eoi_token_id", "image_token_id", "boa_token_id", "eoa_token_id", "audio_token_id",
)  # fmt: skip


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level."""
    return of_text(Gemma3nConfig, hf, text.from_json(hf.get("text_config") or {}), TOP)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    of_language = text.to_json({key: value for key, value in keys.items() if key not in TOP})
    top = {key: keys[key] for key in TOP if key in keys}
    return top | {"text_config": {"model_type": "gemma3n_text", **of_language}}


def weight_map(config: Gemma3nConfig) -> WeightMap:
    """Maps the parameters of the language model to the tensors of a checkpoint."""
    return text.text_map(config, "model.language_model", OF_TOWERS)


add_family(
    LigerGemma3n,
    model_type="gemma3n",
    hf_class="Gemma3nForConditionalGeneration",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
