"""The full training step of a mode: forward, backward, optimizer."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .build import build, shard
from .modes import Mode


@dataclass
class Step:
    """Batch -> loss of one whole training step."""

    model: nn.Module
    forward: Callable[..., Any]
    optimizer: torch.optim.Optimizer

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.forward(**batch)
        loss: Tensor = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def make_step(mode: Mode, config: dict, lr: float, sharded: bool = False) -> Step:
    """The step of a mode, on one GPU or ``sharded`` over the process group."""
    model = build(config, mode)
    ours = mode.library == "ours"
    if sharded:
        model = shard(model, ours, "cp" in mode)
    model.train()
    forward = torch.compile(model, fullgraph=ours) if "compile" in mode else model
    return Step(model, graphed(forward) if "graph" in mode else forward, make_optimizer(model, mode, lr))


def make_optimizer(model: nn.Module, mode: Mode, lr: float) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "adamw" not in mode and "inbackward" not in mode:
        return torch.optim.AdamW(trained, lr=lr, fused=True)
    from liger_models import LigerAdamW, step_in_backward  # not imported by processes of transformers

    moments = mode.blocks("moments", len(model.layers))
    stay = [block for i, block in enumerate(model.layers) if i not in model.offloaded]
    blocks = stay if moments <= len(stay) else model.layers
    on_host = [parameter for i in range(moments) for parameter in blocks[i * len(blocks) // moments].parameters()]
    optimizer = LigerAdamW(trained, lr=lr, offload=on_host, state_dtype=torch.int8 if "8bit" in mode else None)
    if "inbackward" in mode:
        step_in_backward(optimizer)
    return optimizer


class Loss(nn.Module):
    """The loss of a batch of text, with tensors as the only arguments, as CUDA graphs require."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (self.model(input_ids=input_ids, labels=labels).loss,)


def graphed(model: nn.Module) -> Callable[..., Any]:
    """The model's loss, its forward and backward replayed from CUDA graphs; every batch has the first one's shapes."""
    replay: Any = None

    def forward(input_ids: Tensor, labels: Tensor) -> Any:
        nonlocal replay
        replay = replay or torch.cuda.make_graphed_callables(Loss(model), (input_ids.clone(), labels.clone()))
        return replay(input_ids, labels)

    return forward


def step_times(step: Callable[[], Any], steps: int) -> list[float]:
    """Milliseconds of each step. The host does not wait for the device between steps."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
