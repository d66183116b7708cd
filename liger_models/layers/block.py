"""The blocks of most decoders: attention and an MLP, with norms before them, after them, or both."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.mlp import LigerSwiGLUMLP
from liger_models.layers.moe import LigerSharedExpertMoE
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.qk_norm_attention import LigerQKNormAttention


class Block(nn.Module):
    """Base class of blocks, with methods that create the layers of a block. By default, the layers are those of Llama.

    For a layer that differs from Llama's, a derived class overrides the method that creates the layer. If only the
    class of the attention differs, the derived class sets ``attention_class``.
    """

    attention_class: ClassVar[Any] = LigerAttention
    """The class of the attention. The class must have a method like `LigerAttention.from_config`."""

    def norm_factory(self, config: Any, kernels: KernelOptions) -> Callable[[int], nn.Module]:
        """Return a function that creates a norm of a given width."""
        return partial(LigerRMSNorm, eps=config.rms_norm_eps, kernel=kernels.rms_norm)

    def attention_options(self, config: Any, layer: int) -> dict[str, Any]:
        """Return keyword arguments that `build_attention` passes to ``attention_class.from_config``."""
        return {}

    def build_attention(self, config: Any, layer: int, kernels: KernelOptions) -> Any:
        """Create the attention of a layer."""
        options = self.attention_options(config, layer)
        if issubclass(self.attention_class, LigerQKNormAttention):
            options = {"norm": self.norm_factory(config, kernels), **options}
        return self.attention_class.from_config(config, layer, kernels, **options)

    def build_mlp(self, config: Any, layer: int, kernels: KernelOptions) -> Any:
        """Create the MLP of a layer, which is a mixture of experts if ``config.is_sparse(layer)`` is True."""
        if config.is_sparse(layer):
            return self.build_experts(config, kernels)
        return LigerSwiGLUMLP(config, kernel=kernels.swiglu)

    def build_experts(self, config: Any, kernels: KernelOptions) -> Any:
        """Create a mixture of experts. A derived class whose config has sparse layers must override this method."""
        raise NotImplementedError


class PreNormBlock(Block):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it."""

    def __init__(self, config: Any, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = self.norm_factory(config, kernels)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = self.build_attention(config, layer, kernels)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = self.build_mlp(config, layer, kernels)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """Run the block on ``residual + x`` [B, T, C].

        Return ``(x, residual)`` for the next block, and the router logits if there are any.
        """
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        # `layout.experts` holds the experts of each token if the caller has chosen them. The tuple is empty if the
        # router chooses the experts, or if the MLP is dense.
        outputs: tuple[Tensor, ...] = self.mlp.add_norm(self.post_attention_layernorm, x, residual, *layout.experts)
        return outputs


class QKNormBlock(PreNormBlock):
    """A `PreNormBlock` whose attention normalizes queries and keys."""

    attention_class = LigerQKNormAttention


class PostNormBlock(Block):
    """``h += norm(attention(h)); h += norm(mlp(h))``; of each addition, only the sum is saved for the backward."""

    def __init__(self, config: Any, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = self.norm_factory(config, kernels)
        self.self_attn = self.build_attention(config, layer, kernels)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = self.build_mlp(config, layer, kernels)
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]. Return ``(x, residual)`` for the next block."""
        x, residual = self.self_attn.add_norm(None, x, residual, layout)
        x, residual = self.mlp.add_norm(None, self.post_attention_layernorm(x), residual)
        return self.post_feedforward_layernorm(x), residual


class SandwichNormBlock(Block):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``; each addition is fused with the next norm."""

    def __init__(self, config: Any, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        norm = self.norm_factory(config, kernels)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = self.build_attention(config, layer, kernels)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.pre_feedforward_layernorm = norm(config.hidden_size)
        self.mlp = self.build_mlp(config, layer, kernels)
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [B, T, C]. Return ``(x, residual)`` for the next block."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        # The output of each sublayer, [B, T, C], is normalized before it is added to the residual stream.
        x = self.post_attention_layernorm(x)
        x, residual = self.mlp.add_norm(self.pre_feedforward_layernorm, x, residual)
        return self.post_feedforward_layernorm(x), residual


class SharedExpertBlock(PreNormBlock):
    """A `PreNormBlock` in which the MLP of a sparse layer is a mixture of experts with shared experts."""

    experts: ClassVar[Mapping[str, Any]] = {"correction_bias": True}
    """Keyword arguments for `LigerSharedExpertMoE.from_config`."""

    def build_experts(self, config: Any, kernels: KernelOptions) -> Any:
        """Create a mixture of experts with shared experts."""
        return LigerSharedExpertMoE.from_config(config, kernels, **self.experts)
