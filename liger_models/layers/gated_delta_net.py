"""Gated DeltaNet: linear attention with one state matrix per head, after a short convolution."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import Group
from liger_models.kernels.linear_attention.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from liger_models.kernels.linear_attention.step_sizes import step_sizes
from liger_models.layers.linear_attention import LigerGatedRMSNorm, LinearAttention, run


class _Sizes(NamedTuple):
    """The number of rows per key head for each part of the projection of `LigerGatedDeltaNet`."""

    query: int
    key: int
    value: int
    gate: int
    beta: int
    decay: int


class LigerGatedDeltaNet(LinearAttention):
    """Linear attention by the gated delta rule, with one packed input projection.

    The rows of ``in_proj`` are grouped by key head. Each group has rows for the query, the key, the values, the gates,
    the update rates β and the decays, in this order. The values, gates, update rates and decays belong to the group's
    Hv / Hk value heads. Each value head has one update rate and one decay. The rows of ``conv_weight`` are also grouped
    by key head, but cover only queries, keys and values.

    Args:
        hidden_size: C.
        num_key_heads, num_value_heads: Hk and Hv; Hv is a multiple of Hk.
        key_dim, value_dim: Dk and Dv.
        conv_size: K, the number of tokens that the convolution covers.
        layer: index of the layer, and of its slot in the decode cache.
        eps: eps of the output norm.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: Hv is not a multiple of Hk, or K is below 2 or more than the kernel supports.

    Source: https://arxiv.org/abs/2412.06464.
    """

    conv_name, unit_name = "linear_conv_kernel_dim", "linear_num_key_heads"

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
        if num_value_heads % num_key_heads != 0:
            raise ValueError(
                f"LigerGatedDeltaNet: num_value_heads ({num_value_heads}) must be a multiple of num_key_heads "
                f"({num_key_heads})."
            )
        values = num_value_heads // num_key_heads
        sizes = _Sizes(key_dim, key_dim, values * value_dim, values * value_dim, values, values)
        super().__init__(
            hidden_size, num_key_heads, sum(sizes), sum(sizes[:3]), conv_size, layer=layer, kernel=kernel
        )  # fmt: skip
        self.sizes, self.key_dim, self.value_dim = sizes, key_dim, value_dim
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        # The gated norm of the heads, and the output projection.
        self.norm = LigerGatedRMSNorm(value_dim, eps, kernel=kernel)
        self.out_proj = nn.Linear(num_value_heads * value_dim, hidden_size, bias=False)
        self.draw(0.02)

    @property
    def state_elements(self) -> int:  # type: ignore[override]
        """See `LinearAttention.state_elements`."""
        return self.units * self.sizes.beta * self.key_dim * self.value_dim

    @property
    def token_flops(self) -> int:  # type: ignore[override]
        """Floating-point operations per token: for each value head, three products of a vector and the state (read,
        update, query)."""
        return 6 * self.state_elements

    def shard(self, group: Group) -> dict[str, int]:
        """See `LinearAttention.shard`."""
        self.norm.group = group
        return super().shard(group)

    def own_shards(self) -> dict[str, int]:
        """See `LinearAttention.own_shards`."""
        return {"dt_bias": 0, "A_log": 0}

    def draw(self, std: float) -> bool:
        """Initialize the convolution from a normal distribution with ``std``, ``dt_bias`` with ones, and ``A_log`` with
        the logarithms of uniformly distributed numbers."""
        nn.init.normal_(self.conv_weight, std=std)
        nn.init.ones_(self.dt_bias)
        nn.init.uniform_(self.A_log, 0.01, 16)  # the lower bound is not 0, because log(0) is infinite
        with torch.no_grad():
            self.A_log.log_()
        return True

    def extra_repr(self) -> str:
        """Return the sizes for ``print(model)``."""
        keys, values = (self.units, self.key_dim), (self.units * self.sizes.beta, self.value_dim)
        return f"key_heads={keys[0]}x{keys[1]}, value_heads={values[0]}x{values[1]}, conv_size={self.conv_size}"

    def mix(
        self, projected: Tensor, states: tuple[Tensor, ...] | None, padding: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """See `LinearAttention.mix`."""
        # The inputs of the convolution are all queries, then all keys, then all values: [B, T, Hk · (2 Dk) + Hv · Dv].
        sizes = self.sizes[:3]
        qkv, z, b, a = self.split(projected, (sizes, *([size] for size in self.sizes[3:])))

        # Compute the update rates β and the logarithms of the decays, [B, T, Hv]. Decays are computed in fp32, because
        # their errors multiply from token to token. Padding neither writes to the state nor makes it decay.
        beta = b.sigmoid()
        _, g = step_sizes(a, self.own(self.A_log), self.own(self.dt_bias))
        if padding is not None:
            beta, g = (x.masked_fill(padding, 0) for x in (beta, g))

        # The convolution and the delta rule continue from the states in the cache.
        conv_state, state = (None, None) if states is None else states
        convolved, conv_state = self.convolve(qkv, sizes, conv_state, options)
        q, k, v = convolved.split([self.units * size for size in sizes], -1)
        q, k = (x.unflatten(-1, (-1, self.key_dim)) for x in (q, k))  # [B, T, Hk, Dk]
        v, z = (x.unflatten(-1, (-1, self.value_dim)) for x in (v, z))  # [B, T, Hv, Dv]
        out, state = run(gated_delta_rule, gated_delta_rule_reference, q, k, v, g, beta, initial_state=state, **options)
        normed: Tensor = self.norm(out, z)
        return normed, (conv_state, state)
