"""Gated DeltaNet: linear attention with one state matrix per head, after a short convolution."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group, sum_gradient, to_heads, to_tokens
from liger_models.kernels.linear_attention.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from liger_models.kernels.linear_attention.short_conv import MAX_WIDTH, short_conv, short_conv_reference
from liger_models.kernels.norm.gated_norm import gated_norm, gated_norm_reference
from liger_models.layers.batch import BatchLayout
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ColumnParallelLinear, RowParallelLinear, check_divisible, local
from liger_models.layers.norm import Norm, add_norm_linear
from liger_models.layers.recompute import draws, recomputes, run_twice


class LigerGatedRMSNorm(Layer):
    """``weight · x / sqrt(mean(x²) + eps) · silu(gate)`` over the last dimension.

    Args:
        width: D.
        eps: added to the mean of squares.
        kernel: False for plain torch.
    """

    def __init__(self, width: int, eps: float = 1e-6, *, kernel: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.kernel = eps, kernel
        self.group: Group | None = None
        """Process group that all-reduces the gradient of the weight, because its ranks have different heads.
        """

    def draw(self, std: float) -> bool:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)
        return True

    def sum_gradients(self, group: Group) -> bool:
        """Return True, because the gradient is already all-reduced over ``self.group``."""
        self.group = group
        return True

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map x and gate, both [..., D], to [..., D] in the dtype of x."""
        weight = local(self.weight)
        weight = weight if self.group is None else sum_gradient(weight, self.group)
        return (gated_norm if self.kernel else gated_norm_reference)(x, gate, weight, self.eps)


def _run(op: Any, reference: Any, *args: Tensor, kernel: bool, stateful: bool, **options: Any) -> tuple[Tensor, Any]:
    """Run an op or its reference. Returns ``(result, final state)``; the op's state is None unless ``stateful``."""
    if not kernel:
        result, state = reference(*args, **options)
    elif stateful:
        result, state = op(*args, return_state=True, **options)
    else:
        result, state = op(*args, **options), None
    return result.to(args[0].dtype), state


class _Sizes(NamedTuple):
    """Number of rows per key head of each part of the projection of `LigerGatedDeltaNet`."""

    query: int
    key: int
    value: int
    gate: int
    beta: int
    decay: int


