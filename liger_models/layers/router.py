"""Mixtures of experts whose router scores experts in fp32, and may choose them within groups (DeepSeek V2 and V3)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group
from liger_models.layers.layer import Layer
from liger_models.layers.linear import local, replicated
from liger_models.layers.moe import LigerMoE


class Routing(NamedTuple):
    """How a router's logits become experts and their weights.

    Attributes:
        scoring: "softmax" or "sigmoid", the function from logits to scores.
        groups, top_groups: number of groups of experts, and number of groups from which the experts of a token are
            chosen.
        group_experts: number of a group's best experts whose scores are added to the score of the group.
        normalize: whether to divide the K weights of a token by their sum.
        factor: number by which all weights are multiplied.
        fp32: whether to compute logits in fp32 instead of in the dtype of the activations.
    """

    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_experts: int = 1
    normalize: bool = False
    factor: float = 1.0
    fp32: bool = True


LEAST_SUM = 1e-20
"""Number that is added to the sum by which weights are divided, because all scores may be 0."""


def choose_experts(
    logits: Tensor, top_k: int, routing: Routing, bias: Tensor | None = None, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and compute their weights.

    The chosen experts have the largest scores after ``bias`` is added, among the experts of the best groups. The
    weights are computed from the scores without the bias.

    Args:
        logits: [N, X].
        top_k: K.
        routing: the rule.
        bias: [X], which is added to the scores for the choice only; None for no bias.
        given: [N, K] integers, experts that replace the choice unless the first one of a token is negative.

    Returns:
        ``(weights [N, K] in fp32, experts [N, K] int64)``; fp64 logits give fp64 weights.
    """
    compute = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.to(compute)
    if routing.scoring == "sigmoid":
        scores = wide.sigmoid()
    else:  # without fp32, the scores have the dtype of the logits
        scores = wide.softmax(-1) if routing.fp32 else logits.softmax(-1)

    # The choice has no gradient.
    choice = scores.detach().to(compute)
    choice = choice if bias is None else choice + bias.to(compute)
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))  # [N, groups, X / groups]
        best = grouped.topk(routing.group_experts, -1).values.sum(-1).topk(routing.top_groups, -1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    experts = choice.topk(top_k, -1).indices
    if given is not None:
        experts = torch.where(given[:, :1] < 0, experts, given.long())

    weights = scores.gather(-1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return (weights * routing.factor).to(compute), experts


class LigerRouter(Layer):
    """The logits of experts, and a bias for their choice, which stays in fp32 and is not trained by gradients.

    Args:
        hidden_size: C.
        num_experts: X.
        correction: whether the router has the bias, ``e_score_correction_bias``.
        fp32: whether to compute logits in fp32.
    """

    def __init__(self, hidden_size: int, num_experts: int, *, correction: bool, fp32: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(num_experts, dtype=torch.float32), requires_grad=False) if correction else None
        )
        self.fp32 = fp32
        self.draw(0.02)

    @property
    def fp32_parameters(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Layer.fp32_parameters`."""
        return () if self.e_score_correction_bias is None else ("e_score_correction_bias",)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "LigerRouter":
        # The bias moves with the layer, but is not cast to a narrower dtype, which would change the choice of experts.
        before = None if self.e_score_correction_bias is None else self.e_score_correction_bias.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype.itemsize < 4:
            kept = torch.empty_like(after, dtype=torch.float32) if before.is_meta else before.to(after.device).float()
            self.e_score_correction_bias = nn.Parameter(kept, requires_grad=False)
        return self

    def draw(self, std: float) -> bool:
        """Initialize the weight from a normal distribution with ``std``, and the bias by zeros."""
        nn.init.normal_(self.weight, std=std)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the weight."""
        self.groups = replace(self.groups, tensor=group)
        return {}

    def sum_gradients(self, group: Group) -> bool:
        """Return True, because the forward already sums the gradient of the weight."""
        return True

    def extra_repr(self) -> str:
        """Return the sizes for ``print(model)``."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, fp32={self.fp32}"

    def forward(self, x: Tensor) -> Tensor:
        """Map x [N, C] to logits [N, X]."""
        weight = replicated(self.weight, self.groups.tensor)
        if not self.fp32:
            return F.linear(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), weight.to(wide))


class LigerRoutedMoE(LigerMoE):
    """`LigerMoE` whose experts are chosen by a `Routing`.

    Args:
        hidden_size, intermediate_size, num_experts, top_k: as in `LigerMoE`.
        routing: how logits become experts and weights.
        correction: whether the router has a bias that is added to the scores for the choice of experts.
        options: further options of `LigerMoE`.

    Raises:
        ValueError: the groups do not divide the experts, or the chosen groups have fewer than ``top_k`` experts.

    Source: https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        routing: Routing,
        correction: bool = False,
        **options: Any,
    ) -> None:
        _, groups, chosen, best, *_ = routing
        width = num_experts // groups
        if not (num_experts % groups == 0 and 1 <= chosen <= groups and chosen * width >= top_k):
            raise ValueError(
                f"LigerRoutedMoE: n_group ({groups}) must divide the {num_experts} experts, and topk_group ({chosen}) "
                f"groups must have at least top_k ({top_k}) experts. Check config.json."
            )
        if groups > 1 and not best <= width:
            raise ValueError(
                f"LigerRoutedMoE: n_group ({groups}) groups of {num_experts} experts must have at least {best} experts "
                "each. Check config.json."
            )
        super().__init__(hidden_size, intermediate_size, num_experts, top_k, normalize=routing.normalize, **options)
        self.gate = LigerRouter(hidden_size, num_experts, correction=correction, fp32=routing.fp32)
        self.routing = routing

    def _route(self, logits: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        bias = getattr(self.gate, "e_score_correction_bias", None)
        given = None if experts is None else experts.flatten(0, -2)
        return *choose_experts(logits, self.top_k, self.routing, None if bias is None else local(bias), given), logits
