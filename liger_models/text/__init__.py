"""Conversion between texts and token ids: tokenizers and chat templates."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
