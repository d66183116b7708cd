"""The language model of Kimi K2.5: model_type ``kimi_k25``.

The language model has the architecture of DeepSeek V3. The vision tower is not implemented: its tensors are kept in
host memory and saved unchanged, and images are refused. The released checkpoint stores routed experts in INT4 with
groups of 32 values. This package can't read this format, so decompress the checkpoint to bfloat16 before you load it.

In the tensor names of the language model, transformers 5 writes ``blocks`` instead of ``layers``. Checkpoints with
either name can be read.

Source: https://huggingface.co/moonshotai/Kimi-K2.5, transformers ``models/kimi_k25``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from liger_models.arch.deepseek_v3 import model as v3
from liger_models.arch.registry import add_family
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import Expression, Name, WeightMap, shared_moe_map
from liger_models.layers.decoder import CausalLMOutput


@dataclass(frozen=True, kw_only=True)
class KimiK25Config(v3.DeepseekV3Config):
    """Sizes and constants of the language model of Kimi K2.5."""


class LigerKimiK25(v3.LigerDeepseekV3):
    """The language model of Kimi K2.5 with its head."""

    config_class = KimiK25Config

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """See `Decoder.forward`.

        Raises:
            ValueError: there are images, for which the model has no tower.
        """
        images = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
        given = ", ".join(name for name, value in images.items() if value is not None)
        if given:
            raise ValueError(f"forward: {given} must be None, because {type(self).__name__} has no vision tower.")
        return super().forward(input_ids, **inputs)


TOP = ("tie_word_embeddings",)
"""Fields that are at the top level of config.json, and not in ``text_config``."""

OF_IMAGES = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
"""Prefixes of the tensors of the vision tower and its projector, which are kept unchanged."""

# Keys about images.
IGNORED_KEYS = (
    *v3.IGNORED_KEYS,
    "ignore_index",
    "image_token_id",
    "media_placeholder_token_id",
    "projection_layer_norm_eps",
    "use_unified_vision_chunk",
    "video_placeholder",
    "video_token_id",
    "vision_config",
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level."""
    text = dict(hf.get("text_config") or {})
    text.pop("quantization_config", None)  # checked earlier
    return of_text(KimiK25Config, hf, v3.from_json(text), TOP)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    text = v3.to_json({key: value for key, value in keys.items() if key not in TOP})
    return {key: keys[key] for key in TOP} | {"text_config": {"model_type": "deepseek_v3", **text}}


def weight_map(config: KimiK25Config) -> WeightMap:
    """Maps the parameters of the language model to the tensors of a checkpoint."""
    return shared_moe_map(config, prefix="language_model.model", head="language_model.lm_head.weight", kept=OF_IMAGES)


def other_maps(config: KimiK25Config) -> list[WeightMap]:
    """The weight maps for three other kinds of checkpoints: with ``blocks`` instead of ``layers``, as in files that
    transformers 5 writes; with one tensor for all experts of a layer; and with the names of transformers' modules."""
    options: dict[str, Any] = {"kept": OF_IMAGES}
    head = "language_model.lm_head.weight"
    return [
        _renamed(weight_map(config), "language_model.model.layers.", "language_model.model.blocks."),
        shared_moe_map(config, prefix="language_model.model", head=head, fused=True, **options),
        shared_moe_map(config, prefix="model.language_model", fused=True, **options),
    ]


def _renamed(weights: WeightMap, old: str, new: str) -> WeightMap:
    """Replace ``old`` by ``new`` in all names of the checkpoint."""

    def rename(expression: Expression) -> None:
        if isinstance(expression, Name):
            expression.name = expression.name.replace(old, new)
        for value in vars(expression).values():
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Expression):
                    rename(part)

    for expression in weights.entries.values():
        rename(expression)
    return weights


add_family(
    LigerKimiK25,
    model_type="kimi_k25",
    hf_class="KimiK25ForConditionalGeneration",
    weight_map=weight_map,
    other_maps=other_maps,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
