"""Gemma 3 checkpoints with a vision tower: the weights of ``arch/gemma3.py`` under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.gemma3 import Gemma3Config
from liger_models.convert.config_map import flat_rope
from liger_models.convert.weight_map import Rearrange, WeightMap, decoder_map, qkv_rows

HF_CLASS = "Gemma3ForConditionalGeneration"
IGNORED_KEYS = (
    "cache_implementation",  # how to generate
    "_sliding_window_pattern",  # what layer_types, which stands beside it, was made from
    "attn_logit_softcapping",  # Gemma 2's; transformers does not read it here
    "final_logit_softcapping",  # nor this one, in the model with images
)
TOP = (
    "image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "vision_config",
    "tie_word_embeddings", "eos_token_id", "initializer_range",
)  # fmt: skip
"""Keys of config.json that are not the text's."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The text's keys are in ``text_config``, the activation as ``hidden_activation``."""
    text = flat_rope(hf.get("text_config") or {})
    text["hidden_act"] = text.pop("hidden_activation", None)
    top = {key: value for key, value in hf.items() if key != "text_config"}
    return text | top


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The text's keys go back to ``text_config``."""
    text = {"hidden_activation" if key == "hidden_act" else key: value for key, value in keys.items() if key not in TOP}
    return {key: keys[key] for key in TOP if key in keys} | {"text_config": text}


def weight_map(config: Gemma3Config) -> WeightMap:
    """Gemma 3's parameters over the tensors of a Hugging Face checkpoint."""
    return _map(config, "language_model.model", "vision_tower.vision_model", "", "language_model.lm_head.weight")


def other_maps(config: Gemma3Config) -> list[WeightMap]:
    """What transformers 5 writes of a new model, what it has in memory, and what 4.52 to 4.57 had and wrote."""
    return [
        _map(config, "language_model.model", "vision_tower", "", "language_model.lm_head.weight"),
        _map(config, "model.language_model", "model.vision_tower", "model.", "lm_head.weight"),
        _map(config, "model.language_model", "model.vision_tower.vision_model", "model.", "lm_head.weight"),
    ]


def _map(config: Gemma3Config, text: str, visual: str, projector: str, head: str) -> WeightMap:
    vision, block = config.vision_config, f"{visual}.encoder.layers.{{b}}"
    kinds, heads = ("weight", "bias"), vision.num_attention_heads
    attention = {
        f"visual.blocks.{{b}}.attn.qkv_proj.{k}": qkv_rows(
            *(f"{block}.self_attn.{part}_proj.{k}" for part in "qkv"),
            heads=heads,
            kv_heads=heads,
            head_dim=vision.hidden_size // heads,
        )
        for k in kinds
    }
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=(
            "input_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        prefix=text,
        head=head,
        also={
            "visual.patch_embed.weight": Rearrange(
                "c p y x -> c (p y x)",
                f"{visual}.embeddings.patch_embedding.weight",
                p=vision.num_channels,
                y=vision.patch_size,
            ),
            "visual.patch_embed.bias": f"{visual}.embeddings.patch_embedding.bias",
            "visual.pos_embed.weight": f"{visual}.embeddings.position_embedding.weight",
            **attention,
            **{f"visual.blocks.{{b}}.norm{n}.{k}": f"{block}.layer_norm{n}.{k}" for n in (1, 2) for k in kinds},
            **{f"visual.blocks.{{b}}.attn.o_proj.{k}": f"{block}.self_attn.out_proj.{k}" for k in kinds},
            **{f"visual.blocks.{{b}}.mlp.{fc}.{k}": f"{block}.mlp.{fc}.{k}" for fc in ("fc1", "fc2") for k in kinds},
            **{f"visual.post_layernorm.{k}": f"{visual}.post_layernorm.{k}" for k in kinds},
            "visual.soft_emb_norm.weight": f"{projector}multi_modal_projector.mm_soft_emb_norm.weight",
            "visual.projection.weight": Rearrange(
                "i o -> o i", f"{projector}multi_modal_projector.mm_input_projection_weight"
            ),
        },
        over={"b": range(vision.num_hidden_layers)},
    )
