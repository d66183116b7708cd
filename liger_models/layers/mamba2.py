"""Mamba-2: a state-space scan with one decay per head and token, after a short convolution."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group, gather_channels
from liger_models.kernels.linear_attention.ssd_scan import ssd_scan_packed, ssd_scan_packed_reference
from liger_models.kernels.linear_attention.step_sizes import NO_LIMITS, step_sizes
from liger_models.kernels.norm.gated_norm import gated_norm, gated_norm_reference
from liger_models.layers.derived import derive
from liger_models.layers.layer import Layer
from liger_models.layers.linear import local
from liger_models.layers.linear_attention import LinearAttention, run


class GroupedGatedNorm(Layer):
    """RMSNorm over each of G groups of channels, with a gate that multiplies the channels before or after the norm.

    Args:
        width: I, the number of channels of all groups.
        groups: G.
        eps: added to the mean of squares.
        gate_first: whether the gate multiplies the channels before the norm, as in Mamba-2.
        kernel: False runs plain PyTorch instead of a kernel.
    """

    def __init__(self, width: int, groups: int, eps: float, *, gate_first: bool = True, kernel: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.groups_of_channels, self.eps, self.gate_first, self.kernel = groups, eps, gate_first, kernel

    def draw(self, std: float) -> bool:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)
        return True

    def forward(self, x: Tensor, gate: Tensor, weight: Tensor, ranks: Group | None) -> Tensor:
        """Normalize x [..., I / R], and multiply by the gate, which has the same shape.

        Args:
            x, gate: this rank's channels.
            weight: this rank's part of the weight, [I / R].
            ranks: the process group of the R ranks that the channels are divided among; None if this rank has all
                channels.
        """
        split = 1 if ranks is None else ranks.size
        if split <= self.groups_of_channels:
            groups = self.groups_of_channels // split
            x, gate, weight = (t.unflatten(-1, (groups, -1)) for t in (x, gate, weight))
            norm = gated_norm if self.kernel else gated_norm_reference
            return norm(x, gate, weight, self.eps, gate_first=self.gate_first).flatten(-2)

        # Each group of channels is spread over several ranks, which exchange their sums of squares.
        assert ranks is not None
        per_group = split // self.groups_of_channels
        first = ranks.rank // per_group * per_group
        wide, factor = x.float(), F.silu(gate.float())
        wide = wide * factor if self.gate_first else wide
        squares = gather_channels(wide.square().sum(-1, keepdim=True), ranks)[..., first : first + per_group]
        mean = squares.sum(-1, keepdim=True) / (x.shape[-1] * per_group)
        normed = weight * (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)
        return (normed if self.gate_first else normed * factor).to(x.dtype)


class StateDecay(Layer):
    """Parameters of the recurrence in H heads: ``dt_bias``, ``A_log``, and the factors ``D`` of the skip connection.

    The parameters are in fp32 even if other weights are in half precision.

    Args:
        num_heads: H.
        limits: the smallest and the largest step size.
        initial_steps: three numbers. A new model draws step sizes between the first two, and then clamps the step sizes
            to at least the third.
    """

    wide = ("dt_bias", "A_log", "D")

    def __init__(self, num_heads: int, limits: tuple[float, float], initial_steps: tuple[float, float, float]) -> None:
        super().__init__()
        self.limits, self.initial_steps = limits, initial_steps
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.draw(0.02)

    def draw(self, std: float) -> bool:
        """Set the decay rates to 1, ..., H and the skip factors to 1, and draw the logarithms of the step sizes from a
        uniform distribution."""
        least, most, floor = self.initial_steps
        nn.init.ones_(self.D)
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, len(self.A_log) + 1, dtype=torch.float32, device=self.A_log.device).log())
            nn.init.uniform_(self.dt_bias, math.log(least), math.log(most))
            steps = self.dt_bias.exp().clamp_min(floor)
            self.dt_bias.copy_(steps + (-torch.expm1(-steps)).log())  # the inverse of softplus
        return True

    def shard_tokens(self, group: Group) -> None:
        """Make the forward on each of R ranks use only the parameters of 1 / R of the heads."""
        self.groups = replace(self.groups, context=group)

    def forward(self, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step sizes and the logarithms of the decays, both [..., H] fp32, and the skip factors [H].

        H is the number of this rank's heads.
        """
        context = self.groups.context
        dt_bias, A_log, D = (local(parameter) for parameter in (self.dt_bias, self.A_log, self.D))
        if context is not None:
            dt_bias, A_log, D = (t.chunk(context.size)[context.rank] for t in (dt_bias, A_log, D))
        # FSDP frees the gathered parameter after this forward, so the result must be a copy.
        (copied,) = derive(self, "D", lambda: (D.clone(),))
        return *step_sizes(steps, A_log, dt_bias, self.limits), copied


