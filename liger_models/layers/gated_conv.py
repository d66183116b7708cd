"""The gated short convolution of LFM2: a convolution over a few tokens, whose input and output are multiplied by
gates."""

import math
from typing import Any

from torch import Tensor, nn

from liger_models.layers.linear_attention import LinearAttention

MOST_UNITS = 64
"""Maximum number of units into which the channels are divided. A unit consists of adjacent channels. The layer can be
sharded over at most this many ranks, because each rank needs whole units."""


class LigerGatedConv(LinearAttention):
    """``out_proj(C · conv(B · x))``, where one packed projection computes ``B``, ``C`` and ``x``.

    The channels are divided into units. The rows of ``in_proj`` are grouped by unit: each group has the rows for the
    unit's channels of B, then of C, then of x. The convolution has no activation, and the rows of its weight are in the
    order of the channels. The state of a layer consists of the last K − 1 inputs of the convolution.

    Args:
        hidden_size: width of the input, which is also the number of channels.
        conv_size: K, the number of tokens that the convolution covers.
        layer: index of the layer, and of its slot in the decode cache.
        bias: whether the projections and the convolution have biases.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: K is below 2, or above the limit of the kernel.

    Source: https://arxiv.org/abs/2511.23404.
    """

    conv_name, unit_name = "conv_L_cache", "the number of units of channels"

    def __init__(
        self, hidden_size: int, conv_size: int, *, layer: int, bias: bool = False, kernel: bool = True
    ) -> None:
        units = self.units_of(hidden_size)
        self.width = hidden_size // units
        super().__init__(
            hidden_size, units, 3 * self.width, self.width, conv_size, layer=layer, bias=bias, conv_bias=bias,
            kernel=kernel,
        )  # fmt: skip
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.draw(0.02)

    @staticmethod
    def units_of(hidden_size: int) -> int:
        """Return the number of units into which the channels are divided."""
        return math.gcd(hidden_size, MOST_UNITS)

    @property
    def token_flops(self) -> int:  # type: ignore[override]
        """Floating-point operations per token in the convolution and in both gates."""
        return (2 * self.conv_size + 2) * self.units * self.width

    def draw(self, std: float) -> bool:
        """Initialize the convolution from a normal distribution with ``std``."""
        nn.init.normal_(self.conv_weight, std=std)
        if self.conv_bias is not None:
            nn.init.zeros_(self.conv_bias)
        return True

    def extra_repr(self) -> str:
        """Return the sizes for ``print(model)``."""
        return f"channels={self.units * self.width}, conv_size={self.conv_size}"

    def mix(
        self, projected: Tensor, states: tuple[Tensor, ...] | None, padding: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """See `LinearAttention.mix`."""
        B, C, x = projected.unflatten(-1, (self.units, 3, self.width)).unbind(-2)  # [B, T, U, channels of a unit]
        state = None if states is None else states[0]
        convolved, state = self.convolve((B * x).flatten(2), [self.width], state, options, activation=None)
        gated: Tensor = C.flatten(2) * convolved
        return gated, (state,)
