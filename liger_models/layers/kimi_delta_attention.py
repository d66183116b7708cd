"""Kimi Delta Attention: linear attention in which each key channel of the state has its own decay rate."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group, gather_channels, gather_vocab
from liger_models.kernels.linear_attention.kimi_delta_rule import kimi_delta_rule, kimi_delta_rule_reference
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ColumnParallelLinear, local
from liger_models.layers.linear_attention import LigerGatedRMSNorm, LinearAttention, run
from liger_models.layers.norm import call_linear, is_plain


class ForgetGate(Layer):
    """Computes the logarithms of the decays, ``-exp(A_log) · softplus(x + dt_bias)``.

    The parameters ``A_log`` and ``dt_bias`` stay in fp32 even in half-precision models.

    Args:
        num_heads: H.
        head_dim: D.
    """

    wide = ("A_log", "dt_bias")

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads * head_dim))
        self.draw(0.02)

    def draw(self, std: float) -> bool:
        """Draw A_log and dt_bias as in the paper's code. The decay rates exp(A_log) are distributed uniformly, and so
        are the logarithms of the step sizes softplus(dt_bias).
        """
        with torch.no_grad():
            nn.init.uniform_(self.A_log, 1, 16).log_()
            nn.init.uniform_(self.dt_bias, math.log(1e-3), math.log(0.1))
            steps = self.dt_bias.exp().clamp_min(1e-4)
            self.dt_bias.copy_(steps + (-torch.expm1(-steps)).log())  # the inverse of softplus
        return True

    def shard_tokens(self, group: Group) -> None:
        """Make the forward on each of R ranks use only the parameters of 1 / R of the heads."""
        self.groups = replace(self.groups, context=group)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, H · D] to the logarithms of the decays, [B, T, H, D] fp32, where H counts this rank's heads."""
        context, A_log, dt_bias = self.groups.context, local(self.A_log), local(self.dt_bias)
        if context is not None:
            A_log, dt_bias = (t.chunk(context.size)[context.rank] for t in (A_log, dt_bias))
        steps: Tensor = F.softplus(x.float() + dt_bias.float()).unflatten(-1, (len(A_log), -1))
        return -A_log.float().exp()[:, None] * steps


class _Sizes(NamedTuple):
    """The number of rows per unit for each part of the projection of `LigerKimiDeltaAttention`."""

    query: int
    key: int
    value: int
    forget: int
    gate: int
    beta: int


