"""What a training run reports: its log, tokens per second, and the share of the device's peak."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.tqdm import tqdm

from liger_models.convert.ranks import this_rank, world_size
from liger_models.data import Batch
from liger_models.layers.attention import LigerAttention
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.moe import LigerMoE

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12, "MI300X": 1307e12}
"""Dense bf16, by the vendors' datasheets: the divisors of MFU, found by a part of the device's name."""


def flops(model: CausalLM, batches: Sequence[Batch]) -> float:
    """Floating-point operations of this rank for a forward and backward: matrix products, attention within documents.

    Per token and element of a weight 2 in the forward, 2 for the gradient of its input where anything before it is
    trained, and 2 for its own if it is. What is computed again in the backward is not counted; of experts only those
    that a token passes through are, and of the head only tokens that are to be predicted.

    Args:
        model: sharded or not; ranks that share a batch (`apply_tp`, `apply_cp`) have equal parts.
        batches: of `PackedDataset`, on the CPU: their bounds are read.
    """
    sharing = model.ranks or model.context_ranks
    share_of_rank = 1 if sharing is None else 1 / sharing.size
    tokens = sum(batch["input_ids"].numel() for batch in batches) * share_of_rank
    targets = sum(int((batch.get("labels", batch["input_ids"]) != -100).sum()) for batch in batches) * share_of_rank
    lengths = torch.cat([batch["cu_seqlens"].diff() for batch in batches]).double()
    rows = dict.fromkeys(model.layers.modules(), tokens) | dict.fromkeys(model.lm_head.modules(), targets)
    total, before = 0.0, False
    for module in model.modules():  # in the order in which they compute
        if isinstance(module, LigerAttention):
            seen = (
                lengths if module.window is None else lengths.clamp(max=module.window)
            )  # from there on each token sees as many
            pairs = (seen * seen / 2 + (lengths - seen) * seen).sum().item()
            inside = (each for name, each in module.named_parameters() if not name.startswith("o_proj"))
            backward = before or any(each.requires_grad for each in inside)
            total += (12.0 if backward else 4.0) * module.num_heads * module.head_dim * pairs
        share = module.top_k / len(module.down_weight) if isinstance(module, LigerMoE) else 1.0
        for each in module.parameters(recurse=False):
            if module in rows and each.dim() > 1:
                total += (2.0 + 2.0 * before + 2.0 * each.requires_grad) * share * each.numel() * rows[module]
            before = before or each.requires_grad
    return total


class Log:
    """The progress bar, log.jsonl and TensorBoard, all on the first rank; tokens and time between lines.

    Args:
        folder: of log.jsonl; lines of steps that are made again are removed from it.
        start: number of steps that are done.
        steps: of the run.
        tensorboard: write ``folder/tensorboard``.
        device: whose memory and peak are shown.
        ranks: number of them that have batches of their own; None for all.
    """

    def __init__(
        self, folder: Path, start: int, steps: int, tensorboard: bool, device: torch.device, ranks: int | None = None
    ) -> None:
        self.first, self.device, self.file = this_rank() == 0, device, folder / "log.jsonl"
        self.ranks = world_size() if ranks is None else ranks
        self.writer: Any = None
        self.bar: Any = tqdm(total=steps, initial=start, unit="step", disable=not self.first)
        name = torch.get_device_module(device).get_device_name() if device.type != "cpu" else ""
        self.peak = next((value for part, value in PEAK_FLOPS.items() if part in name), None)
        if self.first:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self.file.read_text().splitlines(keepends=True) if self.file.is_file() else []
            whole = [line for line in lines if line.endswith("\n")]  # the last one may have been cut by a kill
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text("".join(line for line in whole if json.loads(line)["step"] <= start))
            temporary.replace(self.file)
            if tensorboard:
                self.writer = _tensorboard(folder / "tensorboard", start + 1)
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self.since, self.tokens, self.operations = time.perf_counter(), 0, 0.0

    def count(self, batches: Sequence[Batch], operations: float) -> None:
        """Add what a step of this rank computes."""
        self.tokens += sum(batch["input_ids"].numel() for batch in batches)
        self.operations += operations

    def rates(self) -> dict[str, float]:
        """Tokens per second of all ranks together, share of the peak, and GiB of memory of this rank."""
        if not self.tokens:
            return {}
        seconds = time.perf_counter() - self.since
        found = {"tokens_per_s": self.tokens * self.ranks / seconds}
        if self.peak is not None:
            found["mfu"] = self.operations / seconds / self.peak
        if self.device.type != "cpu":
            found["memory_gib"] = torch.accelerator.max_memory_allocated() / 2**30
        self.restart()
        return found

    def write(self, step: int, **values: float) -> None:
        """A line of the log."""
        if self.first:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            self.bar.set_postfix_str(", ".join(f"{name} {value:.4g}" for name, value in values.items()))
            for name, value in values.items() if self.writer is not None else ():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the bar and TensorBoard's file."""
        self.bar.close()
        if self.writer is not None:
            self.writer.close()


def _tensorboard(folder: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "Log: tensorboard=True needs TensorBoard, got no such package. pip install 'liger_models[tensorboard]', "
            "or leave it out: log.jsonl has the same numbers."
        ) from error
    return SummaryWriter(folder, purge_step=start)
