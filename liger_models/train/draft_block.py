"""The multi-token prediction block in a training run: training it with the model, and measuring its drafts."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from liger_models.adapters.mtp import LigerMTP
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import format_of
from liger_models.data.batch import Batch
from liger_models.generation.eval_mode import evaluating
from liger_models.parallel.gathered import unsharded
from liger_models.train.objectives import INPUTS
from liger_models.train.report import say

MEASURED_BATCHES, MEASURED_SAMPLES = 8, 512
"""The number of batches on which drafts are compared, and the number of training samples for these batches.

Drafts are compared with the model's own predictions. Training samples are used if there is no evaluation data.
"""


def make_block(model: CausalLM, weight: float | None, *, detached: bool, sharded: bool) -> LigerMTP | None:
    """Create the model's multi-token prediction block. Returns None if ``weight`` is None.

    Args:
        model: the model, whose weights are loaded.
        weight: the option ``mtp_weight``.
        detached: whether the block's loss trains only the block, and not the model.
        sharded: whether FSDP or other kinds of parallelism shard the model.

    Raises:
        ValueError: the model is sharded, or its family has no multi-token prediction block.
    """
    if weight is None:
        return None
    if sharded:
        raise ValueError(
            "train: mtp_weight needs a single process and dtype=bfloat16, because the multi-token prediction block "
            "can't be sharded, got a model that FSDP shards. Set dtype=bfloat16 on one GPU, or leave mtp_weight out."
        )
    block = LigerMTP(model, loss_weight=weight, detached=detached)
    if not weight:
        for parameter in block.own_parameters().values():
            parameter.requires_grad_(False)
    return block


class DraftAcceptance:
    """Measures which share of the multi-token prediction block's drafts (proposed tokens) the model accepts.

    Args:
        model: the model, sharded by FSDP or not.
        block: the block, if the run trains it. None if the run only keeps the block's tensors from the checkpoint.
        batches: the batches on which this rank measures. They must be on the model's device.
    """

    def __init__(self, model: CausalLM, block: LigerMTP | None, batches: Sequence[Batch]) -> None:
        self._model, self._block = model, block
        self._batches = [{name: value for name, value in batch.items() if name in INPUTS} for batch in batches]

    @torch.no_grad()
    def measure(self) -> float | None:
        """Return the share of drafts that the model accepts. Every rank must call this method.

        Only rank 0 holds the block's tensors from the checkpoint, so the result is None on all other ranks. If
        `LigerMTP` does not support the model or the tensors of the block, rank 0 prints the reason and also returns
        None.
        """
        counts = torch.zeros(2, dtype=torch.int64, device=self._model.device)
        with unsharded(self._model) as model:
            if dist.get_rank() != 0:
                return None
            before = model.trained_tensors
            try:
                block = self._block or LigerMTP(model)
                with evaluating(list(block.modules())):
                    for batch in self._batches:
                        counts += block.acceptance(**batch)
            except ValueError as error:
                say(f"drafts      not measured: {error}")
                return None
            finally:
                model.trained_tensors = before
        accepted, total = counts.tolist()
        return float(accepted / max(total, 1))


def has_block(model: CausalLM) -> bool:
    """Return whether the model's checkpoint has a multi-token prediction block. Every rank must call this function."""
    mtp_format = format_of(type(model)).mtp
    if mtp_format is None:
        return False
    prefix = mtp_format(model.config).prefix
    found: list[Any] = [any(name.startswith(prefix) for name in model.kept_tensors)]
    dist.broadcast_object_list(found, 0)
    return bool(found[0])


def first_batches(data: Any) -> list[Any]:
    """Return the first `MEASURED_BATCHES` batches of epoch 0 of a data set."""
    data.set_epoch(0)
    return list(itertools.islice(data, MEASURED_BATCHES))


def lag_line(trained: bool, before: float, after: float) -> str:
    """Return a line for the screen that states the shares of accepted drafts before and after training."""
    line = f"drafts      the model accepts {after:.1%} of the block's first drafts, and before training {before:.1%}"
    if trained:
        return f"{line}."
    return (
        f"{line}. The multi-token prediction block was kept and not trained, so its drafts lag behind the model. "
        "Train it: --mtp-weight 0.1."
    )
