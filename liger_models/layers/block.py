"""The block of most decoders: attention and an MLP, each with a norm before it."""

from typing import Any

from torch import Tensor, nn

from liger_models.layers.batch import BatchLayout


class PreNormBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it.

    The constructor of a derived class creates the four layers. ``mlp`` may be a mixture of experts.
    """

    input_layernorm: nn.Module
    self_attn: Any
    post_attention_layernorm: nn.Module
    mlp: Any

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """Run the block on ``residual + x`` [B, T, C]; return the next ``(x, residual)``, and any router logits."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        # A layout has experts only for a mixture.
        outputs: tuple[Tensor, ...] = self.mlp.add_norm(self.post_attention_layernorm, x, residual, *layout.experts)
        return outputs
