"""The search behind `plan_memory`. It compares all ways to fit a training step into memory.

Blocks that save the same bytes and take the same time to recompute are of one type, and the search only chooses how
many blocks of each type get each policy. The peak depends on two sums over blocks (bytes of activations that are kept
on the device, and bytes of activations that are offloaded) and on two maxima: the most bytes that the backward
recomputes for a single block, and the bytes of the largest offloaded tensor. The search tries all pairs of upper bounds
for the two maxima. For each pair of bounds, the search compares the sums of all choices that stay within the bounds. A
choice is dropped if another choice takes fewer bytes and less time.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.layers.offload import COMING, offloaded_blocks
from liger_models.memory.estimate import TrainingMemory
from liger_models.memory.step_times import StepTimes

KEPT, MOVED, SECONDS, COUNTS = 0, 1, 2, 3
"""Columns of the sums over blocks: bytes that stay on the device, offloaded bytes, and seconds of recomputation. The
following columns count blocks: with three policies, column ``COUNTS + 3 · type + policy`` is the number of blocks that
have the type with index ``type`` and the policy with index ``policy``."""


class Candidate(NamedTuple):
    """One possible plan of a training step, described by sums over its blocks instead of a policy for each block.

    Attributes:
        stay: [columns], the sums over the blocks that are not offloaded. The columns are described at `KEPT`.
        away: [columns], the sums over the offloaded blocks.
        offload_layers: number of offloaded blocks.
        host_moments: number of blocks whose moments are kept in host memory.
        in_backward: whether the optimizer steps during the backward.
    """

    stay: Tensor
    away: Tensor
    offload_layers: int
    host_moments: int
    in_backward: bool


class Case(NamedTuple):
    """All candidates that have a given number of offloaded blocks and stay within two bounds.

    These candidates differ in three ways: the sums over their blocks, the number of blocks whose moments are kept in
    host memory, and whether the optimizer steps during the backward.

    Attributes:
        offload: number of offloaded blocks.
        ceiling: upper bound for the `TrainingMemory.excess` of every block.
        largest: upper bound for the bytes of an offloaded tensor.
    """

    offload: int
    ceiling: int
    largest: int


class Search:
    """Finds the fastest candidate that fits into memory, and the candidate with the smallest peak memory.

    Args:
        memory: the estimate of a step's memory.
        times: the times of a step.
        allowed: for each block, the policies that it may have.
        accumulate: number of batches in an optimizer step.
        room: number of bytes that the estimated peak may take.
        host_moments: whether moments may be kept in host memory.
        orders: the allowed values of ``in_backward``.

    Attributes:
        fastest: the fastest candidate that fits into ``room``; None if none fits.
        smallest: the candidate with the smallest peak, even if its peak does not fit.
    """

    def __init__(
        self,
        memory: TrainingMemory,
        times: StepTimes,
        allowed: Sequence[Sequence[str]],
        accumulate: int,
        *,
        room: int,
        host_moments: bool,
        orders: Sequence[bool],
    ) -> None:
        self.memory, self.times, self.allowed, self.accumulate = memory, times, allowed, accumulate
        self.room, self.orders, self.blocks = room, orders, len(allowed)
        self._host_counts = range(self.blocks + 1) if host_moments and any(memory.moments) else range(1)

        # Find the types of blocks. Blocks of one type save and recompute the same under each policy.
        described = [
            tuple((policy, memory.blocks[policy][index], times.recomputed[policy][index]) for policy in policies)
            for index, policies in enumerate(allowed)
        ]
        types = [*dict.fromkeys(described)]
        self.type_of = [types.index(description) for description in described]
        """For each block, the index of its type."""
        self.first = [self.type_of.index(block_type) for block_type in range(len(types))]
        """For each type, the index of its first block, which represents all blocks of the type."""

        # The results of both functions are cached, because cases that differ in only one bound share sums or bytes
        # of moments.
        self._sums, self._freed = functools.cache(self._best_sums), functools.cache(self._freed_bytes)

        # The best candidates so far.
        self.fastest: Candidate | None = None
        self.smallest: Candidate | None = None
        self._seconds, self._peak = math.inf, math.inf
        for case in self._cases():
            self._compare(case)

    def _cases(self) -> Iterator[Case]:
        """Yield a `Case` for each number of offloaded blocks and each pair of bounds."""
        choices = [(policy, index) for index in self.first for policy in self.allowed[index]]
        ceilings = sorted({self.memory.excess(policy, index) for policy, index in choices})
        largest = sorted({self.memory.blocks[policy][index].largest for policy, index in choices})
        for offload, ceiling in itertools.product(range(self.blocks + 1), ceilings):
            for bound in largest if offload else largest[:1]:  # without offloading, the second bound has no meaning
                yield Case(offload, ceiling, bound)

    def _compare(self, case: Case) -> None:
        """Compare the candidates of a case, and update ``fastest`` and ``smallest``."""
        # Skip a case that cannot beat the fastest candidate.
        offloaded = offloaded_blocks(self.blocks, case.offload)
        if self.fastest is not None and self._least_seconds(offloaded, case.ceiling) >= self._seconds:
            return

        # Compute the sums of the choices that were not dropped, [S, columns] and [A, columns]. After the flip, the
        # first row of `stay` has the fewest bytes and the most seconds, and the last row has the most bytes and the
        # fewest seconds.
        stay = self._sums(self._count_types(offloaded, False), case.ceiling, None)
        away = self._sums(self._count_types(offloaded, True), case.ceiling, case.largest)
        if not len(stay) or not len(away):
            return
        stay = stay.flip(0)

        # Drop rows of `away` that are not faster than the fastest candidate, even if combined with the fastest row of
        # `stay`.
        if self.fastest is not None:
            seconds = self.times.step(stay[-1, SECONDS] + away[:, SECONDS], away[:, MOVED], 0, False)
            away = away[seconds < self._seconds]
        if len(away):
            for in_backward in self.orders:
                self._compare_sums(case, stay, away, in_backward)

    def _compare_sums(self, case: Case, stay: Tensor, away: Tensor, in_backward: bool) -> None:
        """Compare the candidates of a case that have the given sums over blocks.

        The number of blocks whose moments are kept in host memory has H possible values, and ``away`` has A rows. For
        each of the H · A combinations, bisection finds the fastest row of ``stay`` for which the peak fits.

        Args:
            case: the case.
            stay: [S, columns], the sums over the blocks that stay on the device, sorted by rising bytes and falling
                seconds.
            away: [A, columns], the sums over the offloaded blocks.
            in_backward: whether the optimizer steps during the backward.
        """
        kept, _, stay_seconds = stay[:, :COUNTS].T.contiguous()  # contiguous for the bisection
        freed = self._freed(case.offload)[:, None]  # [H, 1]

        # Compute the table of peaks for the first row of `stay`, which has the fewest bytes, and find the smallest
        # peak.
        with_activations, without_activations = self._peaks(case, away, freed, in_backward)
        peaks = torch.maximum(with_activations + kept[0], without_activations)
        cell = int(peaks.argmin())
        if float(peaks.flatten()[cell]) < self._peak:
            self._peak = float(peaks.flatten()[cell])
            host_count, away_index = divmod(cell, len(away))
            self.smallest = Candidate(stay[0], away[away_index], case.offload, host_count, in_backward)

        # Find the cells [N] that fit and that would be faster than the fastest candidate if they recomputed the least.
        seconds = self.times.step(stay_seconds[-1] + away[:, SECONDS], away[:, MOVED], freed, in_backward)
        cells = ((peaks <= self.room) & (seconds < self._seconds)).flatten().nonzero()[:, 0]
        if not len(cells):
            return
        host_counts, away_indices = cells // len(away), cells % len(away)

        # For each cell, the fastest row of `stay` that fits is the row that keeps the most bytes and still fits.
        stay_indices = torch.searchsorted(kept, self.room - with_activations.flatten()[cells], right=True) - 1
        recomputed = stay_seconds[stay_indices] + away[away_indices, SECONDS]
        seconds = self.times.step(recomputed, away[away_indices, MOVED], freed[host_counts, 0], in_backward)  # [N]
        best = int(seconds.argmin())
        if float(seconds[best]) < self._seconds:
            self._seconds = float(seconds[best])
            best_stay, best_away = stay[stay_indices[best]], away[away_indices[best]]
            self.fastest = Candidate(best_stay, best_away, case.offload, int(host_counts[best]), in_backward)

    def _peaks(self, case: Case, away: Tensor, freed: Tensor, in_backward: bool) -> tuple[Tensor, Tensor]:
        """Compute two tables [H, A] of peak memory: one for the time while activations exist, and one for the time
        after the activations have been freed. A row belongs to one entry of ``freed`` [H], and a column to one row of
        ``away``.

        The peaks in the first table do not include the activations that stay on the device. The caller adds the bytes
        of these activations. The peaks in the second table occur at the end of the backward or when the optimizer
        steps. The larger of the two peaks must be the peak that `TrainingMemory.parts` computes for a single candidate.
        """
        memory = self.memory
        # Compute the memory that is always in use, [H, 1], and the memory that the backward of a block adds, [A].
        always = memory.weights + memory.temporary + memory.optimizer - freed + memory.staging * (freed > 0)
        fetched = away[:, MOVED].clamp(max=COMING + case.largest)
        block = memory.logits + case.ceiling + fetched

        # While activations exist, the peak is in the head or in the first backward of a block. In the first backward of
        # a block, the head's gradient still exists unless the optimizer has applied it. A tied head's gradient is not
        # complete before the embedding's gradient.
        head_gradient = 0 if in_backward and not memory.tied else memory.head - memory.logits
        accumulated = memory.gradients if self.accumulate > 1 else 0
        head_or_block = (head_gradient + block).clamp(min=memory.head)
        with_activations = always + away[:, KEPT] + memory.held + head_or_block + accumulated  # [H, A]

        # After activations are freed, the peak is in the last backward of a block, or when all gradients exist.
        if self.accumulate > 1:  # all gradients already exist together with the activations
            return with_activations, torch.zeros_like(with_activations)
        if in_backward:
            return with_activations, always + memory.largest + memory.tied
        return with_activations, always + (memory.early_gradients + block).clamp(min=memory.gradients + memory.tied)

    def _least_seconds(self, offloaded: Collection[int], ceiling: int) -> float:
        """Compute a lower bound for the seconds of a step that offloads these blocks and stays within ``ceiling``."""
        seconds, moved = 0.0, 0
        for index, policies in enumerate(self.allowed):
            within = [policy for policy in policies if self.memory.excess(policy, index) <= ceiling]
            seconds += min((self.times.recomputed[policy][index] for policy in within), default=0.0)
            if index in offloaded:
                moved += min((self.memory.blocks[policy][index].movable for policy in within), default=0)
        return float(self.times.step(seconds, moved, 0, False))

    def _freed_bytes(self, offload: int) -> Tensor:
        """For each of the H possible numbers of blocks whose moments are kept in host memory, compute the bytes of
        these moments, [H]."""
        offloaded, moments = offloaded_blocks(self.blocks, offload), self.memory.moments
        choices = (host_blocks(self.blocks, count, offloaded) for count in self._host_counts)
        return torch.tensor([sum(moments[index] for index in blocks) for blocks in choices], device="cpu")

    def _count_types(self, offloaded: Collection[int], is_away: bool) -> tuple[tuple[int, int], ...]:
        """Return the number of blocks of each type, as pairs (type, number). Count the offloaded blocks if ``is_away``
        is True, and otherwise the blocks that stay on the device."""
        counts = Counter(block_type for index, block_type in enumerate(self.type_of) if (index in offloaded) == is_away)
        return tuple(sorted(counts.items()))

    def _best_sums(self, counts: tuple[tuple[int, int], ...], ceiling: int, largest: int | None) -> Tensor:
        """For each choice of policies for some blocks, compute the sums over these blocks. The result is [N, columns],
        one row per choice, with the fastest choice first. `KEPT` describes the columns.

        A choice may be dropped if a faster choice needs no more bytes.

        Args:
            counts: pairs of a type and a number of blocks of this type.
            ceiling: the bound in `Case`, which applies to every block.
            largest: the bound in `Case` for offloaded blocks; None if the blocks are not offloaded.
        """
        policies = len(CHECKPOINTING_POLICIES)
        sums = torch.zeros(1, COUNTS + len(self.first) * policies, dtype=torch.float64, device="cpu")
        for block_type, count in counts:
            # Make the row of one block for each policy that is within the bounds.
            index, rows = self.first[block_type], []
            for policy in self.allowed[index]:
                saved = self.memory.blocks[policy][index]
                if self.memory.excess(policy, index) > ceiling or (largest is not None and saved.largest > largest):
                    continue
                row = torch.zeros_like(sums[0])
                row[MOVED] = 0 if largest is None else saved.movable
                row[KEPT] = saved.total - row[MOVED]
                row[SECONDS] = self.times.recomputed[policy][index]
                row[COUNTS + block_type * policies + CHECKPOINTING_POLICIES.index(policy)] = 1
                rows.append(row)
            if not rows:
                return sums[:0]

            # Divide the blocks of this type among the policies in all possible ways, and add the results to all sums so
            # far.
            divisions = torch.cartesian_prod(*[torch.arange(count + 1, device="cpu")] * len(rows)).view(-1, len(rows))
            divisions = divisions[divisions.sum(1) == count]  # [divisions, policies]
            type_sums = _pareto(divisions.double() @ torch.stack(rows))  # [divisions, columns]
            sums = _pareto((sums[:, None] + type_sums).flatten(0, 1))
        return sums

    def policies(self, candidate: Candidate) -> list[str]:
        """Return the policy of each block.

        Among the blocks that keep their activations on the device, those that save the fewest bytes come first, because
        the backward frees the activations of the first blocks last. Among the offloaded blocks, the blocks that save
        many bytes are evenly spread, because only a limited number of bytes can be copied at a time.
        """
        offloaded = offloaded_blocks(self.blocks, candidate.offload_layers)
        policies = [""] * self.blocks
        for is_away, row in ((False, candidate.stay), (True, candidate.away)):
            type_counts = row[COUNTS:].view(-1, len(CHECKPOINTING_POLICIES)).int().tolist()  # [types, policies]
            for block_type, counts in enumerate(type_counts):
                # List the policies for the blocks of this type in order, with fractions that spread each policy evenly.
                saved = {
                    policy: self.memory.blocks[policy][self.first[block_type]].total
                    for policy in CHECKPOINTING_POLICIES
                }
                by_bytes = sorted(zip(CHECKPOINTING_POLICIES, counts, strict=True), key=lambda pair: saved[pair[0]])
                ordered = [(policy, (i + 0.5) / count) for policy, count in by_bytes for i in range(count)]
                if is_away:
                    ordered.sort(key=lambda pair: pair[1])

                # Find the blocks that get these policies.
                indices = (
                    index
                    for index in range(self.blocks)
                    if self.type_of[index] == block_type and (index in offloaded) == is_away
                )
                for index, (policy, _) in zip(indices, ordered, strict=True):
                    policies[index] = policy
        return policies


def host_blocks(blocks: int, count: int, offloaded: Collection[int]) -> tuple[int, ...]:
    """Choose the ``count`` blocks whose moments are kept in host memory.

    The chosen blocks are evenly spread over the blocks that are not offloaded. If there are fewer than ``count`` such
    blocks, the chosen blocks are evenly spread over all blocks.
    """
    stay = [index for index in range(blocks) if index not in offloaded]
    pool = stay if count <= len(stay) else range(blocks)
    return tuple(pool[index * len(pool) // count] for index in range(count))


def _pareto(sums: Tensor) -> Tensor:
    """Sort the rows of ``sums`` [N, columns] by time. Drop a row if a faster row needs no more bytes.

    Each row is compared with only one faster row, so most of the rows that could be dropped are dropped, but not all.
    """
    for column in (KEPT, MOVED, SECONDS):  # the sorts are stable, so the last column is the first criterion
        sums = sums[sums[:, column].sort(stable=True).indices]

    # Compare each sum with one of the faster sums: the one with the fewest offloaded bytes or, if nothing is offloaded,
    # the one with the fewest bytes on the device.
    kept, moved = sums[:, KEPT], sums[:, MOVED]
    least = (moved if bool((moved > 0).any()) else kept).cummin(0).indices[:-1]
    is_beaten = (moved[1:] >= moved[least]) & (kept[1:] >= kept[least])
    return torch.cat([sums[:1], sums[1:][~is_beaten]])
