"""The fastest training step within a budget of memory: what is recomputed, and what lives in host memory."""

import functools
import itertools
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.layers.decoder import Decoder, check_policy
from liger_models.layers.layer import CHECKPOINTING_POLICIES, Layer, is_replayable, set_policy
from liger_models.layers.offload import COMING, offloaded_blocks
from liger_models.layers.recompute import is_compiled, run_again
from liger_models.layers.stored import own_parameters
from liger_models.memory.estimate import TrainingMemory, training_memory

SHARE, SHARE_WITH_IMAGES = 0.92, 0.8
"""Share of the memory that the estimate may take. The rest is for the CUDA context and fragmentation, for temporary
memory inside ops, by which measured peaks exceed the estimate by up to 2 %, and for the activations of images, which
the estimate does not count."""
UNITS = {"": 10**9, "GB": 10**9, "GIB": 2**30}
BYTES = 10**6
"""A size without a unit is in bytes from here on, and in GB below."""
FLOPS, LINK, BANDWIDTH, LAUNCH = 620e12, 53e9, 4e12, 2e-5
"""Operations per second, bytes per second to or from host memory and in device memory, and seconds to launch an update:
those of an H200 in bf16, by benchmarks/results. Only their ratios matter."""
BOTH_WAYS = 4 / 3
"""By which copies take longer while others go the other way: 53 GB/s on the link become 40 in each direction."""
MEASURED_STEPS = 3


@dataclass(frozen=True)
class MemoryPlan:
    """How a training step fits into a budget; see `plan_memory`.

    Attributes:
        policies: the checkpointing policy of each block.
        offload_layers: number of blocks whose activations are offloaded; see `Decoder.set_checkpointing`.
        host_moments: indices of the blocks whose moments live in host memory.
        in_backward: whether the optimizer steps in the backward.
        parts: name -> bytes of what the estimated peak consists of.
        budget: bytes of the device that the step may take.
        time: expected time of a step relative to that of the fastest, without a budget.
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
        """Set the policies and the offload of a model with as many blocks, which may be sharded.

        A vision tower gets the policy of the first block, which saves least.
        """
        same = len({*self.policies}) == 1
        model.set_checkpointing(self.policies[0] if same else [*self.policies], offload_layers=self.offload_layers)
        if model.visual is not None:
            set_policy(model.visual, self.policies[0])

    def moments(self, model: Decoder) -> list[nn.Parameter]:
        """The parameters whose moments live in host memory: ``offload`` of `LigerAdamW`."""
        blocks = (model.layers[index] for index in self.host_moments)
        return [each for block in blocks for each in block.parameters() if each.requires_grad]

    def __str__(self) -> str:
        counts = Counter(self.policies)
        policies = ", ".join(f"{counts[each]} {each}" for each in CHECKPOINTING_POLICIES if each in counts)
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
    """Plan the fastest training step whose estimated peak leaves a margin within a budget.

    The plan chooses a checkpointing policy for each block, the number of blocks whose activations are offloaded and of
    blocks whose moments live in host memory, and whether the optimizer steps in the backward. None of these changes the
    gradients, but clipping needs a step after the backward. Blocks that save the same are alike, so that numbers of
    them are chosen instead of blocks; all combinations that no other beats are compared, and the result is the best.

    The expected time counts operations that are repeated, as layers answer (`Layer.recomputed_share`), bytes that the
    link to the host cannot copy beside the computation, and what the optimizer moves, at the speeds of an H200.

    Not known: activations of vision towers, for which a larger margin is left; reference models and teachers; what
    compiled blocks save in addition under "full", C elements a token; time of collectives.

    Args:
        model: the model, on any device. It is not changed. A sharded model, one that computes in another dtype than
            that of its weights, and one with weights in 4 bits need ``memory``.
        tokens: B · T, tokens of a batch on the device.
        budget: bytes of the device, or a text as for `parse_memory`.
        memory: the estimate of the step. Default: `training_memory` in the dtype of the model.
            `liger_models.train.estimate` makes one for this rank.
        length: T, tokens of a row or document; only the time of attention depends on it. Default: ``tokens``.
        accumulate: batches in an optimizer step.
        checkpointing: a policy, or one for each block, that is kept. Default: they are planned.
        host_moments: whether moments may live in host memory (``LigerAdamW(offload=plan.moments(model))``).
        in_backward: whether the optimizer may step in the backward (`step_in_backward`); needs ``accumulate`` of 1.
        moments_8bit: the moments have 8 bits. Not read if ``memory`` is given.
        calibrate: keyword arguments of the forward of one batch on the device of the model. Some steps of single blocks
            are then measured instead of counting operations. Autocast is that of the caller. Gradients, random numbers
            and policies are afterwards as before. What has no room within the budget is not measured.

    Raises:
        ValueError: nothing fits, an argument is out of range, or ``calibrate`` with a sharded model.
    """
    if isinstance(budget, str):
        budget = parse_memory("plan_memory: budget", budget, model.device)
    if not budget > 0:
        raise ValueError(f"plan_memory: budget must be positive, got {budget}.")
    if not accumulate >= 1:
        raise ValueError(f"plan_memory: accumulate must be at least 1, got {accumulate}.")
    if memory is None:
        memory = training_memory(model, tokens, model.dtype, moments_8bit=moments_8bit)
    blocks, room = len(model.layers), int(usable_share(model) * budget)
    allowed: list[Sequence[str]] = [CHECKPOINTING_POLICIES] * blocks
    if checkpointing is not None:
        given = [checkpointing] * blocks if isinstance(checkpointing, str) else list(checkpointing)
        if len(given) != blocks:
            raise ValueError(f"plan_memory: checkpointing must be one, or one for each of the {blocks} blocks.")
        for policy in given:
            check_policy("checkpointing", policy)
        allowed = [(policy,) for policy in given]
    times = _count(model, memory, tokens, length or tokens, accumulate)
    if calibrate is not None:
        times = _measure(model, memory, tokens, room, calibrate, times)
    search = _Search(memory, times, allowed, accumulate)
    orders = [False, True] if in_backward and accumulate == 1 else [False]
    best, least = search.run(room, host_moments, orders)
    smallest = search.plan(least, budget)
    parts = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in smallest.parts.items() if size)
    needed = 1.001 * smallest.peak / usable_share(model)  # more than what rounding its digits may take off
    if best is None:
        raise ValueError(
            f"plan_memory: budget must be at least {needed / 1e9:.4g} GB for {tokens:,} tokens, got {budget / 1e9:.4g} "
            f"GB. The smallest peak is {smallest.peak / 1e9:.3g} GB ({parts}), and {1 - usable_share(model):.0%} of "
            "the budget are a margin. Use fewer tokens in a batch, LoRA, 4-bit weights, moments in 8 bits, or more "
            "GPUs."
        )
    return search.plan(best, budget)


def usable_share(model: Decoder) -> float:
    """Share of a device's memory that the estimate of a model may take."""
    return SHARE if model.visual is None else SHARE_WITH_IMAGES


