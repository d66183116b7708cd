"""Native implementations of the open LLM families on fused Triton kernels."""

from liger_models.common.lazy import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
