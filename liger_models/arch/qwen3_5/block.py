"""The block of Qwen3-Next and Qwen3.5, with linear attention in most layers and gated full attention in the others.

Differs from Qwen3: three of every four layers are Gated DeltaNet (`LigerGatedDeltaNet`), whose state does not grow with
the length of the sequence. Every fourth layer has full attention, which rotates only a part of each head. Full
attention multiplies its output by the sigmoid of a gate, which the query projection computes as well. All norms except
the norm inside Gated DeltaNet multiply by 1 + weight in fp32.

Source: https://arxiv.org/abs/2412.06464, transformers ``models/qwen3_next``.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from liger_models.base.causal_lm import CausalLM
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import RMSNormDecoderConfig, check_multiple
from liger_models.layers.gated_delta_net import LigerGatedDeltaNet
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.moe import LigerSharedExpertMoE
from liger_models.layers.norm import LigerRMSNorm, zero_centered_norm
from liger_models.layers.qk_norm_attention import LigerGatedAttention

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(RMSNormDecoderConfig):
    """Sizes and constants of Qwen3-Next and Qwen3.5.

    If ``layer_types`` is given, it overrides ``full_attention_interval``.
    """

    layer_kinds = (LINEAR, FULL)

    num_attention_heads: int = 16
    head_dim: int | None = 256
    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 0.25
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4
    layer_types: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_multiple(self, linear_num_value_heads="linear_num_key_heads")

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        if self.layer_types is not None:
            return self.layer_types[layer] == LINEAR
        return (layer + 1) % self.full_attention_interval != 0

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return False


@dataclass(frozen=True, kw_only=True)
class HybridMoeConfig(HybridConfig):
    """Sizes and constants of the models with a mixture of experts."""

    num_key_value_heads: int | None = 2
    hidden_size: int = 2048
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 10
    num_experts: int = 512
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    @property
    def normalizes(self) -> bool:
        """Whether the routing weights of a token are divided by their sum."""
        return True

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return True


class HybridBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, where attention is linear or full.

    Args:
        config: sizes and constants of the model.
        layer: index of the layer.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: HybridConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = zero_centered_norm(config, kernels)
        self.input_layernorm = norm(config.hidden_size)
        self.linear = config.is_linear(layer)
        # Most layers have linear attention, and the others have gated softmax attention.
        if self.linear:
            self.linear_attn = LigerGatedDeltaNet(
                config.hidden_size,
                config.linear_num_key_heads,
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
                config.linear_conv_kernel_dim,
                layer=layer,
                eps=config.rms_norm_eps,
                kernel=kernels.linear_attention,
            )
        else:
            self.self_attn = LigerGatedAttention.from_config(config, layer, kernels, norm=norm)
        self.post_attention_layernorm = norm(config.hidden_size)
        # The MLP is a mixture of experts with one shared expert, or a dense MLP.
        self.mlp: LigerSwiGLUMLP | LigerSharedExpertMoE
        if isinstance(config, HybridMoeConfig) and config.is_sparse(layer):
            self.mlp = LigerSharedExpertMoE(
                config.hidden_size,
                config.moe_intermediate_size,
                config.num_experts,
                Routing(config.num_experts_per_tok, config.normalizes, round_weights=True),
                shared_size=config.shared_expert_intermediate_size,
                kernel=kernels.swiglu,
            )
        else:
            self.mlp = LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """Run the block on ``residual + x`` [B, T, C]. Return ``(x, residual)`` for the next block, and router logits
        if the block has experts."""
        # Both kinds of attention have the same signature, and so do both kinds of MLP.
        attention = self.linear_attn if self.linear else self.self_attn
        x, residual = attention.add_norm(self.input_layernorm, x, residual, layout)
        return self.mlp.add_norm(self.post_attention_layernorm, x, residual, *layout.experts)


class HybridModel(CausalLM):
    """A decoder whose blocks are `HybridBlock`s."""

    block_class = HybridBlock

    def build_norm(self, config: HybridConfig) -> LigerRMSNorm:
        """A norm that scales by 1 + weight."""
        return zero_centered_norm(config, self.kernels)(config.hidden_size)
