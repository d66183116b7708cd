"""Llama 4 with images (Scout, Maverick), Llama Guard 4: model_type ``llama4``.

The language model is ``llama4_text``. An image is cut into tiles. In the text, a run of placeholders stands for a tile,
and the tile's image tokens replace these placeholders. Image tokens attend only to earlier tokens, like all other
tokens.

The vision tower processes each tile separately. Patches have learned position embeddings. RoPE rotates queries and keys
by the patch's column and row. The class token is the last token of a tile, and is dropped after the pre-norm blocks.
The features of each square of patches are concatenated, and an MLP and a projection turn them into an image token.

Source: https://ai.meta.com/blog/llama-4-multimodal-intelligence, transformers ``models/llama4``.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from liger_models.arch.llama4 import text
from liger_models.arch.llama4.processor import Llama4Processor
from liger_models.arch.llama4.text import Llama4Decoder
from liger_models.arch.llama4.tower import Llama4Config, Llama4Tower
from liger_models.arch.registry import add_family
from liger_models.base.image_tokens import EqualImageModel
from liger_models.convert.config_map import of_text
from liger_models.convert.weight_map import WeightMap, decoder_map, tower_rows


class LigerLlama4(EqualImageModel, Llama4Decoder):
    """Llama 4 for text and images, with its language-model head."""

    config_class = Llama4Config
    tower_class = Llama4Tower
    processor_class = Llama4Processor
    unit = "tiles"

    def tokens_of(self, pixels: Tensor | None) -> int:
        """See `EqualImageModel.tokens_of`."""
        tokens: int = self.config.vision_config.tokens_per_tile
        return tokens


IGNORED_KEYS = (
    *text.IGNORED_KEYS,
    "hidden_act",  # the tower's activation is GELU, and its norms have an eps of 1e-5, whatever its keys say
    "norm_eps",
    "initializer_range",
    "multi_modal_projector_bias",  # there is no bias
    "vision_feature_layer",  # the features come from the last block, without the class token
    "vision_feature_select_strategy",
    "tie_word_embeddings",  # only the key in text_config is read
    "pad_token_id",
)
TOP = ("image_token_index", "boi_token_index", "eoi_token_index", "vision_config")
"""Keys of config.json that do not belong to the language model."""

IMAGE_TOKENS = ("image_token_id", "boi_token_id", "eoi_token_id")


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Move the keys of ``text_config`` to the top level, and read the tower's ``rope_theta``.

    ``image_token_id``, ``boi_token_id`` and ``eoi_token_id`` are accepted as other names of ``image_token_index``,
    ``boi_token_index`` and ``eoi_token_index``.

    Raises:
        ValueError: the tower's rope type is not supported.
    """
    hf = {f"{key.removesuffix('_id')}_index" if key in IMAGE_TOKENS else key: value for key, value in hf.items()}
    vision = dict(hf.get("vision_config") or {})
    rope = dict(vision.pop("rope_parameters", None) or {})
    if rope.pop("rope_type", "default") != "default" or rope.keys() - {"rope_theta"}:
        raise ValueError(
            "config.json: vision_config.rope_parameters must be of type 'default' with a rope_theta, got "
            f"{hf['vision_config']['rope_parameters']}. The architecture supports nothing else."
        )
    flat = of_text(Llama4Config, hf, text.from_json(hf.get("text_config") or {}), TOP)
    return flat | {"vision_config": vision | rope}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `from_json`: move the language model's keys back into ``text_config``."""
    text_keys = {key: value for key, value in keys.items() if key not in TOP}
    return {key: keys[key] for key in TOP if key in keys} | {"text_config": text_keys}


def weight_map(config: Llama4Config) -> WeightMap:
    """Maps the parameters of Llama 4 to the tensors of a Hugging Face checkpoint."""
    vision, visual, kinds = config.vision_config, "vision_model", ("weight", "bias")
    block, heads = f"{visual}.model.layers.{{b}}", vision.num_attention_heads
    norms = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    tower = {
        "visual.patch_embed.weight": f"{visual}.patch_embedding.linear.weight",
        "visual.class_embed": f"{visual}.class_embedding",
        "visual.pos_embed.weight": f"{visual}.positional_embedding_vlm",
        **{f"visual.layernorm_{at}.{k}": f"{visual}.layernorm_{at}.{k}" for at in ("pre", "post") for k in kinds},
        **{
            f"visual.blocks.{{b}}.attn.qkv_proj.{k}": tower_rows(f"{block}.self_attn", k, heads, vision.hidden_size)
            for k in kinds
        },
        **{f"visual.blocks.{{b}}.attn.o_proj.{k}": f"{block}.self_attn.o_proj.{k}" for k in kinds},
        **{f"visual.blocks.{{b}}.{norm}.{k}": f"{block}.{name}.{k}" for norm, name in norms.items() for k in kinds},
        **{f"visual.blocks.{{b}}.mlp.{fc}.{k}": f"{block}.mlp.{fc}.{k}" for fc in ("fc1", "fc2") for k in kinds},
        **{f"visual.adapter.{fc}.weight": f"{visual}.vision_adapter.mlp.{fc}.weight" for fc in ("fc1", "fc2")},
        "visual.projection.weight": "multi_modal_projector.linear_1.weight",
    }
    names = text.names(config, "language_model.model")
    names["also"] |= tower
    names["over"] |= {"b": range(vision.num_hidden_layers)}
    return decoder_map(config, head="language_model.lm_head.weight", **names)


add_family(
    LigerLlama4,
    model_type="llama4",
    hf_class="Llama4ForConditionalGeneration",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
    peft_exchanges=True,
    module="language_model.model.norm",
)
