"""Gemma 3 text checkpoints: the weights of ``arch/gemma3_text.py`` under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.gemma3_text import Gemma3TextConfig
from liger_models.convert.config_map import flat_rope
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "Gemma3ForCausalLM"
IGNORED_KEYS = (
    "cache_implementation",  # how to generate
    "_sliding_window_pattern",  # what layer_types, which stands beside it, was made from
    "attn_logit_softcapping",  # Gemma 2's; transformers does not read it here
)


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The activation is ``hidden_activation``; transformers 5 has ``rope_parameters`` for each type of layer."""
    flat = flat_rope(hf)
    return flat | {"hidden_act": flat.pop("hidden_activation", None)}


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The field ``hidden_act`` is written as ``hidden_activation``."""
    return {"hidden_activation" if key == "hidden_act" else key: value for key, value in keys.items()}


def weight_map(config: Gemma3TextConfig) -> WeightMap:
    """Gemma 3's parameters over the tensors of a Hugging Face checkpoint."""
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
    )
