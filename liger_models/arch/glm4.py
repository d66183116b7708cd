"""GLM-4-0414 (9B, 32B), GLM-Z1: model_type ``glm4``.

Differs from Llama: attention and the MLP have a norm before and a norm after them; only the first half
(``partial_rotary_factor``) of each head is rotated, in pairs (2i, 2i + 1); the q, k and v projections have biases
(``attention_bias``), the output projection never has one. Checkpoints store the gate and up projections as one tensor.

Source: https://arxiv.org/abs/2406.12793, https://huggingface.co/zai-org/GLM-4-9B-0414, transformers ``models/glm4``.
"""

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import CheckpointFormat
from liger_models.convert.weight_map import WeightMap, decoder_map, fused_gate_up_rows
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class GLM4Config(RMSNormDecoderConfig):
    """Sizes and constants of a GLM-4 model."""

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
        """Number of dimensions of a head that are rotated: without a factor (null in config.json) all."""
        return int(self.head_size * (self.partial_rotary_factor or 1))


class GLM4Block(nn.Module):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``; each addition is fused with the next norm."""

    def __init__(self, config: GLM4Config, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.self_attn = LigerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
            qkv_bias=config.attention_bias,
            interleaved=True,
            dropout=config.attention_dropout,
            rope_kernel=kernels.rope,
        )
        self.post_self_attn_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)
        self.post_mlp_layernorm = norm()

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is yet to be added to residual [B, T, C]; returns the next such pair."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        x = self.post_self_attn_layernorm(x)
        x, residual = self.mlp.add_norm(self.post_attention_layernorm, x, residual)
        return self.post_mlp_layernorm(x), residual


class LigerGLM4(CausalLM):
    """GLM-4 with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = GLM4Config

    def __init__(self, config: GLM4Config, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(GLM4Block(config, i, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.rms_norm)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = RotaryEmbedding(
            config.rotary_width, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.rotary = nn.ModuleDict({"default": rotary})
        self.post_init()


def weight_map(config: GLM4Config) -> WeightMap:
    """Maps the parameters of GLM-4 to the tensors of a Hugging Face checkpoint."""
    return decoder_map(
        config,
        qkv_bias=config.attention_bias,
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        instead={"mlp.gate_up_proj.weight": fused_gate_up_rows("model.layers.{i}.mlp.gate_up_proj.weight")},
    )


add_family(LigerGLM4, CheckpointFormat(model_type="glm4", hf_class="Glm4ForCausalLM", weight_map=weight_map))
