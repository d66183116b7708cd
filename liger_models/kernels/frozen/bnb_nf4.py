"""A frozen weight in NF4 with the scales of bitsandbytes, as stored in checkpoints of 4-bit models.

    W = bf16(table[code] · scale)        one scale per 64 columns of a row

The format of `nf4_linear`, which is torchao's, differs in two points. torchao rounds the numbers in the table to four
digits, and rounds scales to 8 bits on a uniform grid, whereas bitsandbytes rounds scales to the numbers in another
table. This format stores scales in fp32, so W is bitwise identical to the weight that bitsandbytes dequantizes. A
weight takes 4.5 bits per element. See `groups` for the kernels.

Source: https://github.com/bitsandbytes-foundation/bitsandbytes, ``functional.py``.
"""

from collections.abc import Sequence

from liger_models.kernels.frozen.groups import GroupConstants, Groups
from liger_models.kernels.frozen.weight import register


@register
class BitsAndBytesNF4(Groups):
    """The format with codes [O, C / 2] uint8 and scales [O, C / 64] in fp32.

    The first integer of the layout is the number of columns that share a scale. The second integer is 1 if W is rounded
    to float16, and 0 if W is rounded to bfloat16. W is rounded to the dtype that the model had before it was quantized.
    """

    name = "bnb_nf4"
    number = 7
    codes_kind = "nf4"
    scales_kind = "float"

    def constants(self, layout: Sequence[int]) -> GroupConstants:
        """Return the constants with which kernels dequantize a weight of this layout."""
        return GroupConstants(self.codes_kind, self.scales_kind, HALF=bool(layout[1]))
