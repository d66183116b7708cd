"""StarCoder2 3B, 7B, 15B: model_type ``starcoder2``.

Differs from Llama: norms are LayerNorms with bias. Linear layers have biases if ``use_bias`` is set. The MLP has no
gate, and its activation is GELU. If ``sliding_window`` is set, all layers attend only to the last ``sliding_window``
tokens. In training, dropout is applied to the embeddings and to the output of each branch.

Source: https://arxiv.org/abs/2402.19173, transformers ``models/starcoder2``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import DecoderConfig
from liger_models.layers.mlp import ACTIVATIONS, LigerMLP
from liger_models.layers.norm import LigerLayerNorm


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(DecoderConfig):
    """Sizes and constants of a StarCoder2 model."""

    activations = ("gelu_pytorch_tanh", "gelu_new", "gelu")

    vocab_size: int = 49152
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 30
    num_attention_heads: int = 24
    num_key_value_heads: int | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.018042
    norm_epsilon: float = 1e-5
    use_bias: bool = True
    sliding_window: int | None = None
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256


class Starcoder2Block(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: Starcoder2Config, layer: int, kernels: KernelOptions) -> None:
        super().__init__(config, layer, kernels)
        self.dropout = nn.Dropout(config.residual_dropout)

    def norm_factory(self, config: Starcoder2Config, kernels: KernelOptions) -> partial[LigerLayerNorm]:
        return partial(LigerLayerNorm, eps=config.norm_epsilon, kernel=kernels.layer_norm)

    def attention_options(self, config: Starcoder2Config, layer: int) -> dict[str, Any]:
        return {"qkv_bias": config.use_bias, "o_bias": config.use_bias, "window": config.sliding_window}

    def build_mlp(self, config: Starcoder2Config, layer: int, kernels: KernelOptions) -> LigerMLP:
        # The MLP is a matrix, an activation and another matrix, without a gate.
        return LigerMLP(
            config.hidden_size,
            config.intermediate_size,
            act=ACTIVATIONS[config.hidden_act],
            bias=config.use_bias,
            kernel=kernels.swiglu,
        )

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        x, residual = self.mlp.add_norm(self.post_attention_layernorm, self.dropout(x), residual)
        return self.dropout(x), residual


class LigerStarcoder2(CausalLM):
    """StarCoder2 with its language-model head."""

    config_class = Starcoder2Config
    block_class = Starcoder2Block

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[Tensor, tuple[int, int]]:
        """Return the embeddings of this rank's tokens after dropout, and the shape (B, T) of the whole batch."""
        embeds, shape = super().embed(input_ids, inputs_embeds)
        return functional.dropout(embeds, self.config.embedding_dropout, self.training), shape

    def build_norm(self, config: Starcoder2Config) -> LigerLayerNorm:
        """A LayerNorm with bias."""
        return LigerLayerNorm(config.hidden_size, config.norm_epsilon, kernel=self.kernels.layer_norm)


IGNORED_KEYS = (
    "mlp_type",
    "norm_type",
)  # keys of the first releases, the same in all models; transformers does not read them


def weight_map(config: Starcoder2Config) -> WeightMap:
    """Maps the parameters of StarCoder2 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.use_bias,
        o_bias=config.use_bias,
        mlp_bias=config.use_bias,
        norm_bias=True,
        plain_mlp=("c_fc", "c_proj"),
    )


add_family(
    LigerStarcoder2,
    model_type="starcoder2",
    hf_class="Starcoder2ForCausalLM",
    weight_map=weight_map,
    ignored_keys=IGNORED_KEYS,
)
