"""An auxiliary loss that makes the router distribute the tokens evenly among the experts.

Source: https://arxiv.org/abs/2101.03961, computed as in transformers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.distributed.collectives import Group, sum_over
from liger_models.kernels.moe.routing import Routing, route


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor],
    top_k: int,
    attention_mask: Tensor | None = None,
    ranks: Group | None = None,
) -> Tensor:
    """Compute ``X · Σ_e f_e · P_e`` over the rows of all layers together.

    f_e and P_e are means over the rows. For a single row, f_e is 1 if expert e is among the row's K experts, and 0
    otherwise. P_e is the probability of e in the softmax over all experts. The gradient flows through P only. For
    uniform routing, the loss is K.

    Args:
        router_logits: a tensor [..., X] for each layer, or one tensor for all layers.
        top_k: K.
        attention_mask: [B, T], 0 where a token is padding, and 1 elsewhere. The B · T rows of each layer are in the
            order of the mask's elements.
        ranks: process group whose ranks hold different rows of the batch. The loss is computed over the rows of all
            ranks, and the mean of the ranks' gradients is the gradient of the loss.

    Returns:
        The loss [] fp32, which is the same on all ranks. The loss is 0 if there are no rows.

    Raises:
        ValueError: there is no layer, or the mask does not match the rows.
    """
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    if len(layers) == 0:
        raise ValueError("load_balancing_loss: router_logits must hold a tensor, got none.")
    logits = torch.cat([layer.flatten(0, -2) for layer in layers])
    rows, X = logits.shape
    compute = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(-1, dtype=compute)
    _, experts = route(logits.detach(), Routing(top_k))
    if attention_mask is None:
        counted = probabilities.new_ones(rows)
    else:
        if attention_mask.numel() == 0 or rows % attention_mask.numel() != 0:
            raise ValueError(
                f"load_balancing_loss: the {rows} rows of router_logits must be a multiple of attention_mask's "
                f"{attention_mask.numel()}."
            )
        counted = attention_mask.reshape(-1).to(logits.device, compute).repeat(rows // attention_mask.numel())
        probabilities = probabilities * counted.unsqueeze(-1)
    # Only zeros and ones are added, so the order of atomic additions does not change the result.
    picked = counted.new_zeros(X).scatter_add(
        0, experts.reshape(-1), counted.unsqueeze(-1).expand_as(experts).reshape(-1)
    )
    total, probability = counted.sum(), probabilities.sum(0)
    if ranks is not None:
        picked, total = sum_over(picked, ranks), sum_over(total, ranks)
        probability = sum_over(probability, ranks)
    total = total.clamp_min(1)
    return X * (picked / total * (probability / total)).sum()
