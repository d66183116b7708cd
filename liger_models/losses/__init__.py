"""Training losses as modules: cross entropy, preference, GRPO and distillation losses. Each loss has its own file."""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
