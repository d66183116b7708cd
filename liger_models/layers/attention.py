"""Attention layers: `BaseAttention`, and `LigerAttention`, which has a packed QKV projection.

`BaseAttention` implements everything that does not depend on how queries, keys and values are computed.
`LigerAttention` implements grouped-query attention. `qk_norm_attention.py` has variants of `LigerAttention` that
normalize queries and keys or gate the outputs. `latent_attention.py` has attention whose keys and values are computed
from latents.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from liger_models.distributed.collectives import Group, to_heads, to_tokens
from liger_models.kernels.options import KernelOptions
from liger_models.kernels.rope.rope import rope_qkv, rope_qkv_reference
from liger_models.layers.attention_backends import attention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import DecoderConfig
from liger_models.layers.layer import AttentionSpec, Layer
from liger_models.layers.linear import ColumnParallelLinear, RowParallelLinear, check_divisible
from liger_models.layers.norm import Norm, add_norm, add_norm_linear, call_linear, call_normed
from liger_models.layers.recompute import draws, recomputes, run_twice

if TYPE_CHECKING:
    from typing_extensions import Self


def check_heads(where: str, kv_heads: int, group: Group) -> None:
    """Raise ValueError unless the KV heads can be divided equally among the ranks."""
    advice = ": heads are not replicated. Use fewer ranks, and FSDP over the others."
    check_divisible(where, "num_key_value_heads", kv_heads, group, advice)


class BaseAttention(Layer):
    """Attention without projections for queries, keys and values. A derived class adds these projections.

    A derived class creates the projections, including ``o_proj``, and defines `forward`, `_add_norm`, `_to_heads`,
    `_qkv` and `attention`. A derived class that supports tensor and context parallelism also defines `can_shard`,
    `shard` and `shard_tokens`.

    Args:
        num_heads: H.
        layer: index of the layer, and of its slot in the decode cache.
        scale: multiplier of q·k.
        window: number of tokens that a token attends to, including itself; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no cap.
        dropout: probability of dropping an attention weight in training.
        rotary: name of the rotary embedding, as in `BatchLayout.tables`; None for no rotation.
        interleaved: whether to rotate the pairs of dimensions (2i, 2i + 1) instead of (i, i + R/2), where R is the
            number of rotated dimensions.
        rope_kernel: False rotates in plain PyTorch, without a kernel.
    """

    o_proj: nn.Linear

    def __init__(
        self,
        num_heads: int,
        *,
        layer: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        rotary: str | None = "default",
        interleaved: bool = False,
        rope_kernel: bool = True,
    ) -> None:
        super().__init__()
        # Tensor and context parallelism divide ``num_heads`` by the number of ranks.
        self.num_heads, self.layer, self.scale = num_heads, layer, scale
        self.window, self.softcap, self.dropout = window, softcap, dropout
        self.rotary, self.interleaved, self.rope_kernel = rotary, interleaved, rope_kernel
        self.recompute = False
        """Whether to save only the inputs and recompute the rest in the backward (checkpointing policy "full")."""

    # The methods that process a batch: `add_norm` or `forward`, then `_attend`, which calls `_mix`.

    def add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        """Add ``x`` to ``residual``, and apply attention to the normalized sum. Return the output and the sum, both
        [B, T, C].

        If ``norm`` is None, attention is applied to the sum itself. The backward recomputes the normalized activations.
        If ``recompute`` is True, the backward recomputes the whole layer except the output projection.
        """
        compute = partial(call_normed, self) if self.overrides_forward else self._add_norm
        if norm is None:
            # Only the sum is saved, not its two terms.
            _, residual = add_norm(None, x, residual)
            x = None
        if not recomputes(self) or layout.cache is not None:  # recomputation would append to the cache again
            return compute(norm, x, residual, layout)
        random = draws(self, self.dropout)
        outputs: tuple[Tensor, Tensor] = run_twice(compute, norm, x, residual, layout, preserve_rng_state=random)
        return outputs

    def _add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        """Do the same as `add_norm`, but ignore ``recompute``."""
        raise NotImplementedError

    def _attend(self, projected: Any, layout: BatchLayout) -> Tensor:
        """Compute the output of the layer, [B, T, C], from the projections of this rank's tokens."""
        # With context parallelism, each rank sends T / R tokens of all heads, and receives all T tokens of its own
        # heads. After attention, each rank sends the outputs of its heads, and receives the outputs of all heads for
        # its own T / R tokens.
        context = self.groups.context
        out = self._mix(projected if context is None else self._to_heads(projected, context), layout)  # [B, T, H · V]
        out = out if context is None else to_tokens(out, context)
        return call_linear(self.o_proj, out)

    def _to_heads(self, projected: Any, context: Group) -> Any:
        """Exchange projections among the ranks. ``projected`` has all heads for this rank's T / R tokens, and the
        result has this rank's heads for all T tokens."""
        raise NotImplementedError

    def _mix(self, projected: Any, layout: BatchLayout) -> Tensor:
        """Compute the outputs of the heads, [B, T, H · V], from the projections of all tokens."""
        return self._weigh(*self._qkv(projected, layout), layout).flatten(2)

    def _qkv(self, projected: Any, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Store the new tokens in the cache, if there is one, and return queries, keys and values.

        Returns:
            q [B, T, H, D] of the new tokens, and k [B, S, G, D] and v [B, S, G, V] of all cached and new tokens. With
            a paged cache, k and v hold all pages of the layer.
        """
        raise NotImplementedError

    def _weigh(self, q: Tensor, k: Tensor, v: Tensor, layout: BatchLayout) -> Tensor:
        """Compute the output of attention, [B, T, H, V]. ``layout`` holds the mask or the document boundaries."""
        return attention(
            q, k, v, layout, scale=self.scale, window=self.window, softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0, sinks=self._local_sinks(),
        )  # fmt: skip

    def _tables(self, layout: BatchLayout) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return cos and sin of the layer's rotary embedding, or (None, None) without rotation."""
        return (None, None) if self.rotary is None else layout.tables[self.rotary]

    def _local_sinks(self) -> Tensor | None:
        """Return the attention sinks of this rank's query heads; None for attention without sinks."""
        return None

    # The interface of layers.

    def set_attention_dropout(self, probability: float) -> None:
        """Set the probability of dropping an attention weight in training."""
        self.dropout = probability

    def set_policy(self, policy: str) -> None:
        """Make the backward recompute the layer if the checkpointing policy is "full"."""
        self.recompute = policy == "full"

    def recomputed_share(self, policy: str) -> float:
        """Return which fraction of the layer the backward recomputes: 1 if the policy is "full", and otherwise 0."""
        return float(policy == "full")

    def can_shard(self, size: int) -> bool:
        """Return False, because only a derived class knows how its projections can be sharded."""
        return False

    def shard(self, group: Group) -> dict[str, int]:
        """Raise ValueError, because only a derived class knows how its projections can be sharded."""
        raise ValueError(
            f"apply_tp: {type(self).__name__} must define shard, got an attention layer that does not. Define it, or "
            "use apply_fsdp."
        )

    def shard_tokens(self, group: Group) -> None:
        """Raise ValueError, because only a derived class knows what its ranks must exchange."""
        raise ValueError(
            f"apply_cp: {type(self).__name__} must define shard_tokens, got an attention layer that does not. Define "
            "it, or use apply_fsdp."
        )


class LigerAttention(BaseAttention):
    """Causal grouped-query attention with rotary embedding and one packed projection for q, k and v.

    The rows of ``qkv_proj`` are grouped by KV head. Each group has the rows of the H / G query heads that share the KV
    head, then the rows of the key, then the rows of the value.

    Args:
        hidden_size: C.
        num_heads, num_kv_heads: H and G; H is a multiple of G.
        head_dim: D.
        layer: index of the layer, and of its slot in the decode cache.
        qkv_bias, o_bias: whether the projections have biases.
        scale: multiplier of q·k; None for D^-0.5.
        window: number of tokens that a token attends to, including itself; None for all.
        softcap: scores become ``softcap · tanh(score / softcap)``; None for no cap.
        dropout: probability of dropping an attention weight in training.
        rotary: name of the rotary embedding, as in `BatchLayout.tables`; None for no rotation.
        interleaved: whether to rotate the pairs of dimensions (2i, 2i + 1) instead of (i, i + R/2), where R is the
            number of rotated dimensions.
        rope_kernel: False rotates in plain PyTorch, without a kernel.

    Raises:
        ValueError: H is not a multiple of G.
    """

    linears = ("qkv_proj", "o_proj")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer: int,
        qkv_bias: bool = False,
        o_bias: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        rotary: str | None = "default",
        interleaved: bool = False,
        rope_kernel: bool = True,
    ) -> None:
        if num_heads % num_kv_heads != 0:
            raise ValueError(
                f"LigerAttention: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})."
            )
        super().__init__(
            num_heads, layer=layer, scale=head_dim**-0.5 if scale is None else scale, window=window, softcap=softcap,
            dropout=dropout, rotary=rotary, interleaved=interleaved, rope_kernel=rope_kernel,
        )  # fmt: skip
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        # One projection, whose rows are grouped by KV head: each group has the KV head's queries, key and value.
        self.qkv_proj = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=o_bias)

    @classmethod
    def from_config(cls, config: DecoderConfig, layer: int, kernels: KernelOptions, **options: Any) -> "Self":
        """Build the attention of a layer with the sizes and the dropout of a config.

        Args:
            config: sizes and constants. If the config has the field ``attention_bias``, this field is the default of
                ``qkv_bias`` and ``o_bias``.
            layer: index of the layer, and of its slot in the decode cache.
            kernels: which parts run on fused kernels.
            options: further arguments of the class's constructor.
        """
        bias = getattr(config, "attention_bias", False)
        sizes = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        defaults: dict[str, Any] = {
            "qkv_bias": bias, "o_bias": bias, "dropout": config.attention_dropout, "rope_kernel": kernels.rope,
        }  # fmt: skip
        return cls(*sizes, layer=layer, **(defaults | options))

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        return self._attend(self.qkv_proj(x), layout)

    def _add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        qkv, residual = add_norm_linear(norm, self.qkv_proj, x, residual)  # [B, T, (H + 2 G) · D]
        return self._attend(qkv, layout), residual

    def _to_heads(self, projected: Tensor, context: Group) -> Tensor:
        return to_heads(projected, context)

    def _qkv(self, projected: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split(projected, layout)
        if layout.cache is not None:
            # k and v now hold all keys and values so far, [B, S, G, D], or all pages of the layer.
            k, v = layout.cache.extend(self.layer, k, v)
        return q, k, v

    def _split(self, qkv: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of ``qkv_proj`` into q [B, T, H, D] and k, v [B, T, G, D], and rotate q and k."""
        split = rope_qkv if self.rope_kernel else rope_qkv_reference
        cos, sin = self._tables(layout)
        return split(qkv, cos, sin, self.num_heads, self.num_kv_heads, self.head_dim, interleaved=self.interleaved)

    @property
    def attention(self) -> AttentionSpec:
        """The masks, rotary tables and cache that the layer needs, and its operations per pair of query and key."""
        return AttentionSpec(
            self.layer, self.rotary, self.window, self.softcap is not None, 4 * self.num_heads * self.head_dim,
            takes_pages=True,
        )  # fmt: skip

    def can_shard(self, size: int) -> bool:
        """Whether the number of KV heads is divisible by ``size``."""
        return self.num_kv_heads % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the KV heads and their query heads on each of R ranks; see `liger_models.parallel.apply_tp`.

        Raises:
            ValueError: the number of KV heads is not a multiple of the number of ranks.
        """
        self._share_heads(group)
        self.qkv_proj = ColumnParallelLinear.of(self.qkv_proj, group)
        self.o_proj = RowParallelLinear.of(self.o_proj, group)
        return {"qkv_proj.weight": 0, "qkv_proj.bias": 0, "o_proj.weight": 1}

    def _share_heads(self, group: Group) -> None:
        """Divide the numbers of query heads and KV heads by the number of ranks."""
        check_heads("LigerAttention", self.num_kv_heads, group)
        self.num_heads //= group.size
        self.num_kv_heads //= group.size

    def shard_tokens(self, group: Group) -> None:
        """Prepare the layer for context parallelism, where each of R ranks has T / R tokens. Inside attention, each
        rank has all T tokens, but only 1 / R of the heads.

        Raises:
            ValueError: the number of KV heads is not a multiple of the number of ranks.
        """
        self._share_heads(group)
        self.groups = replace(self.groups, context=group)
