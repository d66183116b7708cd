"""Train or fine-tune a model on packed data with FSDP2: ``torchrun -m liger_models.train config.yaml``.

This file contains the whole loop, from the process group to the export, and is meant to be copied and changed. The
options of the loop are in ``train_options.py``. The loop trains either all weights or adapters (LoRA). The loop runs on
any number of GPUs, on CPUs with gloo, and in a single process without torchrun. A run that is started again resumes
from its last checkpoint.
"""

import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from liger_models.adapters.check import adapter_line, adapter_sums
from liger_models.adapters.lora import apply_lora, language_targets
from liger_models.adapters.lora_config import EXPERTS, LoRAConfig
from liger_models.adapters.mtp import LigerMTP
from liger_models.adapters.peft_files import save_adapter
from liger_models.adapters.quantize import quantize_base
from liger_models.arch.auto import load_by_name
from liger_models.base.causal_lm import CausalLM
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.common.device import available_device, on_device
from liger_models.common.printable import printable
from liger_models.common.random_state import random_state, restore_random_state
from liger_models.data.batch import Batch
from liger_models.data.dataset import PackedDataset
from liger_models.data.formats import DOCUMENTS
from liger_models.data.loader import PackedLoader
from liger_models.data.sources import find_files
from liger_models.layers.compile_ahead import compile_early
from liger_models.layers.layer import layers_of
from liger_models.memory.plan import MemoryPlan, parse_memory
from liger_models.parallel.gathered import reshard
from liger_models.parallel.state import load_state, newest_checkpoint, save_state
from liger_models.parallel.step import clip_grad_norm_, mean_over_ranks
from liger_models.train.defaults import choose_dtype, choose_folder, choose_objective
from liger_models.train.draft_block import (
    MEASURED_SAMPLES,
    DraftAcceptance,
    first_batches,
    has_block,
    lag_line,
    make_block,
)
from liger_models.train.finite import FiniteChecks
from liger_models.train.folder import lock_folder
from liger_models.train.grpo import has_room
from liger_models.train.metrics import Log, flops, reporter
from liger_models.train.modelscope import PREFIX, fetch
from liger_models.train.muon import LigerMuon
from liger_models.train.objective_options import OBJECTIVES, make_objective
from liger_models.train.objectives import Metrics, Objective, add_metrics, mean_metrics
from liger_models.train.optimizer import LigerAdamW, split_by_decay, step_in_backward
from liger_models.train.options import read_options
from liger_models.train.remote_data import Name, fetch_data, is_remote
from liger_models.train.report import banner, check_turn_end, next_steps, sample, say, warn_of_few_steps
from liger_models.train.restart import PATIENCE, new_store
from liger_models.train.resume import changed_options, fixed_settings
from liger_models.train.seed import seed_all
from liger_models.train.step_plan import StepPlan, estimate_step
from liger_models.train.stopping import Stop, keep_signal_handlers
from liger_models.train.targets import TargetChecks
from liger_models.train.train_options import STORED, TrainOptions

LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Parts of the error messages that collectives raise after another process has ended."""


@keep_signal_handlers()
def train(options: TrainOptions, *, restarts: bool = False) -> None:
    """Train from the last checkpoint in ``options.output``, or from the start, and export the model.

    Every rank must call this function. If there is no process group, the function initializes one: with the processes
    of torchrun or, without torchrun, with this process alone. After SIGINT (Ctrl-C) or SIGTERM, the run saves a
    checkpoint, ends, and exports nothing. A second signal ends the run at once.

    Args:
        options: the options of the run.
        restarts: what happens if one of several ranks runs out of memory and a memory plan with a smaller peak
            exists. If True, all processes restart themselves with the arguments of the command line. If False, the
            rank raises the error, and the next run in the folder uses the smaller plan.

    Raises:
        KeyboardInterrupt: SIGINT has stopped the run.
        SystemExit: SIGTERM has stopped the run.
        ValueError: the device or a data file does not exist; the data have no targets; ``options.output`` is a
            file; another process trains in this folder; the folder holds a run with another model, other data or
            another objective; the number of ranks does not fit the options; no step fits into the memory; or a
            loss, the norm of the gradients or a weight is not finite.
        torch.OutOfMemoryError: a step does not fit into the memory of the device.
        OSError: ``options.output`` cannot be written, or its newest checkpoint is damaged.
    """
    # The lock comes last, because all ranks must be able to report that another run holds it.
    device = select_device(options.device)
    prepare_paths(options)
    started_group = start_group(device)
    options = choose_folder(options)
    output = Path(str(options.output))
    with lock_folder(output), ExitStack() as cleanup:
        stop = run(options, output, device, cleanup, restarts=restarts)

    # Only a process group that this function created is destroyed. Signals take effect after all cleanup.
    if started_group:
        dist.destroy_process_group()
        if device.type == "cpu":  # Python aborts if it exits while a thread of gloo still frees a tensor
            time.sleep(0.2)
    stop.leave()


def run(
    options: TrainOptions, output: Path, device: torch.device, cleanup: ExitStack, *, restarts: bool = False
) -> Stop:
    """Run `train` in a prepared folder and process group, and return the `Stop` that received the run's signals.

    ``cleanup`` closes the progress bar, even after an error, so that further output begins on a new line.
    """
    # Check packages, memory budget, mesh and seed first, so that errors appear before a large model is loaded.
    for name in options.report_to:
        reporter(name)
    budget = None if options.memory is None else parse_memory("train: memory", options.memory, device)
    mesh = make_mesh(options, device)
    data_rank, data_ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
    seed_all(options.seed + data_rank, deterministic=options.deterministic)
    options = choose_objective(fetch_files(options))

    # The sharded model, and other models that the objective needs, such as a reference model.
    dtype = computing_dtype(options, device)
    options = choose_dtype(options, dtype)
    model, objective = load_model(options, device, mesh, dtype), make_objective(options)
    objective.prepare(model, lambda name: load_frozen(fetch(name), device, dtype))
    is_sharded, detached = needs_fsdp(options, dtype), options.objective == "grpo"
    objective.block = make_block(model, options.mtp_weight, detached=detached, sharded=is_sharded)
    trained = model if objective.trained_block is None else objective.trained_block

    # The data. Weights that only process images are frozen if the data contain no images.
    bound_images(model, options.max_pixels)
    data, eval_data = make_datasets(options, model, objective, data_rank, data_ranks)
    loader = PackedLoader(data, num_workers=options.workers, pin_memory=device.type != "cpu")
    if not options.lora_r and not data.has_images:
        freeze_images(model)

    # Choose what is recomputed or offloaded: by the user's policy or by a memory plan.
    step_plan = StepPlan(options, model, dtype, budget, restarts=restarts)
    if options.compile:
        from liger_models.parallel.fsdp import compile_blocks  # slow to import

        compile_blocks(model)

    # The optimizer.
    progress = Progress(options, data, objective)
    updates = Updates(trained, options, step_plan.plan, progress, dtype)
    drafts = measure_drafts(options, model, objective, data_rank, data_ranks)
    accepted_before = None if drafts is None else drafts.measure()  # with the weights that the run began with

    # Load the saved state if the run resumes. The current options override the saved options.
    state = (trained, updates.optimizer, updates.scheduler, loader, updates.scaler)
    settings = fixed_settings(options, objective)
    start = load_state(output, *state, settings=settings) or 0
    progress.resume(start)
    updates.resume(start)  # after the progress, whose number of steps determines the learning rate
    steps = progress.steps

    # Banner and log.
    if start >= steps and dist.get_rank() == 0:
        print(
            f"{output}: this run already finished ({start} of {steps} steps). Nothing is trained; the result is "
            "exported again. Raise steps or epochs to train on, or use another output for a new run."
        )
    announce(options, model, data, step_plan, progress, start)
    log = Log(output, start, steps, device, data_ranks, report_to=options.report_to, options=asdict(options))
    cleanup.callback(log.bar.close)

    if accepted_before is not None and start == 0:
        log.write(0, draft_acceptance=accepted_before)

    # Signal handling and the checks for non-finite values begin with the first step.
    checkpoints, stop = Checkpoints(output, options.keep, state, settings), Stop()
    finite = FiniteChecks(updates.trained, updates.scaler, options.data, checkpoints.newest)
    targets = TargetChecks(options.length)
    loaded, batches = endless(loader), list[Batch]()
    adapters = adapter_sums(model)
    for step in range(start + 1, steps + 1):
        # Batches. Some objectives take several steps on the same batches.
        if not batches or (step - 1) % objective.repeats == 0:
            objective.accumulate = progress.next_batches()
            batches = [objective.batch(model, next(loaded)) for _ in range(objective.accumulate)]
            operations = flops(model, batches)
            if {*objective.formats} <= {*DOCUMENTS}:
                targets.watch(batches)
            batches = [to_device(batch, device, model) for batch in batches]
        log.count(batches, operations)

        # Forward and backward of each batch, then one update.
        loss, metrics = step_plan.run(step, batches, partial(objective.step, model, batches, updates.backward))
        lr, norm = updates.step()
        finite.watch(step, loss, norm)

        # Log, evaluation, sample. The rates in the log count training time only. All ranks make the same decisions.
        is_last = step == steps
        is_stopping = stop.check() and step % objective.repeats == 0
        if step % options.log_every == 0 or is_last:
            loss = mean_over_ranks(loss)
            values = {"loss": loss.item(), "lr": lr, "epoch": data.epoch, **mean_metrics(metrics)}
            if norm is not None:
                values["norm"] = norm.item()
            if updates.scaler.is_enabled():
                values["loss_scale"] = updates.scaler.get_scale()
            log.write(step, epochs=progress.epochs_read(), **values, **log.rates())
            if warning := targets.check(step, device):
                say(warning)
            finite.check()
            if norm is None:  # the loss may be finite although an unchecked gradient is not
                finite.check_weights(step)
        if step % options.eval_every == 0 or is_last:
            if eval_data is not None:
                log.write(step, **evaluate(model, eval_data, device, objective))
                log.restart()
            if options.sample_prompt is not None:
                log.write(step, sample=sample(model, options.sample_prompt))
                log.restart()

        # Checkpoint, in the background.
        if step % options.save_every == 0 or is_last or is_stopping:
            checkpoints.finish()
            finite.check()
            finite.check_weights(step)
            checkpoints.save(step)
            log.restart()
        log.bar.update()
        if is_stopping:
            break

    # The end: wait for the last checkpoint, then export, unless a signal has stopped the run.
    step_plan.close()
    stop.close()
    if drafts is not None and not stop.signal:
        accepted_after = drafts.measure()
        if accepted_before is not None and accepted_after is not None:
            log.write(max(start, steps), draft_acceptance=accepted_after)
            say(lag_line(objective.trained_block is not None, accepted_before, accepted_after))
    log.close()
    checkpoints.finish()
    if stop.signal:
        command = "The same command" + f" with --output {output}" * (options.given["output"] is None)
        say(f"Stopped after step {step} of {steps}, which is saved in {output}. {command} goes on from there.")
    else:
        finite.check_weights(max(start, steps))
        if options.lora_r and start < steps:
            say(adapter_line(model, adapters, steps - start))
        export(options, model, objective, output)
    return stop


def prepare_paths(options: TrainOptions) -> None:
    """Check the paths of the data, and create the folder of the run if the options name one.

    Raises:
        ValueError: the model is a file, a path of the data does not exist, or the output is a file.
        OSError: the folder cannot be created.
    """
    if Path(options.model).is_file():
        raise ValueError(
            f"train: model must be a folder or a name on the hub, got the file {options.model}. MODEL comes before "
            "DATA."
        )
    for path in (*options.data, *options.eval_data):
        if is_remote(path):
            Name.parse(path)  # refuses a malformed name
        elif not Path(path).exists():
            raise ValueError(
                f"train: data must be files or folders, got {path}, which does not exist. The name of a data set on "
                "the hub begins with hub:, as in hub:owner/name."
            )
    if options.output is None:
        return
    output = Path(options.output)
    try:  # other ranks create it at the same time
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        message = f"train: output must be a folder, or not exist, got the file {output}. Name another."
        raise ValueError(message) from None
    except OSError as error:
        raise OSError(
            f"train: output must be a folder that can be written, got {output}: {error}. Check its permissions, or "
            "name another folder."
        ) from error


def select_device(name: str | None) -> torch.device:
    """Set and return the current device. The default is the rank's accelerator, or the CPU if there is no accelerator.

    Raises:
        ValueError: there is no such device, or several processes would share one device.
    """
    device = available_device("train", name)
    if device.type == "cpu":
        return device
    if device.index is not None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            f"train: device must have no number where several processes train, each on its own GPU, got {name}. Write "
            f"{device.type}."
        )
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index)
    return torch.device(device.type)


def start_group(device: torch.device) -> bool:
    """Initialize the process group if there is none, and return whether this call initialized it."""
    if dist.is_initialized():
        return False
    # torchrun describes its process group in environment variables. A single process needs no port and no network
    # store.
    by_torchrun = "RANK" in os.environ
    single: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(dist.get_default_backend_for_device(device), **(new_store() if by_torchrun else single))
    return True


def make_mesh(options: TrainOptions, device: torch.device) -> DeviceMesh:
    """Arrange the ranks in a 2D mesh: "dp" (ranks with different batches) x "shared" (ranks that share a batch).

    Raises:
        ValueError: the number of ranks is not a multiple of the number of ranks that share a batch.
    """
    ranks, sharing = dist.get_world_size(), options.sharing
    if ranks % sharing != 0:
        raise ValueError(
            f"train: the number of ranks ({ranks}) must be a multiple of the {sharing} that share a batch. "
            "Start another number of ranks."
        )
    return init_device_mesh(device.type, (ranks // sharing, sharing), mesh_dim_names=("dp", "shared"))


def all_ranks(device: torch.device) -> DeviceMesh:
    """Return a mesh of all ranks.

    If FSDP got no mesh, it would shard over the accelerators even in a run on the CPU.
    """
    return init_device_mesh(device.type, (dist.get_world_size(),))


def fetch_files(options: TrainOptions) -> TrainOptions:
    """Download the model and the data, check the format of the data, and return the options with the local files."""
    names = [*options.data, *options.eval_data]
    if options.model.startswith(PREFIX) or any(map(is_remote, names)):
        output = Path(str(options.output))
        files = fetch_data(names, output, resumes=newest_checkpoint(output) is not None)
        data, eval_data = files[: len(options.data)], files[len(options.data) :]
        options = options.changed(model=fetch(options.model), data=data, eval_data=eval_data)
    find_files([*options.data, *options.eval_data])
    return options


def make_datasets(
    options: TrainOptions, model: CausalLM, objective: Objective, data_rank: int, data_ranks: int
) -> tuple[PackedDataset, PackedDataset | None]:
    """Create the training data of this rank, and the evaluation data if the options name any."""
    packing = packing_of(options, data_rank, data_ranks)
    data = objective.dataset(
        options.data, model, max_samples=options.max_samples, shares=options.data_shares or None, **packing
    )
    if not options.eval_data:
        return data, None
    return data, objective.eval_dataset(options.eval_data, model, **packing)


def packing_of(options: TrainOptions, data_rank: int, data_ranks: int) -> dict[str, Any]:
    """Return the arguments of `PackedDataset` that are the same for training data and evaluation data."""
    return {
        "length": options.length, "overflow": options.overflow, "field": options.field, "format": options.format,
        "broken_media": options.broken_media, "multi_turn": options.multi_turn,
        "on_unrendered": options.on_unrendered, "batch_size": options.batch_size, "seed": options.seed,
        "rank": data_rank, "ranks": data_ranks
    }  # fmt: skip


def measure_drafts(
    options: TrainOptions, model: CausalLM, objective: Objective, data_rank: int, data_ranks: int
) -> DraftAcceptance | None:
    """Return a `DraftAcceptance` for the model's multi-token prediction block; None if the model has no such block.

    The drafts are measured on the first batches of the evaluation data or, without evaluation data, of the training
    data.
    """
    if options.sharing != 1 or not objective.has_head or not (objective.block is not None or has_block(model)):
        return None
    if not has_room(model):
        say("drafts      not measured, because a rank has no memory for the whole model. The block is kept as it was.")
        return None
    files, limit = (options.eval_data, None) if options.eval_data else (options.data, MEASURED_SAMPLES)
    data = objective.eval_dataset(files, model, max_samples=limit, **packing_of(options, data_rank, data_ranks))
    # Restore the random state afterwards: sampling answers must not change the random numbers of the run.
    state = random_state(model.device)
    batches = [objective.batch(model, batch) for batch in first_batches(data)]
    restore_random_state(state, model.device)
    return DraftAcceptance(model, objective.block, [to_device(batch, model.device, model) for batch in batches])


class Progress:
    """The number of steps of a run, and the fraction of the data that the run has read.

    Attributes:
        steps: number of steps of the whole run.
    """

    def __init__(self, options: TrainOptions, data: PackedDataset, objective: Objective) -> None:
        self._options, self._data, self._repeats = options, data, objective.repeats
        # The number of batches and steps in all epochs. Products are rounded before `ceil`, so that 0.07 × 100
        # gives 7, not 8.
        self._batches = math.ceil(round(options.epochs * len(data), 6))
        self._exact_steps = self._batches / options.accumulate * objective.repeats
        self.steps = options.steps or math.ceil(self._batches / options.accumulate) * objective.repeats

    def resume(self, start: int) -> None:
        """Continue after step ``start``.

        If a step now has another number of batches, `steps` is adapted to the remaining batches. For example, suppose
        that a run over 40 batches has read 20 batches in 10 steps of 2 batches. If a step now has 4 batches, the
        remaining 20 batches take 5 steps, so `steps` becomes 15.
        """
        read_steps = self._batches_read() / self._options.accumulate * self._repeats
        if self._options.steps is None and read_steps != start:
            self.steps = start + max(math.ceil(round(self._exact_steps - read_steps, 6)), 0)

    def _batches_read(self) -> float:
        """Return how much data each rank has read, as a number of batches of the current batch size."""
        return self._data.passed / (self._data.ranks * self._options.batch_size)

    def next_batches(self) -> int:
        """Return the number of batches of the next step. The very last step of the run takes the remaining batches."""
        if self._options.steps is not None:
            return self._options.accumulate
        remaining = math.ceil(round(self._batches - self._batches_read(), 6))
        return max(min(remaining, self._options.accumulate), 1)

    @property
    def epochs(self) -> float:
        """The number of passes through the data in the whole run."""
        if self._options.steps is None:
            return self._batches / len(self._data)
        return self.steps * self._options.accumulate / len(self._data) / self._repeats

    def epochs_read(self) -> float:
        """Return the number of passes through the data so far."""
        return self._data.passed / (len(self._data) * self._data.ranks * self._data.batch_size)


class Updates:
    """The optimizer with the learning rate schedule, the gradient scaler and gradient clipping.

    Attributes:
        trained: the trained parameters.
        scaler: the gradient scaler, which is enabled in float16 only.
    """

    def __init__(
        self, model: CausalLM | LigerMTP, options: TrainOptions, plan: MemoryPlan | None, progress: Progress,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._options, self._progress = options, progress
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._in_backward = plan is not None and plan.in_backward
        self.optimizer = make_optimizer(model, options, plan)
        check_groups(model, self.optimizer)
        # Remember the current options of the optimizer's groups, because loading a state overwrites the options in the
        # groups.
        self._groups = [{name: group[name] for name in ("lr", "weight_decay")} for group in self.optimizer.param_groups]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: self._share(step))
        self.scaler = torch.amp.GradScaler(model.device.type, enabled=dtype == torch.float16)
        if self.scaler.is_enabled():  # the scaler may skip the first steps
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)

    def _share(self, step: int) -> float:
        """Return the learning rate after ``step`` steps, as a fraction of the peak learning rate."""
        steps = self._progress.steps
        return cosine(step, max(1, round(self._options.warmup * steps)), steps, self._options.min_lr)

    def resume(self, start: int) -> None:
        """Set the current options in the optimizer again, because loading a state has replaced them."""
        if self._in_backward:
            step_in_backward(self.optimizer)
        self.scheduler.base_lrs = [group["lr"] for group in self._groups]
        for group, current in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["lr"] = current["lr"] * self._share(start)
            group["weight_decay"] = current["weight_decay"]

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss, and add them to the gradients of earlier batches."""
        self.scaler.scale(loss).backward()

    def step(self) -> tuple[float, Tensor | None]:
        """Update the parameters, and return the learning rate and the norm of the gradients before clipping.

        The norm is None if the optimizer steps in the backward, because the gradients are then freed one by one.
        """
        # Clipping needs the norm of the unscaled gradients, so the scale is removed first.
        self.scaler.unscale_(self.optimizer)
        norm = None if self._in_backward else clip_grad_norm_(self.trained, self._options.max_norm)
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return lr, norm


