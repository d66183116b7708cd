"""The training command, and components for custom training loops: optimizers, metrics, seeding and kernel warm-up."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
