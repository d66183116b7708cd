"""Checks that training has changed every tensor of the adapters."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from liger_models.adapters.lora_layers import adapted_layers
from liger_models.adapters.peft_files import peft_tensors
from liger_models.base.causal_lm import CausalLM
from liger_models.layers.linear import local


class Finding(NamedTuple):
    """A problem with an adapter.

    Attributes:
        name: name of the tensor (in PEFT's files) or of the setting that has the problem.
        problem: what is wrong, and what to do.
    """

    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


def adapter_parameters(model: CausalLM) -> dict[str, nn.Parameter]:
    """Map each adapter parameter's name in PEFT's files to the parameter."""
    return {
        name: tensor.parameter
        for layer in adapted_layers(model).values()
        for name, tensor in peft_tensors(layer).items()
    }


@torch.no_grad()
def adapter_sums(model: CausalLM) -> dict[str, Tensor]:
    """Map the name of each adapter tensor to the sum and the sum of squares of its elements, [2] fp64.

    The sums cover only this rank's part of the tensor. `check_trained` compares the sums from before and after
    training.
    """
    return {name: _sums(local(parameter)) for name, parameter in adapter_parameters(model).items()}


def _sums(tensor: Tensor) -> Tensor:
    wide = tensor.detach().flatten().double()
    return torch.stack([wide.sum(), wide.square().sum()])


def check_trained(model: CausalLM, before: dict[str, Tensor], steps: int) -> list[Finding]:
    """Find the adapter tensors that are frozen, that are not finite, or that training has not changed.

    Args:
        model: the model after training.
        before: the result of `adapter_sums` before training.
        steps: number of training steps since ``before`` was computed. The matrix B of an adapter may stay at 0 in the
            first step of a warm-up, and the matrix A has no gradient while B is 0. Therefore, B is checked from 2
            steps on, and A is checked from 3 steps on.
    """
    return _judge(model, before, steps)[0]


def _judge(model: CausalLM, before: dict[str, Tensor], steps: int) -> tuple[list[Finding], int]:
    """Return the result of `check_trained`, and the number of tensors that have changed."""
    after = adapter_sums(model)
    findings = []
    for name, parameter in adapter_parameters(model).items():
        if not parameter.requires_grad:
            findings.append(Finding(name, "is frozen. Call requires_grad_(True) on it before you make the optimizer."))
        elif not after[name].isfinite().all():
            findings.append(Finding(name, "is not finite. Lower the learning rate."))
        elif steps >= (3 if ".lora_A" in name else 2) and local(parameter).numel() and after[name].equal(before[name]):
            findings.append(
                Finding(
                    name, "did not move, so no gradient reached it. Check that the data use its layer, and the loss."
                )
            )
    return findings, sum(not after[name].equal(sums) for name, sums in before.items())


def adapter_line(model: CausalLM, before: dict[str, Tensor], steps: int) -> str:
    """Return a log line that states the result of `check_trained`."""
    findings, moved = _judge(model, before, steps)
    if not findings:
        if moved < len(before):
            return f"adapter     {moved} of {len(before)} tensors moved, after too few steps to judge the others"
        return f"adapter     all {len(before)} tensors moved"
    return f"adapter     PROBLEM: {len(findings)} of {len(before)} tensors: {findings[0]}"
