"""LLaMA 1, 2, 3, 3.1, 3.2 (text), 3.3, Code Llama, TinyLlama, SmolLM, Yi: all checkpoints with model_type ``llama``.

This is the plain decoder, and the descriptions of the other families say how they differ from it. Each block has
pre-norm attention and a pre-norm gated MLP, and adds the outputs of both to the residual stream.

Source: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783, transformers ``models/llama``.
"""

from dataclasses import dataclass

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(RMSNormDecoderConfig):
    """Sizes and constants of a Llama model."""

    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""


class LigerLlama(CausalLM):
    """Llama with its language-model head."""

    config_class = LlamaConfig
    block_class = LlamaBlock


def weight_map(config: LlamaConfig) -> WeightMap:
    """Maps the parameters of Llama to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        # Llama 2 checkpoints also store the rotary frequencies, which can be computed from the config.
        skip=["model.layers.{i}.self_attn.rotary_emb.inv_freq"],
    )


add_family(LigerLlama, model_type="llama", hf_class="LlamaForCausalLM", weight_map=weight_map)
