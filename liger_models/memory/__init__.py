"""Memory of a training step: recomputation, offloading to host memory, an estimate, and plans within a budget."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
