"""Gemma 4 with images."""

from liger_models.arch.gemma4.model import Gemma4Config as Gemma4Config
from liger_models.arch.gemma4.model import LigerGemma4 as LigerGemma4
