"""Base classes of the model families and of their processors, and functions that read images and videos."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
