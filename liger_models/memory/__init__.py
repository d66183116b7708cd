"""Memory of a training step: an estimate, and plans of recomputation and offloading within a budget."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
