"""Gemma 2: model_type ``gemma2``.

Differs from Llama: attention and the MLP have a norm before and a norm after them, and norms multiply by 1 + weight in
fp32. Layers with an even index attend only to the last ``sliding_window`` tokens. An attention score ``s`` becomes ``c
· tanh(s / c)``, where ``c`` is ``attn_logit_softcapping``. Logits are capped in the same way, with
``final_logit_softcapping`` as ``c``. Scores are divided by sqrt(``query_pre_attn_scalar``) instead of sqrt(head
dimension). Embeddings are multiplied by a constant, which is sqrt(hidden_size) rounded to the dtype of the weights. The
MLP's activation is tanh-approximated GELU. The head is tied to the embedding.

Source: https://arxiv.org/abs/2408.00118, transformers ``models/gemma2``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liger_models.arch._gemma.base import SANDWICH_NORMS, WRITE_ACTIVATION, CappedGemmaModel, GemmaSandwichBlock
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.config import RMSNormDecoderConfig, check_values, is_sliding


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(RMSNormDecoderConfig):
    """Sizes and constants of a Gemma 2 model. In config.json, ``hidden_act`` is called ``hidden_activation``."""

    activations = ("gelu_pytorch_tanh", "gelu_new")

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, use_bidirectional_attention=(None, False))

    def window(self, layer: int) -> int | None:
        """The attention window of a layer, in tokens; None for full attention."""
        return self.sliding_window if is_sliding(layer, self.layer_types, default=layer % 2 == 0) else None


class Gemma2Block(GemmaSandwichBlock):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``; each addition is fused with the next norm."""

    def attention_options(self, config: Gemma2Config, layer: int) -> dict[str, Any]:
        # Scores are capped, and scaled by query_pre_attn_scalar instead of the head dimension.
        scale, softcap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping
        return {"scale": scale, "window": config.window(layer), "softcap": softcap}


class LigerGemma2(CappedGemmaModel):
    """Gemma 2 with its language-model head."""

    config_class = Gemma2Config
    block_class = Gemma2Block


IGNORED_KEYS = ("cache_implementation", "sliding_window_size")  # the second is an old name of sliding_window


def from_json(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the activation from ``hidden_activation``, which overrides ``hidden_act`` as in transformers."""
    flat = dict(hf)
    return flat | {"hidden_act": flat.pop("hidden_activation", None)}


def weight_map(config: Gemma2Config) -> WeightMap:
    """Maps the parameters of Gemma 2 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, norms=SANDWICH_NORMS)


add_family(
    LigerGemma2,
    model_type="gemma2",
    hf_class="Gemma2ForCausalLM",
    weight_map=weight_map,
    from_json=from_json,
    to_json=WRITE_ACTIVATION,
    ignored_keys=IGNORED_KEYS,
)
