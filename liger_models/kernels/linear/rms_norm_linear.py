"""RMSNorm and the linear layer after it: `rms_norm_linear` of `norm_linear.py`, under the op's own name."""

from liger_models.kernels.linear.norm_linear import rms_norm_linear as rms_norm_linear
from liger_models.kernels.linear.norm_linear import rms_norm_linear_reference as rms_norm_linear_reference
