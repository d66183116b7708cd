"""Text embedding models and rerankers for search, their folders for sentence-transformers, and retrieval metrics."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