def parse_memory(name: str, text: str, device: torch.device | None = None) -> int:
    """Bytes of a size such as "24GB" (also "24"), "22.5GiB", "24000000000", or of a share of a device such as "80%".

    Args:
        name: of the argument, for errors.
        text: the size.
        device: of which it may be a share.

    Raises:
        ValueError: it is not such a size, or a share without a GPU.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", text.strip(), re.IGNORECASE)
    size, unit = (float(match[1]), match[2].upper()) if match else (0.0, "")
    if unit == "%":
        if device is None or device.type not in ACCELERATORS:
            raise ValueError(f"{name} must be a size such as 24GB where there is no GPU, got {text!r}.")
        assert device is not None
        return int(size / 100 * torch.get_device_module(device).get_device_properties(device).total_memory)
    size *= 1 if not unit and size >= BYTES else UNITS.get(unit, 0)
    if not size > 0:
        raise ValueError(f"{name} must be a size such as 24GB or 22.5GiB, or a share such as 80%, got {text!r}.")
    return int(size)


def host_blocks(blocks: int, count: int, offloaded: Collection[int]) -> tuple[int, ...]:
    """Which blocks have their moments in host memory: ``count``, evenly spread, if possible not offloaded ones."""
    stay = [index for index in range(blocks) if index not in offloaded]
    pool = stay if count <= len(stay) else range(blocks)
    return tuple(pool[index * len(pool) // count] for index in range(count))


class _Times(NamedTuple):
    """Seconds of a step.

    Attributes:
        forward, backward: of all blocks, without recomputation.
        rest: forward and backward of everything else.
        recomputed: policy -> what the backward of each block recomputes.
        update: the optimizer's step.
        launches: by which the step is longer in the backward.
        link: bytes per second to the host, or from it.
        accumulate: number of batches.
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
        """Seconds, elementwise.

        Offloaded activations leave in the forward and come in the backward, while it computes. Moments come and leave
        in the backward, or else in the optimizer's step.

        Args:
            recomputed: seconds of recomputation.
            moved: bytes of activations that are offloaded.
            moments: bytes of moments that live in host memory.
            in_backward: whether the optimizer steps in the backward.
        """
        given = recomputed, moved, moments
        recomputed, moved, moments = (torch.as_tensor(each, dtype=torch.float64) for each in given)
        backward = self.backward + recomputed
        coming = moved + BOTH_WAYS * moments if in_backward else moved
        batch = (moved / self.link).clamp(min=self.forward) + torch.maximum(coming / self.link, backward) + self.rest
        copies = 2 * moved / BANDWIDTH  # which take device memory's bandwidth from the computation
        update = (BOTH_WAYS * moments / self.link).clamp(min=self.update)
        if in_backward:
            update = self.update + self.launches + 0 * moments
        seconds: Tensor = self.accumulate * (batch + copies) + update + 2 * moments / BANDWIDTH
        return seconds


