"""OLMo 3 checkpoints: the weights of ``arch/olmo3.py`` under Hugging Face's names."""

from collections.abc import Mapping
from typing import Any

from liger_models.arch.olmo3 import Olmo3Config
from liger_models.convert.config_map import flat_rope
from liger_models.convert.weight_map import WeightMap, decoder_map

HF_CLASS = "Olmo3ForCausalLM"


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Transformers 5 has ``rope_parameters`` for each type of layer."""
    return flat_rope(hf)


def to_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A base other than that of all releases is written in the spelling of transformers 5 as well.

    There the ``rope_theta`` of the older spelling reaches the layers without a window only. (Transformers 4 has one
    base for all layers.)
    """
    out = dict(keys)
    local = out.pop("rope_local_base_freq")
    if local != Olmo3Config.rope_local_base_freq:
        full = {"rope_type": "default", **(keys["rope_scaling"] or {}), "rope_theta": keys["rope_theta"]}
        sliding = {"rope_type": "default", "rope_theta": local}
        out["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    return out


def weight_map(config: Olmo3Config) -> WeightMap:
    """OLMo 3's parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"),
    )
