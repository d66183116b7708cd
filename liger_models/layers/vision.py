"""Parts of vision towers. A vision tower turns the concatenated patches of several images into image tokens."""

from collections.abc import Callable

from torch import Tensor, nn

from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.mlp import GatedMLP, LigerMLP
from liger_models.layers.norm import Norm


class VisionBlock(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``; each addition is fused with the norm that follows it.

    Args:
        hidden_size: C.
        num_heads: number of query heads, which is also the number of KV heads.
        norm: function without arguments that returns a norm.
        mlp: the MLP that follows the second norm.
        kernels: which parts run on fused kernels.
        rotary: name of the rotary embedding, as in `BatchLayout.tables`; None for no rotation.
        bias: whether the projections of attention have biases.
        o_bias: whether the output projection has a bias; by default the same as ``bias``.
        interleaved: as in `LigerAttention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        norm: Callable[[], Norm],
        mlp: GatedMLP | LigerMLP,
        kernels: KernelOptions,
        *,
        rotary: str | None = "default",
        bias: bool = True,
        o_bias: bool | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attn = LigerAttention(
            hidden_size, num_heads, num_heads, hidden_size // num_heads,
            layer=0, qkv_bias=bias, o_bias=bias if o_bias is None else o_bias, rotary=rotary, interleaved=interleaved,
            rope_kernel=kernels.rope,
        )  # fmt: skip
        self.norm2 = norm()
        self.mlp = mlp

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [1, N, C]. Return ``(x, residual)`` for the next block."""
        x, residual = self.attn.add_norm(self.norm1, x, residual, layout)
        return self.mlp.add_norm(self.norm2, x, residual)


class PatchMerger(nn.Module):
    """Merges a square of neighboring patches into one image token: ``fc2(gelu(fc1(concat(norm(patches)))))``.

    Args:
        norm: function that returns a norm of a given width.
        hidden_size: C, the width of a patch.
        out_size: width of an image token.
        merge: number of patches along the side of the square of patches that becomes one token.
        norm_of_all: whether to normalize the concatenated patches instead of each patch.
        kernels: which parts run on fused kernels.
    """

    def __init__(
        self,
        norm: Callable[[int], Norm],
        hidden_size: int,
        out_size: int,
        merge: int,
        kernels: KernelOptions,
        *,
        norm_of_all: bool = False,
    ) -> None:
        super().__init__()
        wide = hidden_size * merge * merge
        self.norm_of_all, self.patches = norm_of_all, merge * merge
        self.norm = norm(wide if norm_of_all else hidden_size)
        self.mlp = LigerMLP(wide, wide, out_size, act="gelu", kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Merge ``residual + x`` [1, N, C] into image tokens [N / merge², out_size]."""
        # The norm of concatenated patches covers several rows of the residual stream, so it is not fused with the
        # addition.
        if self.norm_of_all:
            total = residual if x is None else (residual + x).to(residual.dtype)
            normed = self.norm(self._grouped(total))
        else:
            normed = self._grouped(self.norm.add(x, residual)[0])
        y: Tensor = self.mlp(normed)
        return y

    def _grouped(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.patches * x.shape[-1])
