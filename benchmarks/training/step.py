"""The full training step of a mode: forward, backward, optimizer."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .build import build, build_sharded
from .modes import Mode


@dataclass
class Step:
    """A training step. It takes a batch and returns the loss."""

    model: nn.Module
    forward: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    plan: Any = None
    """The `MemoryPlan`, for modes with a plan."""
    captured: bool = False
    """Whether forward and backward are one `CapturedStep`."""
    replay: Any = None
    balanced: bool = False
    """Whether `balanced_experts` replaces the routers' choice."""

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        if self.balanced:
            batch = batch | {"routed_experts": balanced_experts(self.model, batch["input_ids"])}
        if self.captured:
            self.replay = self.replay or self.model.capture(batch)
            loss: Tensor = self.replay(batch)
        else:
            out = self.forward(**batch)
            loss = out[0] if isinstance(out, tuple) else out.loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def make_step(mode: Mode, config: dict, lr: float, sharded: bool = False, shape: tuple[int, int] | None = None) -> Step:
    """Make a mode's step on one GPU, or ``sharded`` over the process group. A plan needs the batch's ``shape``."""
    ours, plan = mode.library == "ours", None
    if mode.library in ("unsloth", "titan"):
        assert shape is not None
        model = build_peer(config, mode, sharded, shape[1])
    else:
        model = build_sharded(config, mode) if sharded else build(config, mode)
        plan = make_plan(model, mode, *shape) if shape and "plan" in mode else None

    # Wrap the forward in compilation and CUDA graphs.
    model.train()
    whole = "compile" in mode and (ours or (mode.library == "hf" and not sharded))
    forward = torch.compile(model, fullgraph=ours) if whole else model
    optimizer = make_optimizer(model, mode, lr, plan)
    captured = "graph" in mode and ours and not whole
    forward = graphed(forward) if "graph" in mode and not captured else forward
    return Step(model, forward, optimizer, plan, captured, balanced="balanced" in mode)


def balanced_experts(model: Any, ids: Tensor) -> Tensor:
    """Experts [B, T, L, K] for tokens [B, T] in each of L layers. All experts get the same number of tokens.

    The numbers are exactly equal if the number of tokens is a multiple of the number of experts. The K experts of a
    token are evenly spread over all experts, and thus over expert-parallel ranks.
    """
    routers = model.routers
    if not routers:
        raise ValueError(f"balanced: is for models with routed experts, got {type(model).__name__} without any.")
    K, X = routers[0].top_k, routers[0].num_experts
    first = torch.arange(ids.numel(), device=ids.device).view(*ids.shape, 1, 1)
    experts = (first + torch.arange(K, device=ids.device) * (X // K)) % X
    return experts.to(torch.int16).expand(-1, -1, len(routers), -1)


def build_peer(config: dict, mode: Mode, sharded: bool, tokens: int) -> nn.Module:
    """A module of torchtitan or Unsloth that returns the loss of a batch. Only modes of these libraries import them."""
    if mode.library == "titan":
        from .titan import TitanLoss

        return TitanLoss(config, mode, sharded, tokens)
    from .unsloth import UnslothLoss

    return UnslothLoss(mode, tokens)


def make_plan(model: nn.Module, mode: Mode, B: int, T: int) -> Any:
    """Plan a step on one GPU and apply the plan to the model. Only with LigerAdamW may the plan move the optimizer."""
    from liger_models.memory import plan_memory
    from liger_models.train import estimate

    # The estimate that this package's own training makes, without gathered weights.
    in_bits = {"four_bit": "nf4" in mode, "float8": "float8" in mode, "moments_8bit": "8bit" in mode}
    memory = estimate(model, B * T, **in_bits)
    if not (in_bits["four_bit"] or in_bits["float8"]):
        memory = memory._replace(temporary=0)  # nothing is gathered
    ours = "adamw" in mode or "inbackward" in mode
    budget = mode.extras["plan"] * 10**9
    plan = plan_memory(model, B * T, budget, memory=memory, length=T, host_moments=ours, in_backward=ours)
    plan.apply(model)
    return plan


def make_optimizer(model: nn.Module, mode: Mode, lr: float, plan: Any = None) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "adamw" not in mode and "inbackward" not in mode:
        return torch.optim.AdamW(trained, lr=lr, fused=True)
    from liger_models import LigerAdamW, step_in_backward  # not imported by processes of transformers
    from liger_models.memory.search import host_blocks

    # Keep the moments of some blocks in host memory, if the mode says so.
    body = model.model if "medusa" in mode else model
    total = len(body.layers)
    moments = plan.host_moments if plan else host_blocks(total, mode.number("moments", total), body.offloaded)
    on_host = [weight for i in moments for weight in body.layers[i].parameters() if weight.requires_grad]
    optimizer = LigerAdamW(trained, lr=lr, offload=on_host, state_dtype=torch.int8 if "8bit" in mode else None)
    if plan.in_backward if plan else "inbackward" in mode:
        step_in_backward(optimizer)
    return optimizer


class Loss(nn.Module):
    """The loss of a text batch. All arguments are tensors, as CUDA graphs require."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (self.model(input_ids=input_ids, labels=labels).loss,)


def graphed(model: nn.Module) -> Callable[..., Any]:
    """The model's loss, computed by CUDA graphs of forward and backward. All batches must have the same shapes."""
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
