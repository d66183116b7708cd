"""Gemma 2 checkpoints: the weights of ``arch/gemma2.py`` under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.gemma2 import Gemma2Config
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "Gemma2ForCausalLM"
IGNORED_KEYS = ("cache_implementation", "sliding_window_size")  # how to generate; an earlier name of sliding_window


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The activation is ``hidden_activation``; nobody reads a ``hidden_act`` beside it."""
    return {key: value for key, value in hf.items() if key != "hidden_activation"} | {
        "hidden_act": hf.get("hidden_activation")
    }


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The field ``hidden_act`` is written as ``hidden_activation``."""
    return {"hidden_activation" if key == "hidden_act" else key: value for key, value in keys.items()}


def weight_map(config: Gemma2Config) -> WeightMap:
    """Gemma 2's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    )
