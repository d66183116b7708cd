"""Rotary position embedding: frequencies of every scaling type, fp32 tables per token.

Source: RoFormer (https://arxiv.org/abs/2104.09864), YaRN (https://arxiv.org/abs/2309.00071), and the frequency rules
that the released checkpoints were trained with, as transformers' ``modeling_rope_utils.py`` has them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from liger_models.kernels.rope import rope


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK: past ``max_position_embeddings`` the base grows with the length of the sequence at hand."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths divided by ``factor``, short ones kept, a smooth ramp between (Llama 3.1 and later)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Ramp between kept and divided frequencies, by number of rotations over the original length."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling

ROPE_TYPES: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
"""``rope_type`` of a config.json -> its dataclass. ``default`` is no scaling: None."""
