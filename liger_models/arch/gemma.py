"""Gemma 1 and 1.1, CodeGemma: model_type ``gemma``.

Differs from Llama: embeddings are multiplied by a constant, which is sqrt(hidden_size) rounded to the dtype of the
weights. Norms multiply by 1 + weight in fp32. The MLP's activation is tanh-approximated GELU. The head is tied to the
embedding.

Source: https://arxiv.org/abs/2403.08295, transformers ``models/gemma``.
"""

from dataclasses import dataclass

from liger_models.arch._gemma.base import GemmaModel
from liger_models.arch.registry import add_family
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig, check_values
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import zero_centered_norm


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Gemma model.

    The first releases set ``hidden_act`` to "gelu", but every implementation computes the tanh approximation.
    """

    activations = ("gelu_pytorch_tanh", "gelu_new", "gelu")

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, hidden_activation=(None, *self.activations), use_bidirectional_attention=(None, False))


class GemmaBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    norm_factory = staticmethod(zero_centered_norm)

    def build_mlp(self, config: GemmaConfig, layer: int, kernels: KernelOptions) -> GatedMLP:
        return GatedMLP(config.hidden_size, config.intermediate_size, act="gelu_tanh", kernel=kernels.swiglu)


class LigerGemma(GemmaModel):
    """Gemma with its language-model head."""

    config_class = GemmaConfig
    block_class = GemmaBlock


def weight_map(config: GemmaConfig) -> WeightMap:
    """Maps the parameters of Gemma to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)


add_family(LigerGemma, model_type="gemma", hf_class="GemmaForCausalLM", weight_map=weight_map)