def _count(model: Decoder, memory: TrainingMemory, tokens: int, length: int, accumulate: int) -> _Times:
    """The times by counting operations and bytes."""
    forward = backward = 0.0
    recomputed: dict[str, list[float]] = {policy: [] for policy in CHECKPOINTING_POLICIES}
    for block in model.layers:
        own = {module: _operations(module, tokens, length) for module in block.modules()}
        forward += sum(once for once, _ in own.values())
        backward += sum(twice for _, twice in own.values())
        for policy, found in recomputed.items():
            default = float(policy == "full" and is_replayable(block))
            found.append(sum(share * own[each][0] for each, share in _shares(block, policy, default)) / FLOPS)
    head = 6.0 * model.lm_head.weight.numel() * tokens
    trained = sum(each.requires_grad for each in model.parameters())
    return _Times(
        forward / FLOPS,
        backward / FLOPS,
        head / FLOPS,
        {policy: tuple(found) for policy, found in recomputed.items()},
        (3 * memory.gradients + 2 * memory.optimizer) / BANDWIDTH,
        LAUNCH * trained,
        LINK,
        accumulate,
    )


def _operations(module: nn.Module, tokens: int, length: int) -> tuple[float, float]:
    """Floating-point operations of a module's own forward and backward, without its submodules'."""
    matrices = {each: size for each, size in own_parameters(module).items() if each.dim() > 1}
    active, other = 1.0, 0.0
    if isinstance(module, Layer):
        active, other, spec = module.active_share, float(module.token_flops), module.attention
        if spec is not None:
            window = length if spec.window is None else min(spec.window, length)
            other += spec.pair_flops * window * (1 - window / (2 * length))
    once = [2.0 * active * size * tokens for size in matrices.values()]
    twice = [work * (1 + each.requires_grad) for work, each in zip(once, matrices, strict=True)]
    return sum(once) + other * tokens, sum(twice) + 2 * other * tokens


def _shares(module: nn.Module, policy: str, share: float) -> Iterator[tuple[nn.Module, float]]:
    """Each module in a block, and the share of its operations that the backward repeats."""
    answer = module.recomputed_share(policy) if isinstance(module, Layer) else None
    share = share if answer is None else answer
    yield module, share
    for child in module.children():
        yield from _shares(child, policy, share)


class _Point(NamedTuple):
    """A candidate: the sums of the blocks that are not offloaded and of those that are, and the optimizer's part.

    Sums are rows of numbers: bytes that stay on the device, bytes that are offloaded, seconds of recomputation, and for
    each kind of block and each policy the number of blocks.
    """

    stay: Tensor
    away: Tensor
    offload_layers: int
    host_moments: int
    in_backward: bool


