"""Gemma 3 text models (270M, 1B): model_type ``gemma3_text``.

Differs from Llama: attention and the MLP have a norm before and a norm after them. Each head of q and k is normalized
before RoPE. All norms multiply by 1 + weight in fp32. Five of every six layers attend only to the last
``sliding_window`` tokens; their rotary base is ``rope_local_base_freq``, without rope scaling. Scores are divided by
sqrt(``query_pre_attn_scalar``) instead of sqrt(head dimension). Embeddings are multiplied by a constant, which is
sqrt(hidden_size) rounded to the dtype of the weights. The MLP's activation is tanh-approximated GELU. The head is tied
to the embedding.

Source: https://arxiv.org/abs/2503.19786, transformers ``models/gemma3``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_models.arch._gemma.base import (
    SANDWICH_NORMS,
    WRITE_ACTIVATION,
    CappedGemmaModel,
    GemmaModel,
    GemmaSandwichBlock,
)
from liger_models.arch.registry import add_family
from liger_models.convert.config_map import flat_rope
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.config import RMSNormDecoderConfig, check_values
from liger_models.layers.qk_norm_attention import LigerQKNormAttention
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Gemma 3 text model. In config.json, ``hidden_act`` is called ``hidden_activation``.

    ``rope_theta`` and ``rope_scaling`` apply to the layers without a window. If ``layer_types`` is given, it overrides
    ``sliding_window_pattern``.
    """

    activations = ("gelu_pytorch_tanh", "gelu_new")

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10000.0
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, use_bidirectional_attention=(None, False))

    def layer_type(self, layer: int) -> str:
        """Type of a layer, which is also the name of its rotary embedding: "sliding_attention" or "full_attention"."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if (layer + 1) % self.sliding_window_pattern else "full_attention"


class Gemma3Block(GemmaSandwichBlock):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``; each addition is fused with the next norm."""

    attention_class = LigerQKNormAttention

    def attention_options(self, config: Gemma3TextConfig, layer: int) -> dict[str, Any]:
        # The type of a layer determines its window and the frequencies of its rotary embedding.
        layer_type = config.layer_type(layer)
        return {
            "scale": config.query_pre_attn_scalar**-0.5,
            "window": config.sliding_window if layer_type == "sliding_attention" else None,
            "rotary": layer_type,
        }


class Gemma3Decoder(GemmaModel):
    """The decoder of Gemma 3, for models with and without images."""

    block_class = Gemma3Block

    def build_rotary(self, config: Gemma3TextConfig) -> dict[str, nn.Module]:
        """One rotary embedding per layer type. The base of layers with a window is ``rope_local_base_freq``."""
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        return {"full_attention": super().build_rotary(config)["default"], "sliding_attention": sliding}


class LigerGemma3Text(Gemma3Decoder, CappedGemmaModel):
    """Gemma 3 (text) with its language-model head."""

    config_class = Gemma3TextConfig


IGNORED_KEYS = (
    "cache_implementation",  # a generation setting
    "_sliding_window_pattern",  # redundant, because layer_types was computed from it
    "attn_logit_softcapping",  # a key of Gemma 2 that transformers does not read for Gemma 3
)


NORMS = ("self_attn.q_norm", "self_attn.k_norm", *SANDWICH_NORMS)
"""Names of a block's norms, which are the same in this package and in checkpoints."""


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the activation from ``hidden_activation``. Also read the ``rope_parameters`` that transformers 5 writes,
    with an entry for each layer type."""
    flat = flat_rope(hf, Gemma3TextConfig.rope_theta)
    return flat | {"hidden_act": flat.pop("hidden_activation", None)}


to_json = WRITE_ACTIVATION


def weight_map(config: Gemma3TextConfig) -> WeightMap:
    """Maps the parameters of Gemma 3 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, norms=NORMS)


add_family(
    LigerGemma3Text,
    model_type="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=to_json,
    ignored_keys=IGNORED_KEYS,
)