class LigerGatedDeltaNet(Layer):
    """Linear attention by the gated delta rule, with one packed input projection.

    The rows of ``in_proj`` are grouped by key head. Each group has the query, the key, the values of the Hv / Hk value
    heads, the gates of these value heads, their update rates β (one row per head) and their decays (one row per head).
    The rows of ``conv_weight`` are also grouped by key head, and have only queries, keys and values.

    Args:
        hidden_size: C.
        num_key_heads, num_value_heads: Hk and Hv; Hv is a multiple of Hk.
        key_dim, value_dim: Dk and Dv.
        conv_size: K, the number of tokens that the convolution covers.
        layer: index of the layer, which is also its slot in the decode cache.
        eps: eps of the output norm.
        kernel: False for plain torch.

    Raises:
        ValueError: Hv is not a multiple of Hk, or K is below 2 or more than the kernel supports.

    Source: https://arxiv.org/abs/2412.06464.
    """

    batch_invariant = False  # chunks of a sequence are summed in another order than single tokens
    linears = ("in_proj", "out_proj")
    needs_bounds = True
    recurrent = True

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_size: int,
        *,
        layer: int,
        eps: float = 1e-6,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        if num_value_heads % num_key_heads != 0:
            raise ValueError(
                f"LigerGatedDeltaNet: num_value_heads ({num_value_heads}) must be a multiple of num_key_heads "
                f"({num_key_heads})."
            )
        if not (conv_size > 1 and (conv_size <= MAX_WIDTH or not kernel)):
            raise ValueError(
                f"LigerGatedDeltaNet: conv_size (linear_conv_kernel_dim) must be 2 to {MAX_WIDTH}, got {conv_size}. "
                "KernelOptions(linear_attention=False) takes more."
            )
        self.num_key_heads, self.num_value_heads, self.conv_size = num_key_heads, num_value_heads, conv_size
        self.key_dim, self.value_dim, self.layer, self.kernel = key_dim, value_dim, layer, kernel
        values = num_value_heads // num_key_heads
        self.sizes = _Sizes(key_dim, key_dim, values * value_dim, values * value_dim, values, values)
        self.recompute = False
        """Whether to save only the inputs and recompute the rest in the backward (checkpointing policy "full")."""

        # One projection computes queries, keys, values, gates, update rates and decays.
        self.in_proj = nn.Linear(hidden_size, num_key_heads * sum(self.sizes), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(num_key_heads * sum(self.sizes[:3]), 1, conv_size))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        # The gated norm of the heads, and the output projection.
        self.norm = LigerGatedRMSNorm(value_dim, eps, kernel=kernel)
        self.out_proj = nn.Linear(num_value_heads * value_dim, hidden_size, bias=False)
        self.draw(0.02)

    @property
    def token_flops(self) -> int:  # type: ignore[override]
        """Operations per token: three products of a vector and the state (read, update, query) per value head."""
        return 6 * self.num_value_heads * self.key_dim * self.value_dim

    def set_policy(self, policy: str) -> None:
        """Recompute in the backward if the policy is "full"."""
        self.recompute = policy == "full"

    def recomputed_share(self, policy: str) -> float:
        """The share of the layer that is recomputed: 1 if the policy is "full", and otherwise 0."""
        return float(policy == "full")

    def can_shard(self, size: int) -> bool:
        """Whether ``size`` divides the number of key heads."""
        return self.num_key_heads % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """On each of R ranks, keep 1 / R of the key heads and their value heads; see `liger_models.parallel.apply_tp`.

        Raises:
            ValueError: the number of key heads is not a multiple of the number of ranks.
        """
        self._share_heads(group)
        self.norm.group = group
        self.in_proj = ColumnParallelLinear.of(self.in_proj, group)
        self.out_proj = RowParallelLinear.of(self.out_proj, group)
        return {"in_proj.weight": 0, "conv_weight": 0, "dt_bias": 0, "A_log": 0, "out_proj.weight": 1}

    def shard_tokens(self, group: Group) -> None:
        """Give each of R ranks T / R tokens. Between the projections, a rank has all T tokens and 1 / R of the heads.

        Raises:
            ValueError: the number of key heads is not a multiple of the number of ranks.
        """
        self._share_heads(group)
        self.groups = replace(self.groups, context=group)

    def _share_heads(self, group: Group) -> None:
        advice = ": heads are not replicated. Use fewer ranks, and FSDP over the others."
        check_divisible("LigerGatedDeltaNet", "linear_num_key_heads", self.num_key_heads, group, advice)
        self.num_key_heads //= group.size
        self.num_value_heads //= group.size

    def draw(self, std: float) -> bool:
        """Initialize the convolution from a normal distribution with ``std``, and the decays as in the paper."""
        nn.init.normal_(self.conv_weight, std=std)
        nn.init.ones_(self.dt_bias)
        nn.init.uniform_(self.A_log, 0.01, 16)  # the lower bound is not 0, whose logarithm is infinite
        with torch.no_grad():
            self.A_log.log_()
        return True

    def extra_repr(self) -> str:
        """Return the sizes for ``print(model)``."""
        keys, values = (self.num_key_heads, self.key_dim), (self.num_value_heads, self.value_dim)
        return f"key_heads={keys[0]}x{keys[1]}, value_heads={values[0]}x{values[1]}, conv_size={self.conv_size}"

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        return self._of_projected(self.in_proj(x), layout)

    def add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        """Add ``x`` to ``residual`` and apply the layer to ``norm(residual)``. Returns ``(y, residual)`` [B, T, C].

        The backward recomputes the normalized activations. If ``recompute`` is True, it recomputes everything except
        the output projection.
        """
        if recomputes(self) and layout.cache is None:
            random = draws(self, 0.0)
            outputs: tuple[Tensor, Tensor] = run_twice(
                self._add_norm, norm, x, residual, layout, preserve_rng_state=random
            )
            return outputs
        return self._add_norm(norm, x, residual, layout)

    def _add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        projected, residual = add_norm_linear(norm, self.in_proj, x, residual)
        return self._of_projected(projected, layout), residual

    def _of_projected(self, projected: Tensor, layout: BatchLayout) -> Tensor:
        context = self.groups.context
        out = self._mix(projected if context is None else to_heads(projected, context), layout)
        y: Tensor = self.out_proj(out if context is None else to_tokens(out, context))
        return y

    def _own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to this rank's heads."""
        context = self.groups.context
        return local(parameter) if context is None else local(parameter).chunk(context.size)[context.rank]

    def _mix(self, projected: Tensor, layout: BatchLayout) -> Tensor:
        """Compute the outputs of the heads, [B, T, Hv · Dv], from the output of ``in_proj`` for all tokens."""
        B, T, _ = projected.shape
        padding, bounds = layout.padding(T), layout.bounds
        if padding is not None:  # padding must not change the state
            projected = projected.masked_fill(padding[..., None], 0)
        if bounds is not None:
            projected = projected.reshape(1, B * T, -1)
        *qkv, z, b, a = projected.unflatten(-1, (self.num_key_heads, -1)).split([*self.sizes], -1)

        # Update rates β and logarithms of the decays, [B, T, Hv]. Decays are computed in fp32, because their errors
        # multiply.
        beta, decay = b.flatten(2).sigmoid(), self._own(self.A_log).float().exp()
        g = -decay * F.softplus(a.flatten(2).float() + self._own(self.dt_bias).float())

        # Convolution and delta rule continue from the states in the cache.
        cache = layout.cache
        states = cache.states(self.layer) if cache is not None else None
        conv_state, state = (None, None) if states is None else states
        options: dict[str, Any] = {"cu_seqlens": bounds, "kernel": self.kernel, "stateful": cache is not None}

        # The inputs of the convolution are all queries, then all keys, then all values: [B, T, Hk · (2 Dk) + Hv · Dv].
        weight = self._own(self.conv_weight).view(self.num_key_heads, -1, self.conv_size)
        filters = torch.cat([part.flatten(0, 1) for part in weight.split([*self.sizes[:3]], 1)])
        inputs = torch.cat([part.flatten(2) for part in qkv], -1)
        convolved, conv_state = _run(
            short_conv, short_conv_reference, inputs, filters, initial_state=conv_state, **options
        )
        q, k, v = convolved.split([self.num_key_heads * size for size in self.sizes[:3]], -1)
        q, k = (x.unflatten(-1, (-1, self.key_dim)) for x in (q, k))  # [B, T, Hk, Dk]
        v, z = (x.unflatten(-1, (-1, self.value_dim)) for x in (v, z.flatten(2)))  # [B, T, Hv, Dv]

        out, state = _run(
            gated_delta_rule, gated_delta_rule_reference, q, k, v, g, beta, initial_state=state, **options
        )
        if cache is not None:
            cache.replace_states(self.layer, conv_state, state)
        normed: Tensor = self.norm(out, z)
        return normed.reshape(B, T, self.num_value_heads * self.value_dim)