class LigerKimiDeltaAttention(LinearAttention):
    """Linear attention by the Kimi delta rule, with one packed input projection.

    The decays of all heads are computed from one latent with D elements, and the output gates of all heads from a
    second latent with D elements. The heads, and the channels of both latents, are divided into U units. For each unit,
    ``in_proj`` has the rows of the unit's queries, keys, values, channels of the two latents (decays, then gates), and
    update rates β (one row per head). The rows of ``conv_weight`` are also grouped by unit, but cover only queries,
    keys and values. Each of R ranks has 1 / R of the units. Because each head needs all channels of the latents, the
    ranks gather the channels.

    Args:
        hidden_size: C.
        num_heads: H.
        head_dim: D.
        conv_size: K, the number of tokens that the convolution covers.
        layer: index of the layer, and of its slot in the decode cache.
        eps: eps of the output norm.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: K is below 2 or more than the kernel supports.

    Source: https://arxiv.org/abs/2510.26692.
    """

    conv_name, unit_name = "short_conv_kernel_size", "the number of units of heads"
    linears = ("in_proj", "f_b_proj", "g_b_proj", "out_proj")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        conv_size: int,
        *,
        layer: int,
        eps: float = 1e-5,
        kernel: bool = True,
    ) -> None:
        units, sizes = self.units_of(num_heads, head_dim)
        super().__init__(hidden_size, units, sum(sizes), sum(sizes[:3]), conv_size, layer=layer, kernel=kernel)
        self.sizes, self.head_dim = _Sizes(*sizes), head_dim
        self.tensor_ranks: Group | None = None
        """The process group of tensor parallelism, or None."""
        # The projections from the latents to decays and to output gates, and the parameters of the decays.
        self.f_b_proj = nn.Linear(head_dim, num_heads * head_dim, bias=False)
        self.g_b_proj = nn.Linear(head_dim, num_heads * head_dim, bias=False)
        self.decay = ForgetGate(num_heads, head_dim)
        # The gated norm of the heads, and the output projection.
        self.norm = LigerGatedRMSNorm(head_dim, eps, act="sigmoid", kernel=kernel)
        self.out_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.draw(0.02)

    @staticmethod
    def units_of(num_heads: int, head_dim: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of units, and the number of rows of each part in a unit.

        All units have the same number of heads and the same number of latent channels. The number of units is the
        largest number for which this is possible.
        """
        units = math.gcd(num_heads, head_dim)
        heads, channels = num_heads // units, head_dim // units
        return units, (*(heads * head_dim,) * 3, channels, channels, heads)

    @property
    def state_elements(self) -> int:  # type: ignore[override]
        """See `LinearAttention.state_elements`."""
        return self.units * self.sizes.beta * self.head_dim**2

    @property
    def token_flops(self) -> int:  # type: ignore[override]
        """Floating-point operations per token: for each head, three products of a vector and the state (read, update,
        query)."""
        return 6 * self.state_elements

    def shard(self, group: Group) -> dict[str, int]:
        """See `LinearAttention.shard`."""
        shards = super().shard(group)
        self.norm.group = self.tensor_ranks = group
        # All ranks have the latents of all tokens, even under sequence parallelism, which shards tokens between layers.
        together = replace(group, sequence_parallel=False)
        self.f_b_proj = ColumnParallelLinear.of(self.f_b_proj, together)
        self.g_b_proj = ColumnParallelLinear.of(self.g_b_proj, together)
        return shards

    def own_shards(self) -> dict[str, int]:
        """See `LinearAttention.own_shards`."""
        own = {f"decay.{name}": 0 for name in ForgetGate.wide}
        return {**own, "f_b_proj.weight": 0, "g_b_proj.weight": 0}

    def draw(self, std: float) -> bool:
        """Initialize the convolution from a normal distribution with ``std``."""
        nn.init.normal_(self.conv_weight, std=std)
        return True

    def extra_repr(self) -> str:
        """Return the sizes for ``print(model)``."""
        return f"heads={self.units * self.sizes.beta}x{self.head_dim}, conv_size={self.conv_size}"

    def mix(
        self, projected: Tensor, states: tuple[Tensor, ...] | None, padding: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """See `LinearAttention.mix`."""
        # The inputs of the convolution are all queries, then all keys, then all values.
        sizes = self.sizes[:3]
        qkv, f, z, b = self.split(projected, (sizes, *([size] for size in self.sizes[3:])))

        # Compute the update rates β [B, T, H] and the logarithms of the decays [B, T, H, D]. Decays are computed in
        # fp32, because their errors multiply from token to token. Padding neither writes to the state nor makes it
        # decay.
        beta, g = b.sigmoid(), self.decay(self._of_latent(self.f_b_proj, f))
        if padding is not None:
            beta, g = beta.masked_fill(padding, 0), g.masked_fill(padding[..., None], 0)

        # The convolution and the delta rule continue from the states in the cache.
        conv_state, state = (None, None) if states is None else states
        convolved, conv_state = self.convolve(qkv, sizes, conv_state, options)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in convolved.chunk(3, -1))  # [B, T, H, D]
        out, state = run(kimi_delta_rule, kimi_delta_rule_reference, q, k, v, g, beta, initial_state=state, **options)
        gate = self._of_latent(self.g_b_proj, z).unflatten(-1, (-1, self.head_dim))
        normed: Tensor = self.norm(out, gate)
        return normed, (conv_state, state)

    def _of_latent(self, linear: nn.Linear, latent: Tensor) -> Tensor:
        """Gather a latent whose channels are divided among the ranks, and project it to this rank's heads with
        ``linear``."""
        context, ranks = self.groups.context, self.tensor_ranks
        if context is not None:  # a rank needs all channels of the latent for its heads
            latent = gather_channels(latent, context)
        if ranks is not None:  # `linear` sums the gradient of its input over the ranks
            latent = gather_vocab(latent, ranks, latent.shape[-1] * ranks.size)
        if context is None:
            return call_linear(linear, latent)
        if is_plain(linear):
            return F.linear(latent, self.own(linear.weight))
        whole: Tensor = linear(latent)  # a layer with adapters, for example, computes all heads
        return whole.chunk(context.size, -1)[context.rank]
