"""The log of a training run, with tokens per second and the fraction of the device's peak FLOPS (MFU)."""

import importlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.tqdm import tqdm
from torch import Tensor, nn

from liger_models.convert.folder import reporting
from liger_models.data.batch import Batch
from liger_models.distributed.ranks import rank, world_size
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import own_parameters
from liger_models.layers.layer import AttentionSpec, layers_of
from liger_models.train.report import Lines, say

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12, "MI300X": 1307e12}
"""Maps a part of a device's name to the peak dense bf16 FLOPS in its datasheet. MFU is a fraction of this peak."""

REPORTERS = {"tensorboard": ("TensorBoard", "torch.utils.tensorboard"), "wandb": ("Weights & Biases", "wandb")}
"""Maps a value of ``report_to`` to a product's name, and to the name of the module that writes logs for the product."""


def flops(model: Decoder, batches: Sequence[Batch]) -> float:
    """Count the floating-point operations that this rank performs in a forward and backward.

    The count includes matrix products and all kinds of attention. In the forward, each element of a weight counts as 2
    operations per token. In the backward, each element counts as 2 operations per token for the gradient of the weight,
    if the weight is trained. It counts as 2 more operations for the gradient of the input, if anything before the layer
    is trained. The count includes neither recomputation nor vision towers. Experts count only for the tokens that are
    routed to them, and the head counts only for tokens with a target.

    Args:
        model: the model, sharded or not. If ranks share a batch (`apply_tp`, `apply_cp`), each of them is assumed to
            do an equal share of the work.
        batches: batches of a `PackedDataset`. They must be on the CPU, because this function reads their
            ``cu_seqlens`` and ``parents``.
    """
    # Tokens and targets of this rank, and the lengths of all documents.
    sharing = model.groups.sharded
    share_of_rank = 1 if sharing is None else 1 / sharing.size
    all_tokens = sum(batch["input_ids"].numel() for batch in batches)
    tokens = all_tokens * share_of_rank
    targets = sum(int((batch.get("labels", batch["input_ids"]) != -100).sum()) for batch in batches) * share_of_rank
    lengths, before_lengths = (torch.cat(parts).double() for parts in zip(*map(_lengths, batches), strict=True))

    # `rows` maps each module to the number of rows in its matrix products. The other dicts map each layer to its
    # attention, to the operations per token of its other parts, and to its share of active weights.
    rows = dict.fromkeys(model.layers.modules(), tokens) | dict.fromkeys(model.lm_head.modules(), targets)
    attention: dict[nn.Module, AttentionSpec | None] = {layer: layer.attention for layer in layers_of(model.layers)}
    token_work: dict[nn.Module, float] = {layer: layer.token_flops for layer in layers_of(model.layers)}
    active: dict[nn.Module, float] = {layer: layer.active_share for layer in layers_of(model)}

    # Modules in the order in which they run: a gradient reaches a module's input if anything before it is trained.
    total, before = 0.0, False
    for module in model.modules():
        spec, work = attention.get(module), token_work.get(module, 0) * all_tokens
        if spec is not None:
            pairs = spec.pairs(before_lengths + lengths) - spec.pairs(before_lengths)
            work += spec.pair_flops * pairs.sum().item()
        if work:  # the output projection comes after attention
            inputs = (
                weight for name, weight in module.named_parameters() if not name.startswith(("o_proj", "out_proj"))
            )
            backward = before or any(weight.requires_grad for weight in inputs)
            total += (3.0 if backward else 1.0) * work

        # Matrix products with the module's own weights.
        for weight, size in own_parameters(module).items():
            if module in rows and weight.dim() > 1:
                products = 2.0 + 2.0 * before + 2.0 * weight.requires_grad
                total += products * active.get(module, 1.0) * size * rows[module]
            before = before or weight.requires_grad
    return total


