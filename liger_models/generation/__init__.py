"""Text generation: greedy decoding, sampling, speculative decoding and rollouts."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
