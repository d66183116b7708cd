"""The base class of layers that mix tokens by a short convolution and, except for `LigerGatedConv`, by a recurrence."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import Group, sum_gradient, to_heads, to_tokens
from liger_models.kernels.linear_attention.short_conv import MAX_WIDTH, short_conv, short_conv_reference
from liger_models.kernels.linear_attention.unit_parts import unit_parts, unit_parts_reference
from liger_models.kernels.norm.gated_norm import gated_norm, gated_norm_reference
from liger_models.layers.batch import BatchLayout
from liger_models.layers.derived import derive
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ColumnParallelLinear, RowParallelLinear, check_divisible, local
from liger_models.layers.norm import Norm, add_norm_linear, call_linear, call_normed
from liger_models.layers.recompute import draws, recomputes, run_twice


class LigerGatedRMSNorm(Layer):
    """``weight · x / sqrt(mean(x²) + eps) · act(gate)`` over the last dimension.

    Args:
        width: D.
        eps: added to the mean of squares.
        act: activation of the gate, "silu" or "sigmoid".
        kernel: False runs plain PyTorch instead of a kernel.
    """

    def __init__(self, width: int, eps: float = 1e-6, *, act: str = "silu", kernel: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.act, self.kernel = eps, act, kernel
        self.group: Group | None = None
        """Process group over which the weight's gradient is summed, because the group's ranks have different heads;
        None if the gradient is not summed.
        """

    def draw(self, std: float) -> bool:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)
        return True

    def sum_gradients(self, group: Group) -> bool:
        """Make the backward sum the gradient of the weight over ``group``, and return True."""
        self.group = group
        return True

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map x and gate, both [..., D], to [..., D] in the dtype of x."""
        weight = local(self.weight)
        weight = weight if self.group is None else sum_gradient(weight, self.group)
        return (gated_norm if self.kernel else gated_norm_reference)(x, gate, weight, self.eps, act=self.act)


