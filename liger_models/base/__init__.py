"""Base classes of the families: models, processors, and reading images."""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.base.captured import CapturedStep as CapturedStep
    from liger_models.base.causal_lm import CausalLM as CausalLM
    from liger_models.base.processor import Processor as Processor
    from liger_models.base.vision_language import VisionLanguageModel as VisionLanguageModel
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "captured": ["CapturedStep"],
            "causal_lm": ["CausalLM"],
            "processor": ["Processor"],
            "vision_language": ["VisionLanguageModel"],
        },
    )
