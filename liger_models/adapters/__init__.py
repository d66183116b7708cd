"""Additions to trained models: LoRA, 4-bit and float8 linear layers, Medusa heads, and multi-token prediction."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
