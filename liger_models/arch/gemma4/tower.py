"""The vision tower of Gemma 4, which turns patches into image tokens.

Images keep their aspect ratio. A patch has a learned position for its column and another for its row. RoPE of queries
and keys also encodes column and row. Blocks have norms before and after attention and MLP; queries, keys and values are
also normalized. In E2B and E4B, the inputs and outputs of linear layers are clipped. The outputs of the last block are
averaged over squares of patches and multiplied by sqrt(C). In 26B-A4B and 31B, the results are then standardized. A
norm and a projection turn the results into image tokens.

Source: transformers ``models/gemma4``.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.kernels.options import KernelOptions
from liger_models.kernels.rope.qkv_norm_rope import qkv_norm_rope, qkv_norm_rope_reference
from liger_models.layers.attention_backends import attention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import check_values
from liger_models.layers.frozen import dtype_of
from liger_models.layers.layer import Layer
from liger_models.layers.linear import local
from liger_models.layers.norm import LigerRMSNorm, add_norm
from liger_models.layers.recompute import recomputes, run_twice
from liger_models.layers.rope import AxialRotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig:
    """Sizes of the vision tower.

    Raises:
        ValueError: the head dimension is not a multiple of 4, the number of KV heads differs from the number of query
            heads, or the activation or dropout is not supported.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    rope_theta: float = 100.0
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 4 != 0:
            raise ValueError(
                "Gemma4VisionConfig: head_dim must be a multiple of 4, to rotate by row and column, got "
                f"{self.head_dim}. Check config.json."
            )
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"Gemma4VisionConfig: num_key_value_heads ({self.num_key_value_heads}) must be num_attention_heads "
                f"({self.num_attention_heads}). The heads of the tower share no keys."
            )
        check_values(self, hidden_activation=("gelu_pytorch_tanh",), attention_dropout=(0.0,))

    @property
    def patch_values(self) -> int:
        """Number of pixel values in a patch, three for each pixel."""
        return 3 * self.patch_size**2

    @property
    def pooled(self) -> int:
        """Side of the square of patches that becomes one image token."""
        return self.pooling_kernel_size


class ClippedLinear(Layer):
    """A linear layer whose input and output are clipped to bounds that come from the checkpoint and are not trained.

    Args:
        in_features, out_features: as in `torch.nn.Linear`.
        clips: whether the layer has bounds.
    """

    def __init__(self, in_features: int, out_features: int, clips: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=False)
        bounds = [nn.Parameter(torch.empty(2), requires_grad=False) if clips else None for _ in range(2)]
        self.least, self.most = bounds
        """The lower bounds (``least``) and the upper bounds (``most``). Each tensor holds a bound of the input and a
        bound of the output."""

    def draw(self, std: float) -> bool:
        """Set the bounds to infinity, so that a new model clips nothing."""
        for bound, value in ((self.least, float("-inf")), (self.most, float("inf"))):
            if bound is not None:
                nn.init.constant_(bound, value)
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        if self.least is None or self.most is None:
            y: Tensor = self.linear(x)
            return y
        # Each parameter holds a bound of the input, then a bound of the output.
        (low, low_output), (high, high_output) = local(self.least).unbind(), local(self.most).unbind()
        clipped: Tensor = self.linear(x.clamp(low, high)).clamp(low_output, high_output)
        return clipped


