"""AltUp, which maintains the residual streams of Gemma 3n, and LAuReL, the low-rank branch of its blocks.

A block runs on one stream. Before the block, a prediction of each stream is computed as a mixture of all streams; the
block runs on one of the predictions. After the block, a multiple of the difference between the block's output and its
input is added to each prediction.

Source: https://arxiv.org/abs/2301.13310 (AltUp), https://arxiv.org/abs/2411.07501 (LAuReL).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ReplicatedLinear, replicated
from liger_models.layers.norm import LigerRMSNorm, call_linear

LEAST = 1e-5
"""Lower bound of a stream's mean square when the stream is divided by its RMS."""


def magnitude(x: Tensor, least: float) -> Tensor:
    """Return the root mean square [..., 1] of x [..., C] over C. A mean square below ``least`` is replaced with
    ``least``."""
    return x.square().mean(-1, keepdim=True).clamp_min(least).sqrt()


class Streams(Layer):
    """Makes the streams from the embeddings, and merges the streams into one output after the last block. All streams
    are scaled to the same magnitude.

    Args:
        config: sizes and constants of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        C, others = config.hidden_size, range(1, config.altup_num_inputs)
        self.projections = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in others)
        self.unembeds = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in others)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate all projections."""
        for linears in (self.projections, self.unembeds):
            for index, linear in enumerate(linears):
                linears[index] = ReplicatedLinear.of(linear, group)  # type: ignore[arg-type]
        return {}

    def split(self, embeds: Tensor) -> Tensor:
        """The embeddings [B, T, C] are the first stream; return the other streams [n − 1, B, T, C]."""
        # The embedding of padding is 0, where the gradient of the square root would be infinite. The magnitude
        # therefore has a lower bound above 0.
        target = magnitude(embeds, torch.finfo(torch.float32).tiny)
        parts = [projection(embeds) for projection in self.projections]
        return torch.stack([part * target / magnitude(part, LEAST) for part in parts])

    def merge(self, first: Tensor, others: Tensor) -> Tensor:
        """Return the mean [B, T, C] of n tensors: ``first`` [B, T, C] and the projected ``others`` [n − 1, B, T, C]."""
        target = magnitude(first, torch.finfo(torch.float32).tiny)
        parts = [unembed(stream) for unembed, stream in zip(self.unembeds, others.unbind(), strict=True)]
        return torch.stack([first, *(part * target / magnitude(part, LEAST) for part in parts)]).mean(0)


class AltUp(Layer):
    """Predicts the streams before a block, and corrects them after it.

    In training, the coefficients are clipped to ±``altup_coef_clip``. transformers writes the clipped prediction
    coefficients into the weight; this package leaves the weight unchanged.

    Args:
        config: sizes and constants of the model.
        norm: function that returns a norm of a given width.
    """

    def __init__(self, config: Any, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        C, self.streams, self.clip = config.hidden_size, config.altup_num_inputs, config.altup_coef_clip
        self.router_norm = norm(C)
        self.modality_router = nn.Linear(C, self.streams, bias=False)
        self.prediction = nn.Linear(self.streams, self.streams**2, bias=False)
        self.correction = nn.Linear(self.streams, self.streams, bias=False)
        self.scales = config.altup_correct_scale
        self.scale = nn.Parameter(torch.zeros(C), requires_grad=self.scales)
        """The output factor, which multiplies the corrected first stream before the per-layer branch reads it. Every
        checkpoint has this factor, even if the model does not use it."""
        self.group: Group | None = None

    def draw(self, std: float) -> bool:
        """Set the output factor to 0."""
        nn.init.zeros_(self.scale)
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the projections."""
        self.group = group
        for name in ("modality_router", "prediction", "correction"):
            setattr(self, name, ReplicatedLinear.of(getattr(self, name), group))
        return {}

    def sum_gradients(self, group: Group) -> bool:
        """Store the group over which the gradient of ``scale`` will be all-reduced."""
        self.group = group
        return True

    def predict(self, streams: Tensor) -> Tensor:
        """Return the predicted streams [n, B, T, C]. The first predicted stream is the block's input."""
        weights = self._coefficients(self.prediction, streams[0]).unflatten(-1, (self.streams, self.streams))
        return torch.einsum("btij,jbtc->ibtc", weights, streams) + streams

    def correct(self, predicted: Tensor, output: Tensor) -> Tensor:
        """Use the block's output [B, T, C] to correct the predictions [n, B, T, C] of all streams."""
        weights = self._coefficients(self.correction, output) + 1.0  # [B, T, n]
        return predicted + (output - predicted[0]) * weights.movedim(-1, 0)[..., None]

    def scaled(self, x: Tensor) -> Tensor:
        """Multiply x [B, T, C] by the output factor, if the model uses this factor."""
        return x * replicated(self.scale, self.group).to(x.dtype) if self.scales else x

    def _coefficients(self, linear: Any, x: Tensor) -> Tensor:
        """Return ``linear(tanh(router(norm(x) / C)))`` [B, T, coefficients] for x [B, T, C]."""
        routed = call_linear(self.modality_router, self.router_norm(x) * x.shape[-1] ** -1.0)
        routed = routed.float().tanh().to(x.dtype)
        if self.training and self.clip is not None and type(linear) in (nn.Linear, ReplicatedLinear):
            weight = replicated(linear.weight, self.group)
            return F.linear(routed, weight.clamp(-self.clip, self.clip))
        return call_linear(linear, routed)


class Laurel(Layer):
    """``x + norm(right(left(x)))``, where ``left`` projects to a small width and ``right`` projects back.

    Args:
        config: sizes and constants of the model.
        norm: function that returns a norm of a given width.
    """

    def __init__(self, config: Any, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        C, rank = config.hidden_size, config.laurel_rank
        self.left = nn.Linear(C, rank, bias=False)
        self.right = nn.Linear(rank, C, bias=False)
        self.norm = norm(C)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate both projections."""
        self.left = ReplicatedLinear.of(self.left, group)
        self.right = ReplicatedLinear.of(self.right, group)
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        y: Tensor = x + self.norm(call_linear(self.right, call_linear(self.left, x)))
        return y
