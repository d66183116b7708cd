"""A frozen weight in four-bit integers, which are packed as in compressed-tensors (Kimi K2.5).

    W = bf16((code - 8) · scale)        one scale per group of columns of a row

See `groups` for the kernels.

Source: https://github.com/vllm-project/compressed-tensors, ``compressors/pack_quantized``.
"""

from liger_models.kernels.frozen.groups import Groups
from liger_models.kernels.frozen.weight import register


@register
class Int4(Groups):
    """The format with codes [O, C / 2] uint8 and floating-point scales [O, G].

    The layout of a weight is ``[C / G]``, the number of columns per scale.
    """

    name = "int4"
    number = 6
    codes_kind = "int4"
    scales_kind = "float"