class Gemma4VisionAttention(Layer):
    """Attention among the patches of an image, with norms of q, k and v, and with RoPE for columns and rows.

    Args:
        config: sizes of the vision tower.
        norm: function that returns a norm of a given width.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Gemma4VisionConfig, norm: partial[LigerRMSNorm], kernels: KernelOptions) -> None:
        super().__init__()
        C, self.num_heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        width, clips = self.num_heads * self.head_dim, config.use_clipped_linears
        self.q_proj, self.k_proj, self.v_proj = (ClippedLinear(C, width, clips) for _ in range(3))
        self.o_proj = ClippedLinear(width, C, clips)
        self.q_norm, self.k_norm = norm(self.head_dim), norm(self.head_dim)
        self.rope_kernel = kernels.rope

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """Map x [1, N, C] to [1, N, C]."""
        # q, k and v have separate projections, because each clips to its own bounds: [1, N, H, D] each.
        heads = [proj(x).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        packed = torch.stack(heads, -2).flatten(2)  # the query, key and value of a head are adjacent
        split = qkv_norm_rope if self.rope_kernel and self.q_norm.kernel else qkv_norm_rope_reference
        q, k, v = split(
            packed, *layout.tables["default"], self.num_heads, self.num_heads, self.head_dim,
            self.q_norm.local_weight(packed), self.k_norm.local_weight(packed), eps=self.q_norm.eps,
        )  # fmt: skip
        # The norms of q and k replace the scale of the scores.
        y: Tensor = self.o_proj(attention(q, k, v, layout, scale=1.0).flatten(2))
        return y


class Gemma4VisionMLP(nn.Module):
    """``down(gelu(gate(x)) · up(x))``.

    Args:
        config: sizes of the vision tower.
    """

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        C, width, clips = config.hidden_size, config.intermediate_size, config.use_clipped_linears
        self.gate_proj, self.up_proj = ClippedLinear(C, width, clips), ClippedLinear(C, width, clips)
        self.down_proj = ClippedLinear(width, C, clips)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., C]."""
        y: Tensor = self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return y