class LinearAttention(Layer):
    """Base class of layers with one packed input projection, a short convolution and, usually, a recurrence.

    The rows of ``in_proj`` and of the convolution are grouped into ``units``. A unit consists of the rows of a few
    heads or channels. Tensor and context parallelism give each rank the same number of units. A derived class
    implements `mix`, sets ``out_proj``, and lists its own sharded parameters in `own_shards`.

    Args:
        hidden_size: C.
        units: U, the number of units.
        unit_rows: number of rows of ``in_proj`` per unit.
        unit_channels: number of channels of the convolution per unit.
        conv_size: K, the number of tokens that the convolution covers.
        layer: index of the layer, and of its slot in the decode cache.
        bias: whether ``in_proj`` has a bias.
        conv_bias: whether the convolution has a bias.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: K is below 2, or above the limit of the kernel.
    """

    batch_invariant = False  # the order of sums differs between chunks of a sequence and single tokens
    linears: tuple[str, ...] = ("in_proj", "out_proj")
    needs_bounds = True
    recurrent = True
    conv_name = "conv_size"
    """The name of ``conv_size`` in config.json, for error messages."""
    unit_name = "units"
    """The name of ``units`` in config.json or a description of the units, for error messages."""
    state_elements = 0
    """Number of elements in the recurrent state of one sequence on this rank; 0 without a recurrence."""
    out_proj: nn.Linear

    def __init__(
        self,
        hidden_size: int,
        units: int,
        unit_rows: int,
        unit_channels: int,
        conv_size: int,
        *,
        layer: int,
        bias: bool = False,
        conv_bias: bool = False,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        if not (conv_size > 1 and (conv_size <= MAX_WIDTH or not kernel)):
            raise ValueError(
                f"{type(self).__name__}: conv_size ({self.conv_name}) must be 2 to {MAX_WIDTH}, got {conv_size}. "
                "KernelOptions(linear_attention=False) takes more."
            )
        self.units, self.conv_size, self.layer, self.kernel = units, conv_size, layer, kernel
        self.recompute = False
        """Whether to save only the inputs and recompute the rest in the backward (checkpointing policy "full")."""
        self.ranks: Group | None = None
        """The process group over which the units are distributed, or None."""
        # One projection computes the inputs of the convolution, and all other inputs of `mix`.
        self.in_proj = nn.Linear(hidden_size, units * unit_rows, bias=bias)
        self.conv_weight = nn.Parameter(torch.empty(units * unit_channels, 1, conv_size))
        self.conv_bias = nn.Parameter(torch.empty(units * unit_channels)) if conv_bias else None

    def mix(
        self, projected: Tensor, states: tuple[Tensor, ...] | None, padding: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute the input of ``out_proj`` from the output of ``in_proj`` for all tokens.

        Args:
            projected: [B, T, rows], the outputs for this rank's units, 0 for padding.
            states: the states before the first token; None for states of zeros.
            padding: [B, T, 1] bool, whether each token is padding; None if there is no padding.
            options: keyword arguments that `mix` passes on to `run`.

        Returns:
            The input of ``out_proj``, [B, T, ...], whose last dimensions the caller flattens, and a tuple of the states
            after the last token. Without a cache, the states may be None.
        """
        raise NotImplementedError

    def own_shards(self) -> dict[str, int]:
        """For each further parameter that the derived class shards, return the dimension along which it is sharded, in
        a dict like the result of `shard`."""
        return {}

    def set_policy(self, policy: str) -> None:
        """Make the backward recompute the layer if the checkpointing policy is "full"."""
        self.recompute = policy == "full"

    def recomputed_share(self, policy: str) -> float:
        """Return which fraction of the layer the backward recomputes: 1 if the policy is "full", and otherwise 0."""
        return float(policy == "full")

    def can_shard(self, size: int) -> bool:
        """Whether the number of units is divisible by ``size``."""
        return self.units % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the units on each of R ranks; see `liger_models.parallel.apply_tp`.

        Raises:
            ValueError: the units cannot be divided equally among the ranks.
        """
        self._share_units(group)
        self.in_proj = ColumnParallelLinear.of(self.in_proj, group)
        self.out_proj = RowParallelLinear.of(self.out_proj, group)
        shards = {"in_proj.weight": 0, "in_proj.bias": 0, "conv_weight": 0, "conv_bias": 0, "out_proj.weight": 1}
        return {name: dim for name, dim in shards.items() if _has(self, name)} | self.own_shards()

    def shard_tokens(self, group: Group) -> None:
        """Prepare the layer for context parallelism, where each of R ranks has T / R tokens. Inside `mix`, each rank
        has all T tokens, but only 1 / R of the units.

        Raises:
            ValueError: the units cannot be divided equally among the ranks.
        """
        self._share_units(group)
        self.groups = replace(self.groups, context=group)

    def _share_units(self, group: Group) -> None:
        advice = ": heads are not replicated. Use fewer ranks, and FSDP over the others."
        check_divisible(type(self).__name__, self.unit_name, self.units, group, advice)
        self.units //= group.size
        self.ranks = group

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        return self._of_projected(self.in_proj(x), layout)

    def add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        """Add ``x`` to ``residual``, and apply the layer to the normalized sum. Return the output and the sum, both
        [B, T, C].

        The backward recomputes the normalized activations. If ``recompute`` is True, the backward recomputes the whole
        layer except the output projection.
        """
        compute = partial(call_normed, self) if self.overrides_forward else self._add_norm
        if recomputes(self) and layout.cache is None:
            random = draws(self, 0.0)
            outputs: tuple[Tensor, Tensor] = run_twice(compute, norm, x, residual, layout, preserve_rng_state=random)
            return outputs
        return compute(norm, x, residual, layout)

    def _add_norm(
        self, norm: Norm | None, x: Tensor | None, residual: Tensor, layout: BatchLayout
    ) -> tuple[Tensor, Tensor]:
        projected, residual = add_norm_linear(norm, self.in_proj, x, residual)
        return self._of_projected(projected, layout), residual

    def _of_projected(self, projected: Tensor, layout: BatchLayout) -> Tensor:
        context = self.groups.context
        out = self._mix_all(projected if context is None else to_heads(projected, context), layout)
        return call_linear(self.out_proj, out if context is None else to_tokens(out, context))

    def own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to this rank's units."""
        context = self.groups.context
        return local(parameter) if context is None else local(parameter).chunk(context.size)[context.rank]

    def _mix_all(self, projected: Tensor, layout: BatchLayout) -> Tensor:
        """Set the projections of padding to 0, concatenate packed rows, and apply `mix` to all tokens with the states
        in the cache."""
        B, T, _ = projected.shape
        padding, bounds, cache = layout.padding(T), layout.bounds, layout.cache
        if cache is not None and cache.width > 1:
            return self._mix_drafts(projected, cache)
        if padding is not None:  # padding must not change the state
            padding = padding[..., None]
            projected = projected.masked_fill(padding, 0)
        if bounds is not None:
            projected = projected.reshape(1, B * T, -1)
            padding = None if padding is None else padding.reshape(1, B * T, 1)
        states = cache.states(self.layer) if cache is not None else None
        options: dict[str, Any] = {"cu_seqlens": bounds, "kernel": self.kernel, "stateful": cache is not None}
        out, new_states = self.mix(projected, states, padding, options)
        if cache is not None:
            cache.replace_states(self.layer, *new_states)
        return out.reshape(B, T, math.prod(out.shape[2:]))

    def _mix_drafts(self, projected: Tensor, cache: Any) -> Tensor:
        """Apply `mix` to the draft tokens of speculative decoding, [rows · n, 1, ...], in which the n tokens of each
        cached row are consecutive. Keep the states after each token; see `PagePool.speculate`."""
        tokens = projected.unflatten(0, (-1, cache.width)).squeeze(2)  # [rows, n, ...]
        states = cache.states(self.layer)
        options: dict[str, Any] = {"cu_seqlens": None, "kernel": self.kernel, "stateful": True}
        outs = []
        for token in tokens.split(1, 1):
            out, states = self.mix(token, states, None, options)
            cache.keep_states(self.layer, *states)
            outs.append(out.flatten(2))
        return torch.cat(outs, 1).flatten(0, 1)[:, None]

    def by_part(self, parameter: Tensor, sizes: Sequence[int]) -> Tensor:
        """Reorder the rows of this rank's shard of a parameter. The rows of the parameter are grouped by unit, and the
        rows of the result are grouped by part, such as queries, keys and values.

        ``sizes`` lists how many rows each part has in a unit.
        """
        rows = self.own(parameter).unflatten(0, (self.units, -1))
        return torch.cat([part.flatten(0, 1) for part in rows.split([*sizes], 1)])

    def split(
        self, projected: Tensor, outputs: Sequence[Sequence[int]], scales: Sequence[float] | None = None
    ) -> tuple[Tensor, ...]:
        """Split the output of ``in_proj`` [B, T, rows], which is grouped by unit, into parts; see `unit_parts`."""
        return (unit_parts if self.kernel else unit_parts_reference)(projected, self.units, outputs, scales)

    def convolve(
        self, inputs: Tensor, sizes: Sequence[int], state: Tensor | None, options: dict[str, Any],
        activation: str | None = "silu",
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Convolve ``inputs`` [B, T, U · sum(sizes)], whose channels are grouped by part and not by unit. Return
        ``(result, state)``."""

        def compute() -> tuple[Tensor, Tensor | None]:
            bias = None if self.conv_bias is None else self.by_part(self.conv_bias, sizes)
            return self.by_part(self.conv_weight, sizes)[:, 0], bias

        weight, bias = derive(self, "convolution", compute)
        return run(
            short_conv, short_conv_reference, inputs, weight, bias, initial_state=state, activation=activation,
            **options,
        )  # fmt: skip


def run(
    op: Callable[..., Any], reference: Callable[..., Any], *args: Tensor | None, kernel: bool, stateful: bool,
    **options: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run an op or its reference implementation.

    Return ``(result, final state)``. If ``kernel`` is True and ``stateful`` is False, the final state is None.
    """
    first = args[0]
    assert first is not None
    if not kernel:
        result, state = reference(*args, **options)
    elif stateful:
        result, state = op(*args, return_state=True, **options)
    else:
        result, state = op(*args, **options), None
    return result.to(first.dtype), state


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module or one of its submodules has a parameter of this name."""
    owner, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(owner), attribute, None) is not None