class _Search:
    """Compares all plans, by numbers of blocks.

    Args:
        memory: the estimate.
        times: the times.
        allowed: the policies that each block may have.
        accumulate: batches in a step.
    """

    def __init__(
        self, memory: TrainingMemory, times: _Times, allowed: Sequence[Sequence[str]], accumulate: int
    ) -> None:
        self.memory, self.times, self.allowed, self.accumulate = memory, times, allowed, accumulate
        self.blocks = len(allowed)
        described = [
            tuple((each, memory.blocks[each][index], times.recomputed[each][index]) for each in allowed[index])
            for index in range(self.blocks)
        ]
        kinds = [*dict.fromkeys(described)]
        self.kind_of = [kinds.index(each) for each in described]
        """Block -> number of its kind; blocks of a kind save the same and take the same time."""
        self.first = [self.kind_of.index(kind) for kind in range(len(kinds))]
        self._sums, self._freed = functools.cache(self._combined), functools.cache(self._freed_bytes)

    def run(self, room: int, host_moments: bool, orders: Sequence[bool]) -> tuple[_Point | None, _Point]:
        """The fastest candidate within ``room`` bytes, None if there is none, and the one with the smallest peak.

        Args:
            room: bytes that the estimated peak may take.
            host_moments: whether moments may live in host memory.
            orders: the allowed values of ``in_backward``.
        """
        memory, best, least, smallest = self.memory, None, None, float("inf")
        fastest = float("inf")
        fixed = memory.weights + memory.temporary + memory.optimizer
        extra = memory.gradients if self.accumulate > 1 else 0
        counts = range(self.blocks + 1) if host_moments and any(memory.moments) else range(1)
        for offload, ceiling, largest in self._cases():
            gone = offloaded_blocks(self.blocks, offload)
            if best is not None and float(self._bound(gone, ceiling)) >= fastest:
                continue
            kinds = [Counter(self.kind_of[i] for i in range(self.blocks) if (i in gone) == part) for part in (0, 1)]
            stay, away = (
                self._sums(part, tuple(sorted(kinds[part].items())), ceiling, largest) for part in (False, True)
            )
            if not len(stay) or not len(away):
                continue
            stay = stay.flip(0)  # from the one that keeps least
            kept, _, seconds = stay[:, :3].T.contiguous()
            within = self.times.step(seconds[-1] + away[:, 2], away[:, 1], 0, False) < fastest
            if best is not None:
                away = away[within]
            if not len(away):
                continue
            rest, moved, more = away[:, :3].T
            freed = self._freed(offload, counts)[:, None]
            base = fixed - freed + memory.staging * (freed > 0)
            fetched = moved.clamp(max=COMING + largest)
            for in_backward in orders:
                head = 0 if in_backward and not memory.tied else memory.head - memory.logits
                block = memory.logits + ceiling + fetched
                taken = base + rest + memory.held + (head + block).clamp(min=memory.head) + extra
                last = torch.zeros_like(taken)
                if self.accumulate == 1 and in_backward:
                    last = base + memory.largest + memory.tied
                elif self.accumulate == 1:
                    last = base + (memory.early_gradients + block).clamp(min=memory.gradients + memory.tied)
                needed = torch.maximum(taken + kept[0], last)
                place = int(needed.argmin())
                count, one = divmod(place, len(away))
                if float(needed.flatten()[place]) < smallest:
                    smallest = float(needed.flatten()[place])
                    least = _Point(stay[0], away[one], offload, count, in_backward)
                # Only where there is room, and where the least recomputation would beat the best so far.
                found = self.times.step(seconds[-1] + more, moved, freed, in_backward)
                places = ((needed <= room) & (found < fastest)).flatten().nonzero()[:, 0]
                if not len(places):
                    continue
                counted, one_of = places // len(away), places % len(away)
                at = torch.searchsorted(kept, room - taken.flatten()[places], right=True) - 1
                found = self.times.step(seconds[at] + more[one_of], moved[one_of], freed[counted, 0], in_backward)
                place = int(found.argmin())
                if float(found[place]) < fastest:
                    fastest = float(found[place])
                    best = _Point(
                        stay[int(at[place])], away[int(one_of[place])], offload, int(counted[place]), in_backward
                    )
        assert least is not None
        return best, least

    def _bound(self, gone: frozenset[int], ceiling: int) -> Tensor:
        """Seconds that no step takes less than, with these blocks offloaded."""
        seconds, moved = 0.0, 0
        for index, policies in enumerate(self.allowed):
            known = [each for each in policies if self.memory.excess(each, index) <= ceiling]
            seconds += min((self.times.recomputed[each][index] for each in known), default=0.0)
            moved += min((self.memory.blocks[each][index].movable for each in known), default=0) * (index in gone)
        return self.times.step(seconds, moved, 0, False)

    def _freed_bytes(self, offload: int, counts: range) -> Tensor:
        """Bytes of the moments that live in host memory, for numbers of blocks [N]."""
        gone = offloaded_blocks(self.blocks, offload)
        moments = self.memory.moments
        return torch.tensor([sum(moments[i] for i in host_blocks(self.blocks, count, gone)) for count in counts])

    def _cases(self) -> Iterator[tuple[int, int, int]]:
        """Numbers of offloaded blocks, with bounds: of what a block's backward recomputes, and of what is fetched."""
        memory = self.memory
        every = [(policy, index) for index in self.first for policy in self.allowed[index]]
        ceilings = sorted({memory.excess(*each) for each in every})
        largest = sorted({memory.blocks[policy][index].largest for policy, index in every})
        for offload, ceiling in itertools.product(range(self.blocks + 1), ceilings):
            for top in largest if offload else largest[:1]:
                yield offload, ceiling, top

    def _combined(self, away: bool, counts: tuple[tuple[int, int], ...], ceiling: int, largest: int) -> Tensor:
        """The sums [N, 3 + kinds · 3] of some blocks, by kind and number, that no other beats; from the fastest."""
        names = len(CHECKPOINTING_POLICIES)
        sums = torch.zeros(1, 3 + len(self.first) * names, dtype=torch.float64)
        for kind, count in counts:
            index, options = self.first[kind], []
            for policy in self.allowed[index]:
                saved = self.memory.blocks[policy][index]
                if self.memory.excess(policy, index) <= ceiling and (not away or saved.largest <= largest):
                    row = torch.zeros_like(sums[0])
                    moved = saved.movable if away else 0
                    row[0], row[1] = saved.total - moved, moved
                    row[2] = self.times.recomputed[policy][index]
                    row[3 + kind * names + CHECKPOINTING_POLICIES.index(policy)] = 1
                    options.append(row)
            if not options:
                return sums[:0]
            # All numbers of blocks with each option that add up to the count.
            numbers = torch.cartesian_prod(*[torch.arange(count + 1)] * len(options)).view(-1, len(options))
            ways = _pareto(numbers[numbers.sum(1) == count].double() @ torch.stack(options))
            sums = _pareto((sums[:, None] + ways).flatten(0, 1))
        return sums

    def plan(self, point: _Point, budget: int) -> MemoryPlan:
        """The plan of a candidate.

        The first of the blocks that stay save least, because the backward frees them last. Of the offloaded blocks
        those that save much are evenly spread, because few copies are under way at a time.
        """
        gone = offloaded_blocks(self.blocks, point.offload_layers)
        policies = [""] * self.blocks
        for part, row in ((False, point.stay), (True, point.away)):
            numbers = row[3:].view(-1, len(CHECKPOINTING_POLICIES)).int().tolist()
            for kind, counts in enumerate(numbers):
                saved = {each: self.memory.blocks[each][self.first[kind]].total for each in CHECKPOINTING_POLICIES}
                ordered = sorted(zip(CHECKPOINTING_POLICIES, counts, strict=True), key=lambda each: saved[each[0]])
                named = [(policy, (n + 0.5) / count) for policy, count in ordered for n in range(count)]
                if part:
                    named.sort(key=lambda each: each[1])
                places = (i for i in range(self.blocks) if self.kind_of[i] == kind and (i in gone) == part)
                for index, (policy, _) in zip(places, named, strict=True):
                    policies[index] = policy
        moments = host_blocks(self.blocks, point.host_moments, gone)
        options: dict[str, Any] = {"offloaded": gone, "host_moments": moments, "in_backward": point.in_backward}
        parts = self.memory.parts(policies, self.accumulate, **options)
        freed = sum(self.memory.moments[index] for index in moments)
        seconds = self.times.step(point.stay[2] + point.away[2], point.away[1], freed, point.in_backward)
        least = [min(self.times.recomputed[each][i] for each in self.allowed[i]) for i in range(self.blocks)]
        fastest = self.times.step(sum(least), 0, 0, False)
        slower = float(seconds / fastest)
        return MemoryPlan(tuple(policies), point.offload_layers, moments, point.in_backward, parts, budget, slower)


