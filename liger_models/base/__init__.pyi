from liger_models.base.captured import CapturedStep as CapturedStep
from liger_models.base.causal_lm import CausalLM as CausalLM
from liger_models.base.processor import Processor as Processor
from liger_models.base.vision_language import VisionLanguageModel as VisionLanguageModel
