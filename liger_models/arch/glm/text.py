"""The ``-hf`` releases of GLM-4-9B from June 2024 (``glm``), GLM-4-0414 (9B, 32B) and GLM-Z1 (``glm4``).

These models differ from Llama: only the first half (``partial_rotary_factor``) of each head is rotated, in pairs (2i,
2i + 1). If ``attention_bias`` is set, the q, k and v projections have biases. The output projection never has a bias.
Checkpoints store the gate and up projections as one tensor. In ``glm4``, attention and the MLP also have a norm after
them.

Source: https://arxiv.org/abs/2406.12793, https://huggingface.co/zai-org/GLM-4-9B-0414, transformers ``models/glm``,
``models/glm4``.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.weight_map import WeightMap, decoder_map, fused_gate_up_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.block import PreNormBlock
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.norm import LigerRMSNorm


@dataclass(frozen=True, kw_only=True)
class GLMConfig(RMSNormDecoderConfig):
    """Sizes and constants of a GLM model."""

    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    partial_rotary_factor: float | None = 0.5
    attention_bias: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = field(default_factory=lambda: [151329, 151336, 151338])
    pad_token_id: int | None = 151329

    @property
    def rotary_width(self) -> int:
        """Number of rotated dimensions of a head. If ``partial_rotary_factor`` is None, all dimensions are rotated."""
        return int(self.head_size * (self.partial_rotary_factor or 1))


class GLMBlock(PreNormBlock):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def attention_options(self, config: GLMConfig, layer: int) -> dict[str, Any]:
        return {"o_bias": False, "interleaved": True}


class LigerGLM(CausalLM):
    """GLM with its language-model head."""

    config_class = GLMConfig
    block_class = GLMBlock


@dataclass(frozen=True, kw_only=True)
class GLM4Config(GLMConfig):
    """Sizes and constants of a GLM-4 model, as in `GLMConfig`."""


class GLM4Block(GLMBlock):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``; each addition is fused with the next norm."""

    def __init__(self, config: GLM4Config, layer: int, kernels: KernelOptions) -> None:
        super().__init__(config, layer, kernels)
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.post_self_attn_layernorm = norm()
        self.post_mlp_layernorm = norm()

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]; return ``(x, residual)`` for the next block."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        x = self.post_self_attn_layernorm(x)
        x, residual = self.mlp.add_norm(self.post_attention_layernorm, x, residual)
        return self.post_mlp_layernorm(x), residual


class LigerGLM4(CausalLM):
    """GLM-4 with its language-model head."""

    config_class = GLM4Config
    block_class = GLM4Block


def glm_map(config: GLMConfig) -> WeightMap:
    """Maps the parameters of GLM to the tensors of a Hugging Face checkpoint."""
    return _map(config, ("input_layernorm", "post_attention_layernorm"))


def weight_map(config: GLM4Config, prefix: str = "model", **more: Any) -> WeightMap:
    """Maps the parameters of GLM-4 to the tensors of a Hugging Face checkpoint.

    Args:
        config: config of the model.
        prefix, more: as in `decoder_map`.
    """
    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return _map(config, norms, prefix, **more)


def _map(config: GLMConfig, norms: tuple[str, ...], prefix: str = "model", **more: Any) -> WeightMap:
    gate_up = fused_gate_up_rows(f"{prefix}.layers.{{i}}.mlp.gate_up_proj.weight")
    return decoder_map(
        config,
        o_bias=False,
        norms=norms,
        instead={"mlp.gate_up_proj.weight": gate_up},
        prefix=prefix,
        **more,
    )


add_family(LigerGLM, model_type="glm", hf_class="GlmForCausalLM", weight_map=glm_map)
add_family(LigerGLM4, model_type="glm4", hf_class="Glm4ForCausalLM", weight_map=weight_map)
