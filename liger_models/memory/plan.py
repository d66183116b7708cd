"""Plans for the fastest training step within a memory budget: what to recompute, and what to move to host memory."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.layers.decoder import Decoder, check_policy
from liger_models.layers.layer import CHECKPOINTING_POLICIES, set_policy
from liger_models.layers.offload import offloaded_blocks
from liger_models.memory.estimate import TrainingMemory, training_memory
from liger_models.memory.search import COUNTS, Candidate, Search, host_blocks
from liger_models.memory.step_times import count_times, measure_times

SHARE, SHARE_WITH_IMAGES = 0.92, 0.8
"""Fractions of the budget that the estimated peak may take, for models without and with a vision tower. The rest is
left for the CUDA context, for fragmentation, for temporary tensors in ops (which make measured peaks exceed the
estimate by up to 2 %), and for the activations of images, which the estimate does not include."""
UNITS = {"": 10**9, "GB": 10**9, "GIB": 2**30}
BYTES = 10**6
"""A size without a unit is in bytes if it is at least this number, and in GB if it is smaller."""


@dataclass(frozen=True)
class MemoryPlan:
    """A plan that makes a training step fit into a memory budget. `plan_memory` returns it.

    Attributes:
        policies: the checkpointing policy of each block.
        offload_layers: number of blocks whose activations are offloaded; see `Decoder.set_checkpointing`.
        host_moments: indices of the blocks whose moments are kept in host memory.
        in_backward: whether the optimizer steps during the backward.
        parts: maps the name of each part of the estimated peak to the part's bytes.
        budget: number of bytes of device memory that the step may take.
        time: expected time of a step, divided by the time that the fastest step would take if memory were unlimited.
    """

    policies: tuple[str, ...]
    offload_layers: int
    host_moments: tuple[int, ...]
    in_backward: bool
    parts: dict[str, int] = field(hash=False)
    budget: int
    time: float

    @property
    def peak(self) -> int:
        """Estimated peak memory in bytes."""
        return sum(self.parts.values())

    def apply(self, model: Decoder) -> None:
        """Set the checkpointing policies and the offloading of a model, which may be sharded.

        The model must have as many blocks as the planned model. A vision tower gets the policy of the first block.
        """
        is_uniform = len({*self.policies}) == 1
        policies = self.policies[0] if is_uniform else [*self.policies]
        model.set_checkpointing(policies, offload_layers=self.offload_layers)
        if model.visual is not None:
            set_policy(model.visual, self.policies[0])

    def moments(self, model: Decoder) -> list[nn.Parameter]:
        """Return the parameters whose moments are kept in host memory. Pass them to `LigerAdamW` as ``offload``."""
        blocks = (model.layers[index] for index in self.host_moments)
        return [parameter for block in blocks for parameter in block.parameters() if parameter.requires_grad]

    def __str__(self) -> str:
        counts = Counter(self.policies)
        policies = ", ".join(f"{counts[policy]} {policy}" for policy in CHECKPOINTING_POLICIES if policy in counts)
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in self.parts.items() if size)
        lines = {
            "policies": f"of {len(self.policies)} blocks: {policies}",
            "host": f"activations of {self.offload_layers} blocks, moments of {len(self.host_moments)} blocks",
            "optimizer": "steps in the backward" if self.in_backward else "steps after the backward",
            "peak": f"{self.peak / 1e9:.1f} of {self.budget / 1e9:.1f} GB (estimate): {parts}",
            "time": f"{self.time:.2f} of the fastest step's (expected)",
        }
        return "\n".join(f"{name:<10}  {text}" for name, text in lines.items())


def plan_memory(
    model: Decoder,
    tokens: int,
    budget: int | str,
    *,
    memory: TrainingMemory | None = None,
    length: int | None = None,
    accumulate: int = 1,
    checkpointing: str | Sequence[str] | None = None,
    host_moments: bool = True,
    in_backward: bool = True,
    moments_8bit: bool = False,
    calibrate: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """Plan the fastest training step whose estimated peak memory fits, with a margin, into a budget.

    The plan chooses a checkpointing policy for each block, the number of blocks that offload their activations, the
    number of blocks whose moments are kept in host memory, and whether the optimizer steps during the backward. None of
    these choices changes the gradients. If gradients are clipped, however, the optimizer must step after the backward.
    Blocks that save the same bytes are interchangeable, so the search only chooses how many blocks get each policy. The
    search skips a combination only if another combination is better, so it finds the best plan.

    The expected time includes the time of recomputed operations (see `Layer.recomputed_share`), and the time in which
    the optimizer reads and writes weights and moments. Copies to and from the host are included if they take longer
    than the computation that they overlap with. By default, the speeds of an H200 are assumed.

    The estimated peak does not include the activations of vision towers. To make room for these activations, the plan
    leaves a larger margin. The plan also ignores reference models, teachers, the time of collectives, and the inputs of
    the MLPs, which compiled blocks save under the policy "full".

    Args:
        model: the model, on any device. The model is not changed. ``memory`` is required if the model is sharded, has
            4-bit weights, or computes in a dtype that differs from the dtype of its weights.
        tokens: B · T, the number of tokens in a batch on the device.
        budget: number of bytes of device memory, or a text that `parse_memory` accepts.
        memory: the estimate for the step, by default `training_memory` in the dtype of the model. The function
            `liger_models.train.estimate` computes an estimate for this rank.
        length: T, the number of tokens in a row or document, by default ``tokens``. Only the time of attention depends
            on it.
        accumulate: number of batches in an optimizer step.
        checkpointing: the policies that the plan must use: one policy for all blocks, or a list with a policy for each
            block. By default, the plan chooses the policies.
        host_moments: whether moments may be kept in host memory (``LigerAdamW(offload=plan.moments(model))``).
        in_backward: whether the optimizer may step during the backward (`step_in_backward`). This needs
            ``accumulate=1``.
        moments_8bit: whether the moments have 8 bits. This argument is ignored if ``memory`` is given.
        calibrate: keyword arguments of the forward for one batch, on the device of the model. The times are then
            measured on single blocks, under the caller's autocast, instead of computed from counted operations.
            Gradients, random state and policies do not change. A policy whose measurement would exceed the budget is
            not measured.

    Raises:
        ValueError: no plan fits, an argument is out of range, or ``calibrate`` is given with a sharded model.
    """
    if isinstance(budget, str):
        budget = parse_memory("plan_memory: budget", budget, model.device)
    if budget <= 0:
        raise ValueError(f"plan_memory: budget must be positive, got {budget}.")
    if accumulate < 1:
        raise ValueError(f"plan_memory: accumulate must be at least 1, got {accumulate}.")
    if memory is None:
        memory = training_memory(model, tokens, model.dtype, moments_8bit=moments_8bit)
    share = usable_share(model)
    room = int(share * budget)

    # List the policies that each block may have.
    blocks = len(model.layers)
    allowed: list[Sequence[str]] = [CHECKPOINTING_POLICIES] * blocks
    if checkpointing is not None:
        policies = [checkpointing] * blocks if isinstance(checkpointing, str) else list(checkpointing)
        if len(policies) != blocks:
            raise ValueError(f"plan_memory: checkpointing must be one, or one for each of the {blocks} blocks.")
        for policy in policies:
            check_policy("checkpointing", policy)
        allowed = [(policy,) for policy in policies]

    # Count or measure the times, and search.
    times = count_times(model, memory, tokens, length or tokens, accumulate)
    if calibrate is not None:
        times = measure_times(model, memory, tokens, room, calibrate, times)
    orders = [False, True] if in_backward and accumulate == 1 else [False]
    search = Search(memory, times, allowed, accumulate, room=room, host_moments=host_moments, orders=orders)
    if search.fastest is not None:
        return _plan(search, search.fastest, budget)

    assert search.smallest is not None  # there is always a candidate, even if none fits
    smallest = _plan(search, search.smallest, budget)
    parts = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in smallest.parts.items() if size)
    needed = 1.001 * smallest.peak / share  # the margin exceeds the error of rounding to the digits below
    raise ValueError(
        f"plan_memory: budget must be at least {needed / 1e9:.4g} GB for {tokens:,} tokens, got {budget / 1e9:.4g} "
        f"GB. The smallest peak is {smallest.peak / 1e9:.3g} GB ({parts}), and {1 - share:.0%} of "
        "the budget are a margin. Use fewer tokens in a batch, LoRA, 4-bit weights, moments in 8 bits, or more "
        "GPUs."
    )


def _plan(search: Search, candidate: Candidate, budget: int) -> MemoryPlan:
    """Turn a candidate into a plan: choose the blocks, and compute the parts of the peak and the relative time."""
    # Choose the candidate's blocks, and compute the parts of its peak.
    memory, times, blocks = search.memory, search.times, range(search.blocks)
    policies = search.policies(candidate)
    offloaded = offloaded_blocks(search.blocks, candidate.offload_layers)
    host_moments = host_blocks(search.blocks, candidate.host_moments, offloaded)
    parts = memory.parts(
        policies, search.accumulate, offloaded=offloaded, host_moments=host_moments, in_backward=candidate.in_backward
    )

    # Compute the candidate's time, and the time of a step that recomputes as little as allowed and offloads nothing.
    _, moved, seconds = (candidate.stay + candidate.away)[:COUNTS]
    freed = sum(memory.moments[index] for index in host_moments)
    step = times.step(seconds, moved, freed, candidate.in_backward)
    least = sum(min(times.recomputed[policy][index] for policy in search.allowed[index]) for index in blocks)
    return MemoryPlan(
        policies=tuple(policies),
        offload_layers=candidate.offload_layers,
        host_moments=host_moments,
        in_backward=candidate.in_backward,
        parts=parts,
        budget=budget,
        time=float(step / times.step(least, 0, 0, False)),
    )


def usable_share(model: Decoder) -> float:
    """Return the fraction of the budget that a model's estimated peak memory may take."""
    return SHARE if model.visual is None else SHARE_WITH_IMAGES


def parse_memory(name: str, text: str, device: torch.device | None = None) -> int:
    """Parse a size of memory, and return the number of bytes.

    Examples are "24GB" (or just "24"), "22.5GiB", "24000000000", and "80%", which is a fraction of a device's memory.

    Args:
        name: name of the argument in error messages.
        text: the size.
        device: the device to whose memory a percentage refers.

    Raises:
        ValueError: the text is not a size, or it is a percentage and there is no GPU.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", text.strip(), re.IGNORECASE)
    size, unit = (float(match[1]), match[2].upper()) if match else (0.0, "")
    if unit == "%":
        if device is None or device.type not in ACCELERATORS:
            raise ValueError(f"{name} must be a size such as 24GB where there is no GPU, got {text!r}.")
        return int(size / 100 * torch.get_device_module(device).get_device_properties(device).total_memory)
    size *= 1 if not unit and size >= BYTES else UNITS.get(unit, 0)
    if not size > 0:
        raise ValueError(f"{name} must be a size such as 24GB or 22.5GiB, or a share such as 80%, got {text!r}.")
    return int(size)
