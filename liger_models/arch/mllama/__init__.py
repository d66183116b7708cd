"""Llama 3.2 Vision."""

from liger_models.arch.mllama.model import LigerMllama as LigerMllama
from liger_models.arch.mllama.model import MllamaConfig as MllamaConfig
