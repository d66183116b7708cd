"""Mixtral 8x7B, 8x22B: model_type ``mixtral``.

Differs from Mistral: the MLP is a mixture of experts, of which each token passes through ``num_experts_per_tok``, their
weights renormalised; no window by default. With ``output_router_logits`` the load-balancing loss is added to the loss.

Source: https://arxiv.org/abs/2401.04088, transformers ``models/mixtral``.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.config import DecoderConfig
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.head import LigerLMHead
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.rope import RotaryEmbedding
from liger_models.layers.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """Sizes and constants of a Mixtral model."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0


class MixtralBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, each addition done together with the norm that follows it."""

    def __init__(self, config: MixtralConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = partial(LigerRMSNorm, config.hidden_size, config.rms_norm_eps, kernel=kernels.rms_norm)
        self.input_layernorm = norm()
        self.self_attn = LigerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
            window=config.sliding_window,
            dropout=config.attention_dropout,
            rope_kernel=kernels.rope,
        )
        self.post_attention_layernorm = norm()
        self.mlp = LigerMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            normalize=True,
            router_jitter=config.router_jitter_noise,
            kernel=kernels.swiglu,
        )

    def forward(self, x: Tensor | None, residual: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair, and the router's logits."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, sequence)
        normed, residual = self.post_attention_layernorm.add(x, residual)
        x, router_logits = self.mlp(normed)
        return x, residual, router_logits


class LigerMixtral(CausalLM):
    """Mixtral with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = MixtralConfig

    def __init__(self, config: MixtralConfig, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MixtralBlock(config, i, self.kernels) for i in range(config.num_hidden_layers))
        self.norm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps, kernel=self.kernels.rms_norm)
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = RotaryEmbedding(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.rotary = nn.ModuleDict({"default": rotary})
        self.post_init()
