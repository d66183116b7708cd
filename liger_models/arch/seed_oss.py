"""Seed-OSS 36B: model_type ``seed_oss``.

Differs from Llama: ``attention_bias`` selects whether the q, k and v projections have biases, and
``attention_out_bias`` selects whether the output projection has one. In training, dropout is applied to the output of
each branch.

Source: https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct, transformers ``models/seed_oss``.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Seed-OSS model."""

    vocab_size: int = 155136
    intermediate_size: int = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1


class SeedOssBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: SeedOssConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__(config, layer, kernels)
        self.dropout = nn.Dropout(config.residual_dropout)

    def attention_options(self, config: SeedOssConfig, layer: int) -> dict[str, Any]:
        return {"o_bias": config.attention_out_bias}

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        x, residual = self.mlp.add_norm(self.post_attention_layernorm, self.dropout(x), residual)
        return self.dropout(x), residual


class LigerSeedOss(CausalLM):
    """Seed-OSS with its language-model head."""

    config_class = SeedOssConfig
    block_class = SeedOssBlock


def weight_map(config: SeedOssConfig) -> WeightMap:
    """Maps the parameters of Seed-OSS to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config, o_bias=config.attention_out_bias)


add_family(LigerSeedOss, model_type="seed_oss", hf_class="SeedOssForCausalLM", weight_map=weight_map)