class Checkpoints:
    """The checkpoints of a run, which are written in the background, one at a time.

    Args:
        output: folder of the run.
        keep: number of checkpoints to keep.
        state: the positional arguments of `save_state`, starting with ``model``.
        settings: see `save_state`.
    """

    def __init__(self, output: Path, keep: int, state: Sequence[Any], settings: Mapping[str, Any]) -> None:
        self._output, self._keep, self._state, self._settings = output, keep, state, settings
        self._saving: Future[None] | None = None

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and raise an error if writing it has failed."""
        if self._saving is not None:
            self._saving.result()

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, after waiting for a checkpoint that is being written."""
        self.finish()
        return newest_checkpoint(self._output)

    def save(self, step: int) -> None:
        """Copy the state after ``step``, and start to write the copy."""
        options: dict[str, Any] = {"keep": self._keep, "settings": self._settings}
        self._saving = save_state(self._output, step, *self._state, background=True, **options)


def announce(
    options: TrainOptions, model: CausalLM, data: PackedDataset, step_plan: StepPlan, progress: Progress, start: int
) -> None:
    """Print a summary of the model, the data, the plan and the steps."""
    # Estimate the peak memory if the user has chosen a policy and the run is on a GPU. The summary compares the
    # estimate with the memory of the GPU.
    is_first_rank, peak = dist.get_rank() == 0, None
    can_estimate = step_plan.is_estimated and model.visual is None
    if step_plan.plan is None and can_estimate and model.device.type != "cpu":
        peak = estimate_step(options, model).peak(str(options.checkpointing), options.accumulate)
    ranks, steps, epochs = dist.get_world_size(), progress.steps, progress.epochs

    # Print lines on rank 0. Some lines need a computation on all ranks.
    say(*banner(model, options, ranks=ranks, memory=peak, start=start, steps=steps, epochs=epochs))
    if changes := changed_options(options, start):
        say(f"changed     {'; '.join(changes)}")
    if step_plan.lines:
        say(*step_plan.lines)
    if is_first_rank:
        say(f"data        {data.describe()}")
    if warning := warn_of_few_steps(options, steps, options.accumulate / len(data), ranks):
        say(warning)
    if OBJECTIVES[str(options.objective)].generates and (warning := check_turn_end(model)):
        say(warning)