class _Sizes(NamedTuple):
    """The number of rows per unit for each part of the projection of `LigerMamba2`."""

    gate: int
    value: int
    B: int
    C: int
    step: int


class LigerMamba2(LinearAttention):
    """The state-space mixer of Mamba-2, with one packed input projection.

    The H heads, and the channels of B and C of all G groups, are divided into U units. For each unit, ``in_proj`` has
    the rows of the unit's gates, values, channels of B, channels of C, and step sizes (one row per head), in this
    order. The rows of ``conv_weight`` are also grouped by unit, but cover only values, B and C. Each of R ranks has
    1 / R of the units. If there are more ranks than groups, several ranks share a group. These ranks gather all
    channels of the group's B and C after the convolution.

    Args:
        hidden_size: width of the input.
        num_heads: H.
        head_dim: P.
        num_groups: G; H is a multiple of G.
        state_size: N.
        conv_size: K, the number of tokens that the convolution covers.
        layer: index of the layer, and of its slot in the decode cache.
        eps: eps of the gated norm.
        bias: whether the projections have biases.
        out_bias: whether the output projection has a bias; None for the value of ``bias``.
        conv_bias: whether the convolution has a bias.
        limits: the smallest and the largest step size.
        initial_steps: as in `StateDecay`.
        gate_first: whether the gate multiplies the values before the norm; None for a gate without a norm.
        multipliers: factors by which the gate, the values, B, C and the step sizes are multiplied.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: H is not a multiple of G, K is below 2 or more than the kernel supports, or the smallest initial
            step size exceeds the largest one.

    Source: https://arxiv.org/abs/2405.21060.
    """

    conv_name = "conv_kernel"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_groups: int,
        state_size: int,
        conv_size: int,
        *,
        layer: int,
        eps: float = 1e-5,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        limits: tuple[float, float] = NO_LIMITS,
        initial_steps: tuple[float, float, float] = (0.001, 0.1, 1e-4),
        gate_first: bool | None = True,
        multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0),
        kernel: bool = True,
    ) -> None:
        if num_heads % num_groups != 0:
            raise ValueError(
                f"LigerMamba2: the number of heads ({num_heads}) must be a multiple of the number of groups "
                f"({num_groups}). Check config.json."
            )
        if not initial_steps[0] <= initial_steps[1]:
            raise ValueError(
                f"LigerMamba2: time_step_min ({initial_steps[0]}) must be at most time_step_max ({initial_steps[1]}). "
                "Check config.json."
            )
        units, sizes = self.units_of(num_heads, head_dim, num_groups, state_size)
        super().__init__(
            hidden_size, units, sum(sizes), sum(sizes[1:4]), conv_size, layer=layer, bias=bias, conv_bias=conv_bias,
            kernel=kernel,
        )  # fmt: skip
        self.sizes, self.num_heads, self.head_dim = _Sizes(*sizes), num_heads, head_dim
        self.num_groups, self.state_size = num_groups, state_size
        self.multipliers = multipliers
        self.decay = StateDecay(num_heads, limits, initial_steps)
        inner = num_heads * head_dim
        self.norm = (
            None
            if gate_first is None
            else GroupedGatedNorm(inner, num_groups, eps, gate_first=gate_first, kernel=kernel)
        )
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias if out_bias is None else out_bias)
        self.draw(0.02)

    @staticmethod
    def units_of(num_heads: int, head_dim: int, num_groups: int, state_size: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of units, and the number of rows of each part in a unit.

        All units have the same number of heads and the same number of channels of B and C. The number of units is the
        largest number for which this is possible.
        """
        channels = num_groups * state_size
        units = math.gcd(num_heads, channels)
        heads, shared = num_heads // units, channels // units
        return units, (heads * head_dim, heads * head_dim, shared, shared, heads)

    @property
    def state_elements(self) -> int:  # type: ignore[override]
        """See `LinearAttention.state_elements`."""
        return self.units * self.sizes.step * self.head_dim * self.state_size

    @property
    def token_flops(self) -> int:  # type: ignore[override]
        """Floating-point operations per token: two products of a vector and the state (update, query) per head."""
        return 4 * self.state_elements

    def can_shard(self, size: int) -> bool:
        """Whether ``size`` is a divisor of the number of units, and a divisor or a multiple of the number of groups."""
        return super().can_shard(size) and (self.num_groups % size == 0 or size % self.num_groups == 0)

    def _share_units(self, group: Group) -> None:
        if not self.can_shard(group.size):
            raise ValueError(
                f"LigerMamba2: the number of ranks must divide {self.units}, the largest number that divides heads "
                f"({self.num_heads}) and channels of B ({self.num_groups * self.state_size}), and it must divide the "
                f"number of groups ({self.num_groups}) or be a multiple of it, got {group.size} ranks. Use fewer "
                "ranks, and FSDP over the others."
            )
        super()._share_units(group)

    def own_shards(self) -> dict[str, int]:
        """See `LinearAttention.own_shards`."""
        norm = {} if self.norm is None else {"norm.weight": 0}
        return {**{f"decay.{name}": 0 for name in StateDecay.wide}, **norm}

    def draw(self, std: float) -> bool:
        """Initialize the convolution from a normal distribution with ``std``."""
        nn.init.normal_(self.conv_weight, std=std)
        if self.conv_bias is not None:
            nn.init.zeros_(self.conv_bias)
        return True

    def extra_repr(self) -> str:
        """Return the sizes for ``print(model)``."""
        return (
            f"heads={self.units * self.sizes.step}x{self.head_dim}, groups={self.num_groups}, state={self.state_size}, "
            f"conv_size={self.conv_size}"
        )

    def mix(
        self, projected: Tensor, states: tuple[Tensor, ...] | None, padding: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """See `LinearAttention.mix`."""
        # The inputs of the convolution are all values, then B, then C.
        sizes = self.sizes[1:4]
        gate, values, steps = self.split(projected, (self.sizes[:1], sizes, self.sizes[4:]), self.multipliers)

        # If the convolution has a bias, its outputs for padding are not 0, so they are set to 0.
        conv_state, state = (None, None) if states is None else states
        convolved, conv_state = self.convolve(values, sizes, conv_state, options)
        if padding is not None:
            convolved = convolved.masked_fill(padding, 0)
        convolved, groups = self._own_groups(convolved, [self.units * size for size in sizes])

        # Padding neither writes to the state nor makes it decay.
        delta, g, D = self.decay(steps)
        if padding is not None:
            delta, g = (t.masked_fill(padding, 0) for t in (delta, g))
        out, state = run(
            ssd_scan_packed, ssd_scan_packed_reference, convolved, delta, g, D, head_dim=self.head_dim, groups=groups,
            initial_state=state, **options,
        )  # fmt: skip
        if self.norm is None:
            gated = (gated_norm if self.kernel else gated_norm_reference)(out, gate.view_as(out), None)
            return gated, (conv_state, state)
        normed: Tensor = self.norm(out.flatten(2), gate, self.own(self.norm.weight), self.ranks)
        return normed, (conv_state, state)

    def _own_groups(self, convolved: Tensor, widths: list[int]) -> tuple[Tensor, int]:
        """Replace this rank's channels of B and C by all channels of the groups to which the rank's heads belong.
        Return the new tensor and the number of these groups."""
        ranks = self.ranks
        if ranks is None or self.num_groups % ranks.size == 0:
            return convolved, widths[1] // self.state_size
        # Each rank has a part of the heads of one group, and needs all channels of this group.
        group = ranks.rank // (ranks.size // self.num_groups)
        own = slice(group * self.state_size, (group + 1) * self.state_size)
        x, B, C = convolved.split(widths, -1)
        return torch.cat([x, *(gather_channels(part, ranks)[..., own] for part in (B, C))], -1), 1