def _pareto(sums: Tensor) -> Tensor:
    """The sums from the fastest on, without those that a faster one beats in bytes."""
    for column in (0, 1, 2):
        sums = sums[sums[:, column].sort(stable=True).indices]
    kept, moved = sums[:, 0], sums[:, 1]
    least = (moved if bool((moved > 0).any()) else kept).cummin(0).indices[:-1]
    beaten = (moved[1:] >= moved[least]) & (kept[1:] >= kept[least])
    return torch.cat([sums[:1], sums[1:][~beaten]])


def _measure(
    model: Decoder, memory: TrainingMemory, tokens: int, room: int, batch: Mapping[str, Any], times: _Times
) -> _Times:
    """The times, from running one block of each kind, by each policy, on a batch."""
    if model.groups.sharded is not None or any(hasattr(each, "full_tensor") for each in model.parameters()):
        raise ValueError("plan_memory: calibrate needs a model that is not sharded, got one that is. Leave it out.")
    device = model.device
    accelerated = device.type in ACCELERATORS
    known = ("input_ids", "position_ids", "attention_mask", "cu_seqlens", "inputs_embeds")
    given = {name: batch[name] for name in known if batch.get(name) is not None}
    current = model.checkpointing
    policies = [current] * len(model.layers) if isinstance(current, str) else current
    measured: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {}
    kinds = [tuple(memory.blocks[each][i] for each in CHECKPOINTING_POLICIES) for i in range(len(model.layers))]
    with torch.random.fork_rng([device] if accelerated else [], device_type=device.type if accelerated else "cuda"):
        with torch.no_grad():
            embeds, layout = model.prepare(**given)
            layout = model.stand_ins(layout, embeds)
        scale = tokens / embeds[..., 0].numel()
        before = torch.accelerator.memory_allocated() if accelerated else memory.weights
        for index, block in enumerate(model.layers):
            if kinds[index] in measured:
                continue
            found = measured[kinds[index]] = {}
            gradients = sum(each.nbytes for each in block.parameters() if each.requires_grad)
            for policy in CHECKPOINTING_POLICIES:
                inside = memory.blocks["none"][index].total / scale + memory.logits
                if before + gradients + inside + 4 * embeds.nbytes <= room:
                    set_policy(block, policy)
                    try:
                        found[policy] = _run(block, policy, embeds, layout, device)
                    finally:
                        set_policy(block, policies[index])
        link = _copy_speed(device) if accelerated else times.link
    plain = [measured[kind].get("none") for kind in kinds]
    if any(each is None for each in plain):
        return times
    forward, both = (scale * sum(each[part] for each in plain if each) for part in (0, 1))
    ratio = both / (times.forward + times.backward)  # of measured to counted seconds
    recomputed = {
        policy: tuple(
            max(measured[kind][policy][1] - measured[kind]["none"][1], 0.0) * scale
            if policy in measured[kind]
            else ratio * counted[index]
            for index, kind in enumerate(kinds)
        )
        for policy, counted in times.recomputed.items()
    }
    return times._replace(
        forward=forward, backward=both - forward, rest=ratio * times.rest, recomputed=recomputed, link=link
    )