def export(options: TrainOptions, model: CausalLM, objective: Objective, output: Path) -> None:
    """Write the adapters or, if there are none, the model, and print the commands that use the result."""
    folder = output / ("adapter" if options.lora_r else "model")
    if options.lora_r:
        save_adapter(model, folder, base=options.model)
    else:
        model.save_pretrained(folder, dtype=options.export_dtype)
    objective.export(model, folder)
    chat = bool(model.tokenizer.chat_template)
    adapters, generates = options.lora_r > 0, objective.generates
    say(*next_steps(output, model=options.model, adapters=adapters, chat=chat, generates=generates))


def computing_dtype(options: TrainOptions, device: torch.device) -> torch.dtype:
    """Return the dtype of the computation: bfloat16, or float16 if ``options.dtype`` says so or a GPU lacks bfloat16.

    Raises:
        ValueError: ``options.dtype`` is bfloat16, and a GPU lacks bfloat16.
    """
    has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if not has_bfloat16 and options.dtype == "bfloat16":
        raise ValueError(
            "train: dtype must be float16 or float32 on a GPU without bfloat16, got bfloat16. Use float16."
        )
    return torch.bfloat16 if has_bfloat16 and options.dtype != "float16" else torch.float16


def load_model(options: TrainOptions, device: torch.device, mesh: DeviceMesh, dtype: torch.dtype) -> CausalLM:
    """Load the model, with adapters if the options ask for them, and shard it. The model computes in ``dtype``."""

    def adapt_and_shard(model: CausalLM) -> CausalLM:
        if options.attention_dropout is not None:
            model.set_attention_dropout(options.attention_dropout)
        if options.gate_up_8bit:
            model.set_gate_up_8bit()

        # Add adapters, and quantize the weights under them unless the checkpoint's float8 weights are kept.
        if options.lora_r:
            model = add_adapters(model, options)
        if options.lora_4bit or options.lora_float8:
            quantize_base(model, dtype="nf4" if options.lora_4bit else "float8")

        # Shard the model. Tensor parallelism first shards the layers; then FSDP shards the part of each rank.
        if not needs_fsdp(options, dtype):
            start_kernels(options, model, device)
            return model
        from liger_models.parallel.context import apply_cp  # slow to import
        from liger_models.parallel.fsdp import apply_fsdp
        from liger_models.parallel.tensor import apply_tp

        if options.tensor_parallel > 1:
            model = apply_tp(model, mesh["shared"], sequence_parallel=True)
            return apply_fsdp(model, mesh["dp"], param_dtype=dtype)
        return apply_fsdp(apply_cp(model, mesh["shared"]), all_ranks(device), param_dtype=dtype)

    # Weights in float16 would lose small updates.
    loses_updates = options.lora_r == 0 and options.dtype == "float16"
    return load_by_name(
        options.model,
        dtype=torch.float32 if loses_updates else options.dtype,
        device=device,
        shard=adapt_and_shard,
        keep_quantized=options.lora_keep_quantized,
        head=OBJECTIVES[str(options.objective)].has_head,
    )


