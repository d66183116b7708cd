"""A frozen weight in NVFP4, as ModelOpt and compressed-tensors write it.

    W = bf16(number(code) · scale · factor)        ModelOpt
    W = bf16(number(code) · scale / factor)        compressed-tensors

The codes are the same as in MXFP4. In each row, 16 columns share a scale in float8 (e4m3). The whole matrix has one
factor in fp32. In memory, each row has its own copy of the factor, so that a packed projection can interleave the rows
of several matrices. See `groups` for the kernels.

Source: https://github.com/NVIDIA/Model-Optimizer, ``torch/quantization/qtensor/nvfp4_tensor.py``.
"""

from collections.abc import Sequence

from liger_models.kernels.frozen.groups import GroupConstants, Groups
from liger_models.kernels.frozen.weight import register


@register
class NVFP4Groups(Groups):
    """The format with codes [O, C / 2] uint8, scales [O, C / 16] in e4m3, and factors [O, 1] in fp32.

    The layout is ``[16, 0]``, or ``[16, 1]`` if scales are divided by factors.
    """

    name = "nvfp4"
    number = 5
    names = ("codes", "scales", "factors")
    codes_kind = "e2m1"
    scales_kind = "e4m3"

    def constants(self, layout: Sequence[int]) -> GroupConstants:
        """Return the constants with which kernels dequantize a weight of this layout."""
        return GroupConstants(self.codes_kind, self.scales_kind, "over" if layout[1] else "times")
