"""Mixture of experts: routing, the experts' gated MLPs, expert parallelism, and the load-balancing loss."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