def _run(block: nn.Module, policy: str, embeds: Tensor, layout: Any, device: torch.device) -> tuple[float, float]:
    """Seconds of a block's forward, and of forward and backward: medians after a first run."""
    again = policy == "full" and is_replayable(block) and not is_compiled(block)
    run: Callable[..., Any] = functools.partial(run_again, block) if again else block
    trained = [each for each in block.parameters() if each.requires_grad]
    found = []
    for _ in range(MEASURED_STEPS + 1):
        inputs = [embeds.detach().clone().requires_grad_() for _ in range(2)]
        begun = _now(device)
        with torch.enable_grad():
            outputs = [each for each in run(*inputs, layout) if each is not None and each.requires_grad]
        middle = _now(device)
        ones = [torch.ones_like(each) for each in outputs]
        torch.autograd.grad(outputs, [*inputs, *trained], ones, allow_unused=True)
        found.append((middle - begun, _now(device) - begun))
        del outputs
    forward, both = (statistics.median(each) for each in zip(*found[1:], strict=True))
    return forward, both


def _now(device: torch.device) -> float:
    if device.type in ACCELERATORS:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _copy_speed(device: torch.device) -> float:
    """Bytes per second from a device to host memory."""
    here = torch.empty(2**26, dtype=torch.uint8, device=device)
    host = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
    found = []
    for _ in range(MEASURED_STEPS + 1):
        begun = _now(device)
        for _ in range(4):
            host.copy_(here, non_blocking=True)
        found.append(_now(device) - begun)
    return 4 * host.nbytes / statistics.median(found[1:])
