"""A frozen weight in MXFP4, the format of the experts of GPT-OSS.

    W = number(code) · 2^(scale - 127)        one scale per 32 columns of a row

The codes are floating-point numbers with a sign bit, two exponent bits and one mantissa bit. All products are exact in
bfloat16. See `groups` for the kernels.

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from liger_models.kernels.frozen.groups import Groups
from liger_models.kernels.frozen.weight import register


@register
class MXFP4Groups(Groups):
    """The format with codes [O, C / 2] and scales [O, C / 32], both uint8. A weight's layout is ``[32]``."""

    name = "mxfp4"
    number = 4
    codes_kind = "e2m1"
    scales_kind = "e8m0"
