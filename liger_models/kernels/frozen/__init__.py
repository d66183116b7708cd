"""Frozen weights in fewer bits. Importing the room registers the formats, so that all of them are known by name."""

from liger_models.kernels.frozen import float8_blocks as float8_blocks
from liger_models.kernels.frozen import frozen_float8_linear as frozen_float8_linear
from liger_models.kernels.frozen import nf4_linear as nf4_linear