def _lengths(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the lengths of a batch's documents, and the lengths of the documents that they continue, both [n]."""
    lengths = batch["cu_seqlens"].diff()
    parents = batch.get("parents", torch.full_like(lengths, -1))
    return lengths, lengths[parents].masked_fill(parents < 0, 0)


class Log:
    """The log on the screen, in log.jsonl, in TensorBoard and in W&B. Counts tokens and measures time for each line.

    Only rank 0 writes the log.

    Args:
        folder: folder of log.jsonl. Lines for steps after ``start`` are removed, because those steps run again.
        start: number of finished steps.
        steps: total number of steps of the run.
        device: the device whose memory and MFU are reported.
        ranks: number of ranks with different batches. Default: all ranks.
        report_to: "tensorboard" also writes ``folder/tensorboard``. "wandb" also writes a run of Weights & Biases, with
            its files in ``folder/wandb`` and its id in ``folder/wandb.id``. A resumed run keeps its id.
        options: the options of the run, for W&B.

    Raises:
        ImportError: a package that ``report_to`` names is not installed.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        steps: int,
        device: torch.device,
        ranks: int | None = None,
        *,
        report_to: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.first, self.device, self.file = rank() == 0, device, folder / "log.jsonl"
        self.ranks = world_size() if ranks is None else ranks
        self.lines = Lines(start, steps)
        self.writers: list[_TensorBoard | _WandB] = []
        # With None, tqdm shows the bar on a terminal only. In a file, the bar would write a line for every step.
        self.bar: Any = tqdm(total=steps, initial=start, unit="step", disable=None if self.first else True, leave=False)
        name = torch.get_device_module(device).get_device_name() if device.type != "cpu" else ""
        self.peak = next((value for part, value in PEAK_FLOPS.items() if part in name), None)

        # Remove the lines for steps that run again, and append new lines to the file.
        if self.first:
            folder.mkdir(parents=True, exist_ok=True)
            # A run that starts from the beginning also writes its line for step 0 again.
            lines = self.file.read_bytes().splitlines(keepends=True) if start and self.file.is_file() else []
            temporary = self.file.with_suffix(".tmp")
            with reporting(self.file):
                temporary.write_bytes(b"".join(line for line in lines if _step(line) <= start))
                temporary.replace(self.file)
            if "tensorboard" in report_to:
                self.writers.append(_TensorBoard(folder / "tensorboard", start + 1))
            if "wandb" in report_to:
                self.writers.append(_WandB(folder, options))
        self.restart()

    def restart(self) -> None:
        """Reset the counts of tokens, operations and time to 0."""
        self.since, self.tokens, self.operations = time.perf_counter(), 0, 0.0

    def count(self, batches: Sequence[Batch], operations: float) -> None:
        """Add the tokens and the operations of this rank's part of a step to the counts."""
        self.tokens += sum(batch["input_ids"].numel() for batch in batches)
        self.operations += operations

    def rates(self) -> dict[str, float]:
        """Return tokens/s on all ranks, and this rank's MFU and peak GiB, since the last `restart`. Then restart."""
        # If no step has run since `restart`, as after an evaluation, there are no rates.
        if not self.tokens:
            return {}
        seconds = time.perf_counter() - self.since
        rates = {"tokens_per_s": self.tokens * self.ranks / seconds}
        if self.peak is not None:
            rates["mfu"] = self.operations / seconds / self.peak
        if self.device.type != "cpu":
            rates["memory_gib"] = torch.accelerator.max_memory_allocated() / 2**30
        self.restart()
        return rates

    def write(self, step: int, *, epochs: float | None = None, **values: float | str) -> None:
        """Write a line of the log.

        Args:
            step: number of the step.
            epochs: passes through the data so far, including fractions. The screen shows this number in place of the
                integer ``epoch`` in ``values``.
            values: the values to log, by name.
        """
        if self.first:
            with reporting(self.file), self.file.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            say(*self.lines.make(step, values if epochs is None else {**values, "epoch": epochs}))
            for writer in self.writers:
                writer.write(step, values)

    def close(self) -> None:
        """Close the progress bar, TensorBoard's file and the run of W&B."""
        self.bar.close()
        for writer in self.writers:
            writer.close()


class _TensorBoard:
    """Writes a TensorBoard file. Old values for steps from ``start`` on are hidden, because these steps run again."""

    def __init__(self, folder: Path, start: int) -> None:
        self._writer: Any = reporter("tensorboard").SummaryWriter(folder, purge_step=start)

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Writes to a run of Weights & Biases. Environment variables ``WANDB_...`` set its mode, project and entity."""

    def __init__(self, folder: Path, options: Mapping[str, Any] | None) -> None:
        wandb = reporter("wandb")
        # A resumed run continues the run whose id is in the file.
        file = folder / "wandb.id"
        run_id = file.read_text().strip() if file.is_file() else None
        config = None if options is None else {**options}
        self._run = wandb.init(dir=str(folder), name=folder.name, id=run_id, resume="allow", config=config)
        file.write_text(f"{self._run.id}\n")

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _step(line: bytes) -> float:
    """Return the step of a line of log.jsonl; infinity if the line is incomplete because the run was killed."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (KeyError, TypeError, ValueError):
        return math.inf


def reporter(name: str) -> Any:
    """Import the package for a value of ``report_to``. Raises ImportError if the package is not installed."""
    product, module = REPORTERS[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"Log: report_to={name} needs {product}, got no such package. Run: pip install 'liger_models[{name}]', or "
            "leave it out: log.jsonl has the same numbers."
        ) from error
