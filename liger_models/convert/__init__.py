"""Functions that read and write Hugging Face checkpoints of any model family, as files and as tensors in memory."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
