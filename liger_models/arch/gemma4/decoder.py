"""The decoder of the Gemma 4 families, with its blocks and rotary embeddings."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.arch._gemma.attention import GemmaAttention
from liger_models.arch._gemma.decoder import GemmaDecoder
from liger_models.arch._gemma.per_layer import PerLayerBranch
from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.arch.gemma4.experts import Gemma4Experts
from liger_models.distributed.collectives import Group
from liger_models.kernels.options import KernelOptions
from liger_models.layers.layer import Layer
from liger_models.layers.linear import replicated
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import fp32_norm
from liger_models.layers.rope import ProportionalRotaryEmbedding, RotaryEmbedding


class LayerScale(Layer):
    """Multiplies its input by a scalar that comes from the checkpoint and is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self.group: Group | None = None

    def draw(self, std: float) -> bool:
        """Set the scalar to 1."""
        nn.init.ones_(self.weight)
        return True

    def sum_gradients(self, group: Group) -> bool:
        """Store the group over which the gradient of the scalar will be all-reduced. The gradient exists only if a user
        makes the scalar trainable."""
        self.group = group
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [...] by the scalar."""
        return x * replicated(self.weight, self.group).to(x.dtype)


class Gemma4Block(nn.Module):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h))); h += per-layer branch(h); h *= scale``.

    In a model with experts, the second step is ``h += norm(norm(mlp(norm(h))) + norm(experts(norm(h))))``.
    """

    def __init__(self, config: Gemma4TextConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        C, norm = config.hidden_size, fp32_norm(config, kernels)
        self.layer = layer
        # Each branch has a norm before it and another after it.
        self.input_layernorm = norm(C)
        self.self_attn = GemmaAttention(config, layer, norm, kernels)
        self.post_attention_layernorm = norm(C)
        self.pre_feedforward_layernorm = norm(C)
        self.mlp = GatedMLP(C, config.mlp_size_of(layer), act="gelu_tanh", kernel=kernels.swiglu)
        self.post_feedforward_layernorm = norm(C)
        # Depending on the model, blocks have experts in addition to the MLP, or a second input.
        self.moe: Gemma4Experts | None = None
        if config.enable_moe_block:
            self.moe = Gemma4Experts(config, norm, kernels)
            self.pre_feedforward_layernorm_2 = norm(C)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(C), norm(C)
        self.per_layer = PerLayerBranch(config, norm) if config.hidden_size_per_layer_input else None
        self.layer_scalar = LayerScale()

    def forward(self, x: Tensor | None, residual: Tensor, layout: Any) -> tuple[Tensor | None, ...]:
        """Run the block on ``residual + x`` [B, T, C]. Return ``(x, residual)`` for the next block, and tensors for
        `carry`."""
        # Attention. ``x`` is the branch's output, which the next norm adds to the stream.
        attended: Any = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        x, residual, *carried = attended  # keys and values, unless another layer computed them
        # The MLP, which all models have.
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(self.pre_feedforward_layernorm, x, residual)

        if self.moe is not None:
            # The experts and their router read the stream before the MLP.
            y, router_logits = self.moe(self.pre_feedforward_layernorm_2(residual), *layout.experts, stream=residual)
            carried.append(router_logits)
            y = self.post_feedforward_layernorm_2(y)
            x, _ = self.post_feedforward_layernorm.add(y, self.post_feedforward_layernorm_1(x))
        else:
            x = self.post_feedforward_layernorm(x)
        residual = residual + x

        if self.per_layer is not None:
            residual = residual + self.per_layer(residual, layout.per_layer[self.layer])
        # The scalar multiplies the whole stream. All outputs are already added to the stream, so the first result is
        # None.
        return None, self.layer_scalar(residual), *carried


class Gemma4Decoder(GemmaDecoder):
    """The decoder of the Gemma 4 families."""

    block_class = Gemma4Block
    replays_routing = True

    def build_rotary(self, config: Gemma4TextConfig) -> dict[str, nn.Module]:
        """One rotary embedding per layer type. Layers with full attention rotate only some pairs of dimensions."""
        # The two layer types differ in head dimension, so their tables differ in width.
        full = ProportionalRotaryEmbedding(config.global_head_dim, config.rope_theta, config.partial_rotary_factor)
        sliding = RotaryEmbedding(config.head_size, config.rope_local_base_freq)
        return {"full_attention": full, "sliding_attention": sliding}
