"""Attention with norms of queries and keys: `LigerQKNormAttention`, and `LigerGatedAttention` with gated outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import Group, sum_over
from liger_models.kernels.norm.gated_norm import gated_norm, gated_norm_reference
from liger_models.kernels.norm.rms_norm import scale_normed
from liger_models.kernels.rope.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.kernels.rope.rope import rope, rope_reference, split_heads
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.recompute import is_hooked


class LigerQKNormAttention(LigerAttention):
    """`LigerAttention` with norms of q and k before the rotation.

    Args:
        norm: function that returns a `LigerRMSNorm` of a given width. Fused ops read the weight and the constants of
            the norm. The norm itself is called only if it has hooks or was replaced.
        whole_projection: whether to normalize all heads together (OLMo 2) instead of each head separately (Qwen3, Gemma
            3).
        clip: limit to which the absolute values of q, k and v are clipped after the norms; None for no limit. A limit
            requires ``whole_projection``.
        Others: as in `LigerAttention`.

    Raises:
        ValueError: a norm is not a `LigerRMSNorm`, or its class overrides ``forward``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        norm: Callable[[int], LigerRMSNorm],
        whole_projection: bool = False,
        clip: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, **options)
        self.q_norm = norm(num_heads * head_dim if whole_projection else head_dim)
        self.k_norm = norm(num_kv_heads * head_dim if whole_projection else head_dim)
        for layer in (self.q_norm, self.k_norm):
            if getattr(type(layer), "forward", None) is not LigerRMSNorm.forward:
                raise ValueError(
                    f"{type(self).__name__}: norm must return a LigerRMSNorm with its own forward, which fused ops "
                    f"replace, got {type(layer).__name__}. Override _split to call another norm."
                )
        self.whole_projection, self.clip = whole_projection, clip
        self.mean_group: Group | None = None
        """The process group over which the norms average the squares of q and k, because each rank has a part of the
        heads; None if the norms use only this rank's heads."""

    def shard(self, group: Group) -> dict[str, int]:
        """See `LigerAttention.shard`. If a norm covers all heads, its mean of squares covers the heads of all ranks."""
        dims = super().shard(group)
        if not self.whole_projection:
            # All ranks normalize their own heads with the same weights, so the gradients of the weights are summed over
            # the ranks.
            self.q_norm.group = self.k_norm.group = group
            return dims
        self.mean_group = group
        self.q_norm.group = self.k_norm.group = None  # the weights of the norms are also sharded
        return {**dims, "q_norm.weight": 0, "k_norm.weight": 0}

    def shard_tokens(self, group: Group) -> None:
        """See `LigerAttention.shard_tokens`.

        If a norm covers all heads, its mean of squares covers the heads of all ranks.
        """
        super().shard_tokens(group)
        self.mean_group = group if self.whole_projection else None

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        if self.mean_group is not None or self.clip is not None:
            return self._split_unfused(qkv, layout, self.mean_group)
        if not self._reads_norms():
            return self._split_by_calls(qkv, layout)
        split = qk_norm_rope if self.rope_kernel and self.q_norm.kernel else qk_norm_rope_reference
        cos, sin = self._tables(layout)
        return split(
            qkv, cos, sin, self.num_heads, self.num_kv_heads, self.head_dim,
            self.q_norm.local_weight(qkv), self.k_norm.local_weight(qkv),
            eps=self.q_norm.eps, weight_offset=self.q_norm.offset, scale_in_fp32=self.q_norm.scale_in_fp32,
            interleaved=self.interleaved,
        )  # fmt: skip

    def _reads_norms(self) -> bool:
        """Whether a fused op may read the weights of both norms instead of calling the modules. This is the case if
        neither norm has hooks or a replaced forward, and if both norms have the same constants."""
        q, k, plain = self.q_norm, self.k_norm, LigerRMSNorm.forward
        if type(q).forward is not plain or type(k).forward is not plain or is_hooked(q) or is_hooked(k):
            return False
        return (q.eps, q.offset, q.scale_in_fp32, q.kernel) == (k.eps, k.offset, k.scale_in_fp32, k.kernel)

    def _split_by_calls(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the result of `_split` by calling the modules of the norms. This is necessary if a norm was replaced
        or has hooks."""
        *heads, v = split_heads(qkv, self.num_heads, self.num_kv_heads, self.head_dim)
        cos, sin = self._tables(layout)
        rotate = rope if self.rope_kernel else rope_reference
        results = []
        for norm, x in zip((self.q_norm, self.k_norm), heads, strict=True):
            normed = norm(x.flatten(2)).view(x.shape) if self.whole_projection else norm(x)
            if cos is not None and sin is not None:
                normed = rotate(normed, cos, sin, interleaved=self.interleaved)
            results.append(normed)
        q, k = results
        return q, k, v

    def _split_unfused(self, qkv: Tensor, layout: BatchLayout, group: Group | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the result of `_split` in separate steps. Each norm covers all heads. If ``clip`` is set, q, k and v
        are clipped.

        If ``group`` is given, each rank has a part of the heads, so the means of squares are averaged over the ranks.
        """
        # Each rank averages the squares over its own heads. The mean is then taken over all ranks.
        *heads, v = split_heads(qkv, self.num_heads, self.num_kv_heads, self.head_dim)
        wide = [x.flatten(2).to(torch.promote_types(x.dtype, torch.float32)) for x in heads]
        means = torch.stack([x.square().mean(-1) for x in wide], -1)
        if group is not None:
            means = sum_over(means, group) / group.size  # [B, T, 2]
        cos, sin = self._tables(layout)
        # Normalize q and k by the means over all heads, multiply them by the weights, and rotate them.
        rotate = rope if self.rope_kernel else rope_reference
        results = []
        for norm, x, mean, like in zip((self.q_norm, self.k_norm), wide, means.split(1, -1), heads, strict=True):
            weight = norm.local_weight(qkv)
            if group is not None and self.groups.context is not None:
                # Context parallelism does not shard the weights of the norms, so take the weights of this rank's heads.
                weight = weight.chunk(group.size)[group.rank]
            normed = scale_normed(
                x * torch.rsqrt(mean + norm.eps), weight, like.dtype, norm.offset, norm.scale_in_fp32
            ).view_as(like)
            normed = normed if self.clip is None else normed.clamp(-self.clip, self.clip)
            if cos is not None and sin is not None:
                normed = rotate(normed, cos, sin, interleaved=self.interleaved)
            results.append(normed)
        q, k = results
        return q, k, v if self.clip is None else v.clamp(-self.clip, self.clip)


class LigerGatedAttention(LigerQKNormAttention):
    """`LigerQKNormAttention` whose output is multiplied by the sigmoid of a gate from the packed projection.

    The rows of ``qkv_proj`` are grouped by KV head. Each group has the rows of the query heads that share the KV head,
    the rows of these heads' gates, the rows of the key, and the rows of the value, in this order.

    Args: as in `LigerQKNormAttention`.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, **options)
        bias = self.qkv_proj.bias is not None
        self.qkv_proj = nn.Linear(hidden_size, 2 * (num_heads + num_kv_heads) * head_dim, bias=bias)

    def _mix(self, qkv: Tensor, layout: BatchLayout) -> Tensor:
        # Without the columns of the gates, the projection has the layout of `LigerAttention`.
        queries = self.num_heads // self.num_kv_heads
        groups = qkv.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))  # [B, T, G, 2 H / G + 2, D]
        q, gate, kv = groups.split([queries, queries, 2], 3)
        out: Tensor = super()._mix(torch.cat([q, kv], 3).flatten(2), layout)
        multiply = gated_norm if getattr(self.q_norm, "kernel", True) else gated_norm_reference
        return multiply(out.reshape(gate.shape), gate, None, act="sigmoid").flatten(2)