class Gemma4VisionBlock(Layer):
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``."""

    def __init__(self, config: Gemma4VisionConfig, norm: partial[LigerRMSNorm], kernels: KernelOptions) -> None:
        super().__init__()
        C = config.hidden_size
        self.input_layernorm = norm(C)
        self.self_attn = Gemma4VisionAttention(config, norm, kernels)
        self.post_attention_layernorm = norm(C)
        self.pre_feedforward_layernorm = norm(C)
        self.mlp = Gemma4VisionMLP(config)
        self.post_feedforward_layernorm = norm(C)
        self.recompute = False
        """Whether to save only the sum of the inputs and recompute the rest in the backward."""

    def set_policy(self, policy: str) -> None:
        """Recompute the block in the backward unless the policy is "none"."""
        self.recompute = policy != "none"

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """Run the block on ``residual + x`` [1, N, C]; return ``(x, residual)`` for the next block."""
        if recomputes(self):
            total, _ = add_norm(None, x, residual)
            y, residual = run_twice(self._branches, None, total, layout)
            return y, residual
        return self._branches(x, residual, layout)

    def _branches(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        normed, residual = add_norm(self.input_layernorm, x, residual)
        # The result of a branch is normalized before it joins the residual stream.
        x = self.post_attention_layernorm(self.self_attn(normed, layout))
        normed, residual = add_norm(self.pre_feedforward_layernorm, x, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class Standardize(Layer):
    """``(x − bias) · scale``, where bias and scale come from the checkpoint and are not trained.

    Args:
        width: C.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias, self.scale = (nn.Parameter(torch.empty(width), requires_grad=False) for _ in range(2))

    def draw(self, std: float) -> bool:
        """Set bias to 0 and scale to 1, so that standardization has no effect in a new model."""
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.scale)
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., C] in the dtype of x."""
        return (x - local(self.bias).to(x.dtype)) * local(self.scale).to(x.dtype)


class Gemma4Tower(nn.Module):
    """The vision tower, which turns patches into image tokens.

    Args:
        config: sizes of the vision tower.
        width: width of an image token.
        kernels: which parts of the model run on fused kernels.
    """

    def __init__(self, config: Gemma4VisionConfig, width: int, kernels: KernelOptions) -> None:
        super().__init__()
        self.pool, self.positions, C = config.pooling_kernel_size, config.position_embedding_size, config.hidden_size
        norm = partial(LigerRMSNorm, eps=config.rms_norm_eps, casting_mode="gemma", kernel=kernels.rms_norm)
        self.patch_embed = nn.Linear(config.patch_values, C, bias=False)
        self.pos_embed = nn.Embedding(2 * self.positions, C)
        """The learned positions of all columns, followed by the learned positions of all rows."""
        self.blocks = nn.ModuleList(Gemma4VisionBlock(config, norm, kernels) for _ in range(config.num_hidden_layers))
        self.standard = Standardize(C) if config.standardize else None
        self.soft_emb_norm = norm(C, elementwise_affine=False)
        self.projection = nn.Linear(C, width, bias=False)
        self.rotary = AxialRotaryEmbedding(config.head_dim, config.rope_theta)

    def forward(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """Compute the image tokens of all images.

        Args:
            pixels: [n, P, values of a patch], with values from 0 to 1; padding comes last.
            positions: [n, P, 2] int64, column and row of each patch, −1 for padding.

        Returns:
            [n · P / patches per token, C], the tokens of all images in order, followed by the tokens of padding.
        """
        (n, P), valid, coordinates = pixels.shape[:2], (positions >= 0).all(-1), positions.clamp_min(0)
        # Embedded patches [1, n · P, C] with the learned positions of their column and row; padding has no position.
        table = local(self.pos_embed.weight)
        placed = F.embedding(coordinates[..., 0], table) + F.embedding(coordinates[..., 1] + self.positions, table)
        embedded = self.patch_embed((2 * (pixels - 0.5)).to(dtype_of(self.patch_embed)))
        x, residual = None, (embedded + placed * valid[..., None]).flatten(0, 1)[None]
        # Image i is segment 2 i, and its padding segment 2 i + 1.
        segment_of_patch = 2 * torch.arange(n, device=valid.device)[:, None] + ~valid  # [n, P]
        layout = BatchLayout.bidirectional(
            coordinates.flatten(0, 1).T[:, None], {"default": self.rotary}, segment_of_patch.flatten()
        )
        # Patches attend to the patches of their image.
        for block in self.blocks:
            x, residual = block(x, residual, layout)
        seen = add_norm(None, x, residual)[0].view(n, P, -1)
        # Image tokens [n, tokens, C], pooled, standardized in some models, normalized and projected.
        tokens = self._pooled(seen, coordinates, valid)
        if self.standard is not None:
            tokens = self.standard(tokens)
        projected: Tensor = self.projection(self.soft_emb_norm(tokens.to(seen.dtype)))
        # Put the tokens of all images first, so that they line up with the placeholders.
        count = valid.sum(1, keepdim=True) // self.pool**2
        padding = torch.arange(projected.shape[1], device=count.device) >= count
        return projected.flatten(0, 1)[padding.flatten().int().argsort(stable=True)]

    def _pooled(self, seen: Tensor, coordinates: Tensor, valid: Tensor) -> Tensor:
        """For each square of patches, return the mean of the patches, multiplied by sqrt(C), where C is the width of
        the tower. The result is fp32, because fp16 might overflow."""
        (column, row), tokens = coordinates.unbind(-1), coordinates.shape[1] // self.pool**2
        # Number of squares in a row of the image, [n, 1]; padding has column 0.
        across = column.amax(1, keepdim=True) // self.pool + 1
        # A matrix [n, P, tokens] says which square each patch belongs to, so that pooling is one matrix product.
        square = column // self.pool + across * (row // self.pool)
        inside = (square[..., None] == torch.arange(tokens, device=coordinates.device)) & valid[..., None]
        compute = torch.promote_types(seen.dtype, torch.float32)
        with torch.autocast(seen.device.type, enabled=False):
            total = inside.to(compute).transpose(1, 2) @ seen.to(compute)
        return total * (math.sqrt(seen.shape[-1]) / self.pool**2)
