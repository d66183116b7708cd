"""The time of a training step, computed from counted operations and bytes or from measurements of single blocks."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.common.device import as_tensor
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import own_parameters
from liger_models.layers.layer import CHECKPOINTING_POLICIES, Layer, is_replayable, set_policy
from liger_models.layers.recompute import can_run_again, run_again
from liger_models.memory.estimate import TrainingMemory

FLOPS, LINK, BANDWIDTH, LAUNCH = 620e12, 53e9, 4e12, 2e-5
"""Floating-point operations per second, bytes per second between device and host, bytes per second of device memory,
and seconds to launch the update of a parameter. They were measured on an H200 in bf16 (benchmarks/results). A plan
depends only on the ratios of these numbers."""
BOTH_WAYS = 4 / 3
"""Factor by which copies take longer if they run in both directions at once: 40 instead of 53 GB/s per direction."""
MEASURED_STEPS = 3


class StepTimes(NamedTuple):
    """The times of the parts of a training step.

    Attributes:
        forward, backward: seconds that all blocks take in the forward and the backward of a batch, without
            recomputation.
        rest: seconds that the rest of the model takes in the forward and the backward of a batch.
        recomputed: for each policy, the seconds that the backward of each block needs for recomputation.
        update: seconds that the optimizer's step takes.
        launches: additional seconds that the optimizer's step takes if it runs during the backward.
        link: bytes per second of copies in one direction between device and host.
        accumulate: number of batches in an optimizer step.
    """

    forward: float
    backward: float
    rest: float
    recomputed: dict[str, tuple[float, ...]]
    update: float
    launches: float
    link: float
    accumulate: int

    def step(self, recomputed: Any, moved: Any, moments: Any, in_backward: bool) -> Tensor:
        """Compute the seconds of a step. If the first three arguments are tensors, the result is a tensor too.

        Offloaded activations are copied to the host during the forward, and to the device during the backward. Moments
        are copied in both directions while the optimizer steps, which is after or during the backward.

        Args:
            recomputed: seconds of recomputation per batch.
            moved: bytes of activations that are offloaded per batch.
            moments: bytes of moments that are kept in host memory.
            in_backward: whether the optimizer steps during the backward.
        """
        recomputed, moved, moments = (as_tensor(values, torch.float64) for values in (recomputed, moved, moments))

        # Compute the time of a batch. Computation and copies overlap, so the longer of the two counts.
        backward = self.backward + recomputed
        incoming = moved + BOTH_WAYS * moments if in_backward else moved
        batch = (moved / self.link).clamp(min=self.forward) + torch.maximum(incoming / self.link, backward) + self.rest
        copies = 2 * moved / BANDWIDTH  # copies use memory bandwidth that the computation then lacks

        # Compute the time of the optimizer's step.
        update = (BOTH_WAYS * moments / self.link).clamp(min=self.update)
        if in_backward:
            update = self.update + self.launches + 0 * moments  # 0 · moments gives the result its shape
        seconds: Tensor = self.accumulate * (batch + copies) + update + 2 * moments / BANDWIDTH
        return seconds


def count_times(model: Decoder, memory: TrainingMemory, tokens: int, length: int, accumulate: int) -> StepTimes:
    """Compute the times from the numbers of operations and bytes, with the speeds of an H200.

    Args:
        model: the model.
        memory: the estimate of the memory of a step.
        tokens: number of tokens in a batch.
        length: number of tokens in a row or document.
        accumulate: number of batches in an optimizer step.
    """
    forward = backward = 0.0
    recomputed: dict[str, list[float]] = {policy: [] for policy in CHECKPOINTING_POLICIES}

    # For the blocks, count the operations and, for each policy, the operations that the backward repeats.
    for block in model.layers:
        operations = {module: _operations(module, tokens, length) for module in block.modules()}
        forward += sum(once for once, _ in operations.values())
        backward += sum(twice for _, twice in operations.values())
        for policy, seconds in recomputed.items():
            default = float(policy == "full" and is_replayable(block))
            repeated = (share * operations[module][0] for module, share in _shares(block, policy, default))
            seconds.append(sum(repeated) / FLOPS)

    # Count everything else. A head has 2 operations per weight and token in the forward, and 4 in the backward.
    head = 6.0 * model.lm_head.weight.numel() * tokens
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    return StepTimes(
        forward=forward / FLOPS,
        backward=backward / FLOPS,
        rest=head / FLOPS,
        recomputed={policy: tuple(seconds) for policy, seconds in recomputed.items()},
        update=(3 * memory.gradients + 2 * memory.optimizer) / BANDWIDTH,
        launches=LAUNCH * trained,
        link=LINK,
        accumulate=accumulate,
    )


def _operations(module: nn.Module, tokens: int, length: int) -> tuple[float, float]:
    """Count the floating-point operations in the forward and the backward of a module, without its submodules."""
    matrices = {weight: size for weight, size in own_parameters(module).items() if weight.dim() > 1}
    active, per_token = 1.0, 0.0
    if isinstance(module, Layer):
        active, per_token, spec = module.active_share, float(module.token_flops), module.attention
        if spec is not None:  # times the mean number of keys that a token attends to
            pairs = spec.pairs(torch.tensor(float(length), dtype=torch.float64, device="cpu"))
            per_token += spec.pair_flops * pairs.item() / length

    # There is one product in the forward, and one or two in the backward: a frozen weight needs no gradient.
    once = [2.0 * active * size * tokens for size in matrices.values()]
    twice = [work * (1 + weight.requires_grad) for work, weight in zip(once, matrices, strict=True)]
    return sum(once) + per_token * tokens, sum(twice) + 2 * per_token * tokens


def _shares(module: nn.Module, policy: str, share: float) -> Iterator[tuple[nn.Module, float]]:
    """For each module in a block, yield the module and the fraction of its operations that the backward repeats.

    If a module does not define its own fraction (`Layer.recomputed_share`), the fraction of its parent module applies.
    ``share`` is the fraction that applies to the parent of ``module``.
    """
    answer = module.recomputed_share(policy) if isinstance(module, Layer) else None
    share = share if answer is None else answer
    yield module, share
    for child in module.children():
        yield from _shares(child, policy, share)


def measure_times(
    model: Decoder, memory: TrainingMemory, tokens: int, room: int, batch: Mapping[str, Any], times: StepTimes
) -> StepTimes:
    """Measure the times of one block of each type under each policy.

    If a type of block cannot be measured because it does not fit into ``room``, ``times`` is returned unchanged.

    Args:
        model: the model, which must not be sharded.
        memory: the estimate of the memory of a step.
        tokens: number of tokens in a batch of the planned step.
        room: number of bytes of memory that a measurement may take.
        batch: keyword arguments of the forward for one batch, which may have fewer tokens than a batch of the step.
        times: the times from `count_times`.

    Raises:
        ValueError: the model is sharded.
    """
    if model.groups.sharded is not None or any(hasattr(weight, "full_tensor") for weight in model.parameters()):
        raise ValueError("plan_memory: calibrate needs a model that is not sharded, got one that is. Leave it out.")
    # Blocks that save the same bytes are of one type, and one block of each type runs.
    blocks = range(len(model.layers))
    types = [tuple(memory.blocks[policy][index] for policy in CHECKPOINTING_POLICIES) for index in blocks]
    measured, scale = _measure_blocks(model, memory, tokens, room, batch, types)

    # Recomputation is measured as the difference from a run without recomputation, so every type needs such a run.
    plain = [measured[block_type]["none"] for block_type in types if "none" in measured[block_type]]
    if len(plain) < len(types):
        return times
    forward, both = (scale * sum(seconds[part] for seconds in plain) for part in (0, 1))
    ratio = both / (times.forward + times.backward)  # measured seconds per computed second
    recomputed = {policy: tuple(ratio * seconds for seconds in counted) for policy, counted in times.recomputed.items()}
    for policy, estimates in recomputed.items():
        recomputed[policy] = tuple(
            max(measured[block_type][policy][1] - without[1], 0.0) * scale
            if policy in measured[block_type]
            else seconds
            for block_type, without, seconds in zip(types, plain, estimates, strict=True)
        )
    link = _copy_speed(model.device) if model.device.type in ACCELERATORS else times.link
    return times._replace(
        forward=forward, backward=both - forward, rest=ratio * times.rest, recomputed=recomputed, link=link
    )


def _measure_blocks(
    model: Decoder, memory: TrainingMemory, tokens: int, room: int, batch: Mapping[str, Any], types: Sequence[Any]
) -> tuple[dict[Any, dict[str, tuple[float, float]]], float]:
    """Measure one block of each type under each policy, if there is enough memory.

    Returns:
        First, for each type and policy, the seconds of the forward, and the seconds of forward and backward together.
        Second, the number of tokens in a batch of the planned step, divided by the number of tokens in ``batch``.
    """
    device = model.device
    accelerated = device.type in ACCELERATORS
    names = ("input_ids", "position_ids", "attention_mask", "cu_seqlens", "inputs_embeds")
    inputs = {name: batch[name] for name in names if batch.get(name) is not None}
    current = model.checkpointing
    policies = [current] * len(model.layers) if isinstance(current, str) else current

    measured: dict[Any, dict[str, tuple[float, float]]] = {}
    with torch.random.fork_rng([device] if accelerated else [], device_type=device.type if accelerated else "cuda"):
        with torch.no_grad():
            embeds, layout = model.prepare(**inputs)
            layout = model.stand_ins(layout, embeds)
        scale = tokens / embeds[..., 0].numel()
        before = torch.accelerator.memory_allocated() if accelerated else memory.weights
        for index, block in enumerate(model.layers):
            if types[index] in measured:
                continue
            seconds = measured[types[index]] = {}

            # A policy is measured if the gradients, all activations and the inputs of the block fit into `room`.
            gradients = sum(weight.nbytes for weight in block.parameters() if weight.requires_grad)
            activations = memory.blocks["none"][index].total / scale + memory.logits
            if before + gradients + activations + 4 * embeds.nbytes > room:
                continue
            for policy in CHECKPOINTING_POLICIES:
                set_policy(block, policy)
                try:
                    seconds[policy] = _run(block, policy, embeds, layout, device)
                finally:
                    set_policy(block, policies[index])
    return measured, scale


def _run(block: nn.Module, policy: str, embeds: Tensor, layout: Any, device: torch.device) -> tuple[float, float]:
    """Measure the seconds of a block's forward, and the seconds of its forward and backward together. Each result is
    the median of several runs. The first run is not counted."""
    recomputes = policy == "full" and is_replayable(block) and can_run_again(block)
    forward: Callable[..., Any] = functools.partial(run_again, block) if recomputes else block
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    seconds = []
    for _ in range(MEASURED_STEPS + 1):
        inputs = [embeds.detach().clone().requires_grad_() for _ in range(2)]
        start = _now(device)
        with torch.enable_grad():
            outputs = [output for output in forward(*inputs, layout) if output is not None and output.requires_grad]
        middle = _now(device)
        ones = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, [*inputs, *trained], ones, allow_unused=True)
        seconds.append((middle - start, _now(device) - start))
        del outputs
    forward_seconds, both = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
    return forward_seconds, both


def _now(device: torch.device) -> float:
    if device.type in ACCELERATORS:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _copy_speed(device: torch.device) -> float:
    """Measure the bytes per second of copies from a device to host memory."""
    source = torch.empty(2**26, dtype=torch.uint8, device=device)
    host = torch.empty(2**26, dtype=torch.uint8, pin_memory=True, device="cpu")
    seconds = []
    for _ in range(MEASURED_STEPS + 1):
        start = _now(device)
        for _ in range(4):
            host.copy_(source, non_blocking=True)
        seconds.append(_now(device) - start)
    return 4 * host.nbytes / statistics.median(seconds[1:])
