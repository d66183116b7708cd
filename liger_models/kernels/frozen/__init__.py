"""Frozen, quantized weights. Importing this package registers all formats by name."""

from liger_models.kernels.frozen import bnb_nf4 as bnb_nf4
from liger_models.kernels.frozen import float8_blocks as float8_blocks
from liger_models.kernels.frozen import frozen_float8_linear as frozen_float8_linear
from liger_models.kernels.frozen import int4 as int4
from liger_models.kernels.frozen import mxfp4 as mxfp4
from liger_models.kernels.frozen import nf4_linear as nf4_linear
from liger_models.kernels.frozen import nvfp4 as nvfp4
