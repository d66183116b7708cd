"""Thin wrappers around PyTorch's FSDP2, DTensor and checkpoints, for training on several devices in your own loop."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