def start_kernels(options: TrainOptions, model: CausalLM, device: torch.device) -> None:
    """In text-only SFT, start to compile the kernels of the first step while the weights are being read."""
    if options.objective == "sft" and not options.compile and model.visual is None:
        model.set_checkpointing(options.checkpointing or "none")  # a later plan may have other policies
        compile_early(model, (options.batch_size, options.length), device)


def needs_fsdp(options: TrainOptions, dtype: torch.dtype) -> bool:
    """Return whether the run needs FSDP: to shard the weights, or to convert them to the ``dtype`` of the computation.

    On one device, a run whose weights already have this dtype does not need FSDP, because FSDP would only copy the
    weights.
    """
    is_quantized = any(getattr(options, name) for name in STORED)
    is_converted = not (options.dtype == "bfloat16" and dtype == torch.bfloat16)
    return dist.get_world_size() > 1 or (is_converted and not is_quantized)


def add_adapters(model: CausalLM, options: TrainOptions) -> CausalLM:
    """Add the LoRA adapters that ``options`` describe.

    Raises:
        ValueError: ``lora_tower`` is set but the model has no vision tower; see also `apply_lora`.
    """
    if options.lora_tower and model.visual is None:
        raise ValueError(
            f"train: lora_tower needs a model with a vision tower, got {type(model).__name__}. Leave it out."
        )
    # Without `lora_tower`, the layers of the vision tower get no adapters.
    targets: Sequence[str] | str = options.lora_targets or "all-linear"
    if model.visual is not None and not options.lora_tower:
        targets = language_targets(model, targets)
    alpha = 2 * options.lora_r if options.lora_alpha is None else options.lora_alpha
    settings: dict[str, Any] = {"r": options.lora_r, "lora_alpha": alpha, "lora_dropout": options.lora_dropout}
    if options.lora_experts:
        settings["target_parameters"] = EXPERTS
    return apply_lora(model, LoRAConfig(target_modules=targets, **settings))


