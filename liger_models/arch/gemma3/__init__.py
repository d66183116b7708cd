"""Gemma 3 with images."""

from liger_models.arch.gemma3.model import Gemma3Config as Gemma3Config
from liger_models.arch.gemma3.model import LigerGemma3 as LigerGemma3
