"""Tiny models, batches for the ranks, and training steps: alike in one process and in several."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor

from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.arch.mixtral import LigerMixtral, MixtralConfig
from liger_models.base.causal_lm import CausalLM
from liger_models.train.optimizer import LigerAdamW

TINY: dict[str, Any] = {
    "vocab_size": 97,  # not a multiple of the number of ranks
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS, T = 4, 12

init_device_mesh = cache(device_mesh.init_device_mesh)
"""Once for each shape in a process: gloo has a thread for each group, which wakes up a hundred times a second."""


def tiny(**config: Any) -> LigerLlama:
    torch.manual_seed(7)
    model = LigerLlama.from_config(LlamaConfig(**{**TINY, "initializer_range": 0.1, **config}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    return model


def mixture() -> LigerMixtral:
    torch.manual_seed(7)
    return LigerMixtral.from_config(MixtralConfig(**TINY, initializer_range=0.1, num_local_experts=4))


def stir(model: Any) -> Any:
    """The model with trained parameters, such as those of adapters, away from where they start."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch(step: int, *, packed: bool = False) -> dict[str, Tensor]:
    """All ranks' rows, some of their tokens without a target."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(TINY["vocab_size"], (ROWS, T), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    made = {"input_ids": ids, "labels": labels}
    if packed:
        made["cu_seqlens"] = torch.tensor([0, 5, 12, 12 + 3, 24, 31, 36, 48])
    return made


def share(whole: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """One rank's rows of a batch."""
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    made = {name: value[rows] for name, value in whole.items() if name != "cu_seqlens"}
    if "cu_seqlens" in whole:
        bounds = whole["cu_seqlens"]
        low, high = rows.start * T, rows.stop * T
        made["cu_seqlens"] = bounds[(bounds >= low) & (bounds <= high)] - low
    return made


def make_optimizer(name: str, model: CausalLM) -> torch.optim.Optimizer:
    cls = {"liger": LigerAdamW, "torch": torch.optim.AdamW}[name]
    # Adam divides by the gradient's size: eps keeps rounding in gradients near zero from becoming a whole step.
    return cls(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def whole(parameters: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Values of parameters, gathered from all ranks."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in parameters
    }


def gradients(model: CausalLM) -> dict[str, Tensor]:
    return whole((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None)


def mean(value: Tensor) -> Tensor:
    """Over the ranks, where there are any."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value