def load_frozen(name: str, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """Load a frozen reference model or teacher, sharded over all ranks, in the dtype of the computation."""
    from liger_models.parallel.fsdp import apply_fsdp  # slow to import

    shard = partial(apply_fsdp, mesh=all_ranks(device), param_dtype=dtype)
    model = load_by_name(name, shard=shard, dtype=dtype, device=device)
    return model.requires_grad_(False).eval()


def bound_images(model: CausalLM, max_pixels: int | None) -> None:
    """Set the maximum number of pixels per image. None for ``max_pixels`` changes nothing.

    Raises:
        ValueError: the model's processor has no such limit, or its minimum number of pixels exceeds ``max_pixels``.
    """
    if max_pixels is None:
        return
    images: Any = model.processor.images if isinstance(model, VisionLanguageModel) else None
    if not hasattr(images, "max_pixels"):
        raise ValueError(
            f"train: max_pixels is a bound on images of Qwen-VL, got {type(model.config).__name__}. Leave it out."
        )
    if max_pixels < images.min_pixels:
        raise ValueError(
            f"train: max_pixels must be at least the checkpoint's min_pixels, {images.min_pixels}, got {max_pixels}. "
            "Raise it."
        )
    images.max_pixels = max_pixels


def freeze_images(model: CausalLM) -> None:
    """Freeze the parameters that only process images, such as the vision tower's parameters.

    In a run without images, these parameters would get gradients of zero if they were trained and sharded, and weight
    decay would shrink them.
    """
    unreached = [layer for layer in layers_of(model.layers) if layer.needs_images]
    for module in [*unreached, *([] if model.visual is None else [model.visual])]:
        module.requires_grad_(False)


def make_optimizer(model: CausalLM | LigerMTP, options: TrainOptions, plan: MemoryPlan | None) -> LigerAdamW:
    """Create the optimizer named in ``options``. A memory plan may keep the optimizer's moments in host memory."""
    decoder = model.model if isinstance(model, LigerMTP) else model
    rounding = options.dtype == "bfloat16"
    if options.optimizer == "muon":
        lr = options.lr if options.muon_lr is None else options.muon_lr
        return LigerMuon(decoder, lr, options.weight_decay, adamw_lr=options.lr, stochastic_rounding=rounding)
    return LigerAdamW(
        parameter_groups(model, options), lr=options.lr, betas=(0.9, 0.95), stochastic_rounding=rounding,
        state_dtype=torch.int8 if options.moments_8bit else None, offload=plan.moments(decoder) if plan else ()
    )  # fmt: skip


def parameter_groups(model: torch.nn.Module, options: TrainOptions) -> list[dict[str, Any]]:
    """Group the trained parameters: with weight decay, without weight decay, and (for LoRA+) the LoRA B matrices."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ratio = options.lora_plus_ratio
    raised = {name: parameter for name, parameter in trained.items() if ratio and name.endswith("lora_B")}
    others = {name: parameter for name, parameter in trained.items() if name not in raised}
    decayed, undecayed = split_by_decay(others)
    settings: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    groups = [{**settings, "params": decayed}, {**settings, "params": undecayed, "weight_decay": 0.0}]
    if ratio is not None:
        groups.append({**settings, "params": [*raised.values()], "lr": options.lr * ratio})
    return groups


def check_groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless each trained parameter is in one optimizer group and each frozen parameter is in none."""
    counts = Counter(parameter for group in optimizer.param_groups for parameter in group["params"])
    wrong = [name for name, parameter in model.named_parameters() if counts[parameter] != parameter.requires_grad]
    if wrong:
        raise ValueError(
            "train: each trained parameter must be in one group of the optimizer, and no other parameter, got "
            f"{', '.join(wrong[:3])}{', ...' * (len(wrong) > 3)}. Correct make_optimizer."
        )


@torch.no_grad()
def evaluate(model: CausalLM, data: PackedDataset, device: torch.device, objective: Objective) -> dict[str, float]:
    """Compute metrics such as ``eval_loss`` over all batches on all ranks. Auxiliary losses are not included."""
    # Dropout is off. The data have the same order as in epoch 0.
    model.eval()
    data.set_epoch(0)
    total = Metrics()
    for batch in data:
        add_metrics(total, objective.evaluate(model, to_device(objective.batch(model, batch), device, model)))
    add_metrics(total, objective.finish_evaluation(device))
    reshard(model)
    model.train()
    return mean_metrics(total, "eval_")


def endless(loader: PackedLoader) -> Iterator[Batch]:
    """Yield the batches of one epoch after another, without end."""
    while True:
        yield from loader


def to_device(batch: Batch, device: torch.device, model: CausalLM) -> Batch:
    """Copy a batch to the device asynchronously.

    Raises:
        ValueError: a token id is not in the model's vocabulary.
    """
    vocab_size, largest = model.embed_tokens.num_embeddings, int(batch["input_ids"].max())
    if largest >= vocab_size:
        raise ValueError(
            f"train: token ids must be less than the model's vocab_size ({vocab_size}), got {largest}. Were tokens "
            "added to the tokenizer, but not to the embedding?"
        )
    # The layout of documents that continue others is computed on the host.
    kept = ("cu_seqlens", "parents") if "parents" in batch else ()
    return {name: tensor if name in kept else on_device(tensor, device) for name, tensor in batch.items()}


def cosine(step: int, warmup: int, steps: int, floor: float) -> float:
    """Return a step's learning rate as a fraction of the peak: a linear warm-up to 1, then a cosine to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def main(arguments: Sequence[str] | None = None, command: str | None = None, *, standalone: bool = True) -> None:
    """Read the options and train. The process exits with 130 or 143 if SIGINT or SIGTERM has stopped the run.

    Args:
        arguments: the arguments. Default: the arguments of the process.
        command: name of the command in messages. Default: the name of the process.
        standalone: whether an error with a self-explanatory message ends the process with exit code 1 after
            printing the message in one line. If False, the error is raised.
    """
    options = read_options(TrainOptions, arguments, command, positionals=("model", "data"))
    try:
        train(options, restarts=arguments is None)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        lost = any(words in str(error) for words in LOST_RANK)
        if lost and arguments is None:  # the lost process may restart itself and this process
            time.sleep(PATIENCE)
        if not standalone or (isinstance(error, RuntimeError) and not lost):  # a PyTorch error needs its traceback
            raise
        message = f"another process of the run has ended. Look for its error. ({error})" if lost else str(error)
        sys.exit(printable(f"error on rank {os.environ.get('RANK', 0)}: {message}"))


if __name__ == "__main__":
    main()
