"""Process groups: collectives, helpers for the default group, and the groups over which a model is distributed."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
