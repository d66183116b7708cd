"""Medusa heads on a frozen transformers model, as in Liger Kernel's Medusa example."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DECAY = 0.8


class Head(nn.Module):
    """``projection(x + SiLU(A · x + b))``. A and b start at 0. The projection starts as a copy of the model's head."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        options = {"device": head.weight.device, "dtype": head.weight.dtype}
        self.block = nn.Linear(head.in_features, head.in_features, **options)
        nn.init.zeros_(self.block.weight)
        nn.init.zeros_(self.block.bias)
        self.projection = nn.Linear(head.in_features, head.out_features, bias=False, **options)
        self.projection.weight.data.copy_(head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.block(x))


class MedusaLoss(nn.Module):
    """The weighted sum of the heads' losses.

    Args:
        model: a model of transformers.
        heads: number of heads.
        liger: whether Liger Kernel's fused linear cross entropy computes the losses. Otherwise logits are built.
    """

    def __init__(self, model: nn.Module, heads: int, liger: bool) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.heads = nn.ModuleList(Head(model.lm_head) for _ in range(heads))
        self.fused = None
        if liger:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            self.fused = LigerFusedLinearCrossEntropyLoss()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        losses = []
        for k, head in enumerate(self.heads, 1):
            # Head k predicts the token k + 1 positions ahead.
            rows = head(hidden[:, : -(k + 1)]).flatten(0, 1)  # [B (T − k − 1), C]
            target = labels[:, k + 1 :].flatten()
            if self.fused is None:
                loss = F.cross_entropy(head.projection(rows).float(), target)
            else:
                loss = self.fused(head.projection.weight, rows, target)
            losses.append(DECAY**k * loss)
        return (torch.stack(losses).sum(),)
