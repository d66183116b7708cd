"""The memory plan of a run: what a step recomputes or offloads, and which plan follows if a step runs out of memory."""

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from liger_models.base.causal_lm import CausalLM
from liger_models.common.random_state import random_state, restore_random_state
from liger_models.distributed.ranks import rank, run_on_rank_zero, world_size
from liger_models.generation.rollouts import free_memory
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.memory.estimate import TrainingMemory
from liger_models.memory.plan import MemoryPlan, plan_memory, usable_share
from liger_models.parallel.gathered import end_pass
from liger_models.train.folder import replace_json
from liger_models.train.objective_options import make_objective
from liger_models.train.report import estimate, say
from liger_models.train.restart import POLL, request, start_again, take_request, watch
from liger_models.train.train_options import TrainOptions

Result = TypeVar("Result")
MEMORY = "memory.json"
"""Name of the file with the plan of a run."""
SMALLER = (0.9, 0.97, 0.999)
"""Upper bounds for the estimated peak of the next smaller plan, as shares of the peak of the plan that did not fit.

The first bound for which a plan exists is used.
"""


class StepPlan:
    """The memory plan of a run: what the steps recompute and offload.

    If ``options.memory`` is set, the plan is the fastest plan within this budget. If ``options.checkpointing`` is set,
    all blocks use this checkpointing policy. If neither is set, the plan is the fastest plan that fits into the free
    memory of the devices. The plan is stored in the folder of the run, and a run that resumes under the same conditions
    uses it again. If a step nevertheless runs out of memory, `run` takes the next smaller plan and repeats the step. No
    plan changes the results.

    Every rank must make the same calls.

    Args:
        options: the options of the run.
        model: the model as it is trained.
        dtype: the dtype of the computation.
        budget: ``options.memory`` in bytes; None without this option.
        restarts: see `train`.

    Attributes:
        is_estimated: whether the memory of a step can be estimated.
        plan: the current plan; None if ``options.checkpointing`` is the policy of all blocks.
        lines: lines of the banner that describe the plan.

    Raises:
        ValueError: no plan fits.
    """

    def __init__(
        self, options: TrainOptions, model: CausalLM, dtype: torch.dtype, budget: int | None, *, restarts: bool = False
    ) -> None:
        self._options, self._model, self._dtype, self._restarts = options, model, dtype, restarts
        self._folder = Path(str(options.output))
        self._path = self._folder / MEMORY
        self.is_estimated = make_objective(options).shares_rows and options.tensor_parallel == 1
        self._automatic = options.checkpointing is None and budget is None
        self._memory: TrainingMemory | None = None
        self._others = 0  # bytes that the process holds in addition to the model, for example for a reference model
        self.plan: MemoryPlan | None = None
        self.lines: list[str] = []
        if budget is not None:
            self.plan = self._plan(budget, host_moments=True, in_backward=True)
            self.lines = str(self.plan).splitlines()
            self._store(self.plan)
        elif self._automatic:
            self.plan = self._choose()
        self._apply()
        can_restart = restarts and self._automatic and world_size() > 1
        self._watch = watch(self._folder) if can_restart else None

    def close(self) -> None:
        """End the thread that watches for ranks that have run out of memory."""
        if self._watch is not None:
            self._watch.set()

    def _choose(self) -> MemoryPlan:
        """Choose the fastest plan that fits, or read the plan of a run that resumes."""
        free = _least(free_memory(self._model.device))
        stored, failure = self._stored()
        if stored is not None:
            if failure is not None:
                self._others = _allocated(self._model.device) - self._estimate().weights if self.is_estimated else 0
                stored = self._smaller(stored, failure)
                self._store(stored)
            self.lines = [f"memory      {_summary(stored)} (the plan of the run, {self._path})"]
            return stored
        if free is None or not self.is_estimated:
            plan = _uniform(self._model, "none")
            self.lines = [f"memory      {_summary(plan)}{_ON_FAILURE * (free is not None)}"]
        else:
            # The model is already loaded, so the budget is the free memory plus the memory of the model.
            weights = self._estimate().weights
            self._others = _allocated(self._model.device) - weights
            budget = _least(free + weights)
            assert budget is not None
            plan = self._fastest(budget)
            self.lines = self._describe(plan, budget)
        if free is not None:
            self._store(plan)
        return plan

    def _estimate(self) -> TrainingMemory:
        self._memory = self._memory or estimate_step(self._options, self._model)
        return self._memory

    def _fastest(self, budget: int) -> MemoryPlan:
        # Running the optimizer step in the backward is the last resort: such a step cannot be repeated, and there is
        # no gradient norm to log.
        try:
            return self._plan(budget, host_moments=True, in_backward=False)
        except ValueError as error:
            try:
                return self._plan(budget, host_moments=True, in_backward=True)
            except ValueError:
                raise ValueError(
                    f"train: a step must fit into the {_gigabytes(budget)} that the device has free, but no plan does. "
                    f"{self._remedies(budget)} ({error})"
                ) from error

    def _describe(self, plan: MemoryPlan, budget: int) -> list[str]:
        """Describe the chosen plan, and state how much slower a step would be with half of the memory."""
        amount = f"about {_gigabytes(plan.peak)} of {_gigabytes(budget)} that the device has free (estimate)"
        half = f"{budget / 2e9:.3g}GB"
        try:
            time = self._plan(budget // 2, host_moments=True, in_backward=False).time / plan.time
            cost = f"{time:.2f} of the time of a step (expected)"
        except ValueError:
            cost = "does not fit"
        reason = "it needs nothing else" if plan.time <= 1 else "the fastest plan that fits"
        lines = [amount, f"{_summary(plan)}: {reason}", f"half of it (--memory {half}): {cost}"]
        return [f"{'' if number else 'memory':<10}  {line}" for number, line in enumerate(lines)]

    def _plan(
        self, budget: int, *, host_moments: bool, in_backward: bool, memory: TrainingMemory | None = None
    ) -> MemoryPlan:
        """Plan the fastest step within a budget in bytes. All ranks get the same plan.

        Clipping, accumulation and a loss scale need all gradients at once. The plan may put the optimizer step into the
        backward only if the run uses none of these three. Without clipping, ``max_norm`` is inf. With Muon, the
        momentum stays on the device and the optimizer step runs after the backward, because Muon needs all gradients.
        """
        options, model = self._options, self._model
        is_adamw, is_clipped = options.optimizer == "adamw", options.max_norm != math.inf
        needs_all_gradients = is_clipped or options.accumulate > 1 or self._dtype == torch.float16
        plan = partial(
            plan_memory,
            model,
            tokens_per_batch(options),
            budget,
            memory=memory or self._estimate(),
            length=options.length,
            accumulate=options.accumulate,
            checkpointing=options.checkpointing,
            host_moments=host_moments and is_adamw and model.device.type == "cuda",
            in_backward=in_backward and is_adamw and not needs_all_gradients,
        )
        # Rank 0 plans for all, because its shards are the largest.
        return run_on_rank_zero("plan", plan)

    def _apply(self) -> None:
        if self.plan is None:
            assert self._options.checkpointing is not None
            self._model.set_checkpointing(self._options.checkpointing)
        else:
            self.plan.apply(self._model)

    # Steps that run out of memory.

    def run(self, step: int, batches: Sequence[dict[str, Any]], work: Callable[[], Result]) -> Result:
        """Return the result of ``work()``. If the call runs out of memory, repeat it with smaller plans until it fits.

        Each attempt starts from the same batches, gradients and random numbers, so the result does not depend on the
        number of attempts.

        Args:
            step: number of the step, for messages.
            batches: the batches of the step, to which ``work`` may add tensors.
            work: function that computes the forward and backward of the whole step, and nothing else.

        Raises:
            torch.OutOfMemoryError: no smaller plan exists, or the user has chosen the plan.
        """
        if not self._automatic or self.plan is None or self.plan.in_backward:
            return work()
        while True:
            state, before = random_state(self._model.device), [dict(batch) for batch in batches]
            try:
                return work()
            except torch.OutOfMemoryError as error:
                message = str(error)
            # Outside of the exception handler, the tensors of the failed attempt are freed.
            if world_size() > 1:
                self._start_again(step, message)
            self._clean_up()
            self.plan = self._smaller(self.plan, f"Step {step} ran out of memory: {message}")
            say(f"Step {step} ran out of memory, and is repeated with a smaller plan: {_summary(self.plan)}.")
            self._store(self.plan)
            self._apply()
            for batch, content in zip(batches, before, strict=True):
                batch.clear()
                batch.update(content)
            restore_random_state(state, self._model.device)

    def _start_again(self, step: int, message: str) -> None:
        """Restart the processes of all ranks with a smaller plan, because the other ranks are blocked in collectives.

        Raises:
            torch.OutOfMemoryError: the process must not restart itself.
        """
        text = f"Step {step} ran out of memory on rank {rank()}: {message}"
        request(self._folder, text)
        if self._watch is not None:
            print(f"{text}\nAll ranks start again with a smaller plan.", file=sys.stderr, flush=True)
            time.sleep(2 * POLL)  # until the other ranks have seen the request
            start_again(self._folder)
        raise torch.OutOfMemoryError(f"train: {text} The next run in {self._folder} uses a smaller plan.")

    def _clean_up(self) -> None:
        """Free the memory that a failed step still holds: gathered parameters, gradients, and cached memory."""
        end_pass(self._model)
        self._model.zero_grad(set_to_none=True)
        gc.collect()
        if self._model.device.type in ACCELERATORS:
            torch.accelerator.empty_cache()

    def _smaller(self, current: MemoryPlan, failure: str) -> MemoryPlan:
        """Return the next smaller plan after a failure.

        Raises:
            torch.OutOfMemoryError: there is no smaller plan.
        """
        if self.is_estimated and current.parts:
            plan = self._planned_smaller(current)
        else:
            index = CHECKPOINTING_POLICIES.index(current.policies[0]) + 1
            plan = _uniform(self._model, CHECKPOINTING_POLICIES[index]) if index < len(CHECKPOINTING_POLICIES) else None
        if plan is None:
            raise torch.OutOfMemoryError(
                f"train: a step must fit into the memory of the device, but does not with the smallest plan "
                f"({_summary(current)}). {self._remedies(None)} {failure}"
            )
        return plan

    def _planned_smaller(self, current: MemoryPlan) -> MemoryPlan | None:
        """Return the fastest plan that fits into the free memory and is smaller than the current plan."""
        memory = self._estimate()
        # The optimizer exists already, so its moments stay where they are.
        stays = memory._replace(optimizer=current.parts["moments"], moments=(0,) * len(memory.moments), staging=0)
        budgets = [int(share * current.peak / usable_share(self._model)) for share in SMALLER]
        free = _least(free_memory(self._model.device))
        if free is not None:
            left = _least(free + _allocated(self._model.device) - self._others)
            budgets.insert(0, min(left or 0, budgets[0]))
        for budget in budgets:
            try:
                plan = self._plan(budget, host_moments=False, in_backward=False, memory=stays)
            except ValueError:
                continue
            return replace(plan, host_moments=current.host_moments)
        return None

    def _remedies(self, budget: int | None) -> str:
        """Return a sentence that names options for a smaller step, if possible options that fit into ``budget``."""
        from liger_models.train.recipe import Planner

        options, planner = self._options, Planner(self._model.config)
        bf16, method = torch.bfloat16, "4bit" if options.lora_4bit else "lora" if options.lora_r else "full"
        dtype = torch.float32 if options.dtype == "float32" else bf16
        tokens, batch_size, length = tokens_per_batch(options), options.batch_size, options.length
        words: dict[str, tuple[str, torch.dtype, int]] = {}
        if batch_size > 1:
            words[f"--batch-size {batch_size // 2}"] = method, dtype, tokens * (batch_size // 2) // batch_size
        words[f"--length {length // 2}"] = method, dtype, tokens // 2
        if dtype == torch.float32:
            words["--dtype bfloat16"] = method, bf16, tokens
        if not options.lora_r:
            words["--lora-r 16"] = "lora", bf16, tokens
        if not any(getattr(options, name) for name in ("lora_4bit", "lora_float8", "lora_keep_quantized")):
            words["--lora-r 16 --lora-4bit"] = "4bit", bf16, tokens
        fitting = [*words]
        if budget is not None and world_size() == 1:
            room = budget * usable_share(self._model)
            fitting = [word for word, of in words.items() if planner.step(*of).peak("full", options.accumulate) <= room]
        joined = " or ".join(fitting or [*words])
        return f"Use {joined}, or more GPUs." if fitting else f"Together, {joined} may help; or use more GPUs."

    # The file of the plan.

    @property
    def _conditions(self) -> dict[str, Any]:
        """The options and sizes that determine the plan.

        If any of these options and sizes has changed, a resumed run chooses a new plan.
        """
        device = self._model.device
        total = 0
        if device.type in ACCELERATORS:
            total = torch.get_device_module(device).get_device_properties(device).total_memory
        names = "batch_size", "accumulate", "length", "tensor_parallel", "context_parallel", "compile", "max_norm"
        options = {name: getattr(self._options, name) for name in names}
        return {**options, "max_norm": str(self._options.max_norm), "ranks": world_size(), "device_bytes": total}

    def _store(self, plan: MemoryPlan) -> None:
        if rank() == 0:
            content = {**asdict(plan), "peak": plan.peak, "automatic": self._conditions if self._automatic else None}
            replace_json(self._path, content)

    def _stored(self) -> tuple[MemoryPlan | None, str | None]:
        """Return the plan that the run has stored, and the error with which a step of this plan failed.

        The stored plan counts only if the options and sizes that determine it (`_conditions`) have not changed. If
        there is no such plan, both results are None. If no step failed, the error is None.
        """
        found: list[Any] = [None, None]
        if rank() == 0:
            failure = take_request(self._folder)
            try:
                content = json.loads(self._path.read_text())
                values = {field.name: content[field.name] for field in fields(MemoryPlan)}
                for name in ("policies", "host_moments"):
                    values[name] = tuple(values[name])
                is_same = content["automatic"] == self._conditions
                if is_same and len(values["policies"]) == len(self._model.layers):
                    found = [MemoryPlan(**values), failure]
            except FileNotFoundError:  # a plan without a memory estimate is stored only after a failure
                found = [None if failure is None else _uniform(self._model, "none"), failure]
            except (KeyError, OSError, TypeError, ValueError):  # a file of an earlier version
                pass
        dist.broadcast_object_list(found)
        return found[0], found[1]


_ON_FAILURE = "; if a step runs out of memory, it is repeated with more recomputation"


def estimate_step(options: TrainOptions, model: CausalLM) -> TrainingMemory:
    """Estimate the memory of a step on this rank."""
    return estimate(
        model,
        tokens_per_batch(options),
        four_bit=options.lora_4bit,
        float8=options.lora_float8,
        moments_8bit=options.moments_8bit,
        muon=options.optimizer == "muon",
    )


def tokens_per_batch(options: TrainOptions) -> int:
    """Return the number of tokens in a batch on each rank."""
    return options.batch_size * options.length // options.sharing


def _uniform(model: CausalLM, policy: str) -> MemoryPlan:
    """Return a memory plan with the same checkpointing policy for all blocks, and without a memory estimate."""
    return MemoryPlan((policy,) * len(model.layers), 0, (), False, {}, 0, 1.0)


def _summary(plan: MemoryPlan) -> str:
    """Describe a memory plan in a few words."""
    counts = {policy: plan.policies.count(policy) for policy in CHECKPOINTING_POLICIES[1:]}
    parts = [f'recomputation "{policy}" in {count} blocks' for policy, count in counts.items() if count]
    if plan.offload_layers:
        parts.append(f"activations of {plan.offload_layers} blocks in host memory")
    if plan.host_moments:
        parts.append(f"moments of {len(plan.host_moments)} blocks in host memory")
    if plan.in_backward:
        parts.append("the optimizer steps in the backward")
    return ", ".join(parts) or "nothing is recomputed or offloaded"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _least(size: int | None) -> int | None:
    """Return the smallest ``size`` on all ranks; None if ``size`` is None on any rank.

    Every rank must call this function.
    """
    sizes: list[int | None] = [None] * world_size()
    dist.all_gather_object(sizes, size)
    known = [each for each in sizes if each is not None]
    return min(known) if len(known) == len(sizes) else None


def _allocated(device: torch.device) -> int:
    """Return how many bytes this process's tensors take on an accelerator; 0 for other devices."""
    return torch.accelerator.memory_allocated(device) if device.type in ACCELERATORS else 0
