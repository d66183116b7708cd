"""Granite 3.0 to 3.3 (dense models): model_type ``granite``.

Differs from Llama: config.json has keys for four additional factors. If a key is missing, its factor is 1. Embeddings
are multiplied by ``embedding_multiplier``. The outputs of attention and MLP are multiplied by ``residual_multiplier``
before they are added to the residual stream. Attention scores q·k are multiplied by ``attention_multiplier`` instead of
D^-0.5. Logits are divided by ``logits_scaling``.

Source: https://arxiv.org/abs/2408.13359, transformers ``models/granite``.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.lm_head import LigerLMHead


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Granite model."""

    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0


class GraniteBlock(PreNormBlock):
    """``h += m · attention(norm(h)); h += m · mlp(norm(h))``, where ``m`` is ``residual_multiplier``."""

    def __init__(self, config: GraniteConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__(config, layer, kernels)
        self.residual_multiplier = config.residual_multiplier

    def attention_options(self, config: GraniteConfig, layer: int) -> dict[str, Any]:
        return {"scale": config.attention_multiplier}

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        x, residual = self.mlp.add_norm(self.post_attention_layernorm, x * self.residual_multiplier, residual)
        return x * self.residual_multiplier, residual


class LigerGranite(CausalLM):
    """Granite with its language-model head."""

    config_class = GraniteConfig
    block_class = GraniteBlock

    def build_head(self, config: GraniteConfig) -> LigerLMHead:
        """A head whose logits are divided by ``logits_scaling``."""
        return LigerLMHead(
            config.hidden_size, config.vocab_size, logit_scale=1 / config.logits_scaling, kernels=self.kernels
        )

    def run_blocks(
        self, embeds: Tensor, layout: BatchLayout, states: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Scale the embeddings and call `Decoder.run_blocks`. A caller's ``inputs_embeds`` are also scaled."""
        return super().run_blocks(embeds * self.config.embedding_multiplier, layout, states)


def weight_map(config: GraniteConfig) -> WeightMap:
    """Maps the parameters of Granite to the tensors of a Hugging Face checkpoint."""
    return decoder_map(config)


add_family(LigerGranite, model_type="granite", hf_class="GraniteForCausalLM", weight_map=weight_map)
