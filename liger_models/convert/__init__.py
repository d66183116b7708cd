"""Reading and writing Hugging Face checkpoints, as files and in memory, independent of model families."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
