"""Frozen, quantized weights. Importing this package registers all formats by name."""

from liger_models.kernels.frozen import float8_blocks as float8_blocks
from liger_models.kernels.frozen import frozen_float8_linear as frozen_float8_linear
from liger_models.kernels.frozen import nf4_linear as nf4_linear
