"""A format of frozen weights that is not in the package: int8 with a scale for each row. This file is all of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.kernels.frozen.weight import Format, FrozenWeight, register


@register
class Int8Rows(Format):
    """Codes [O, C] in int8 with a scale [O] in fp32 for each row."""

    name = "int8"
    number = 1000

    def tensors_like(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        return {"codes": (shape, torch.int8), "scales": (shape[:-1], torch.float32)}

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        wide = matrix.float()
        scales = (wide.abs().amax(1) / 127).clamp_min(1e-12)
        return (wide / scales[:, None]).round().to(torch.int8), scales

    def dense(self, weight: FrozenWeight) -> Tensor:
        return (weight.codes.float() * weight.scales[..., None]).to(weight.dtype)
