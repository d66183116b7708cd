"""Training objectives: how each reads its data, and how it computes the loss of a batch; the loop is the same."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from liger_models.adapters.lora import without_adapters
from liger_models.base.causal_lm import CausalLM
from liger_models.base.images import settings_of
from liger_models.base.processor import Processor
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.data.answers import AnswerDataset
from liger_models.data.batch import Batch
from liger_models.data.dataset import PackedDataset
from liger_models.data.formats import DOCUMENTS
from liger_models.generation.options import PromptInputs
from liger_models.losses.cosine import LigerFusedLinearCosineSimilarityLoss
from liger_models.losses.cpo import LigerFusedLinearCPOLoss
from liger_models.losses.dpo import LigerFusedLinearDPOLoss
from liger_models.losses.jsd import LigerFusedLinearJSDLoss
from liger_models.losses.kl import LigerFusedLinearForwardKLLoss, LigerFusedLinearReverseKLLoss
from liger_models.losses.kto import LigerFusedLinearKTOLoss
from liger_models.losses.orpo import LigerFusedLinearORPOLoss
from liger_models.losses.simpo import LigerFusedLinearSimPOLoss
from liger_models.losses.tvd import LigerFusedLinearTVDLoss
from liger_models.parallel.checksum import weight_checksum
from liger_models.parallel.fsdp import reshard
from liger_models.parallel.step import mean_over_ranks, targets_per_rank
from liger_models.text.tokenizer import Tokenizer

Metrics: TypeAlias = dict[str, Tensor]
"""Name -> [2], a sum on this rank and the number of what was added; a metric is the quotient of both over all ranks."""
Load = Callable[[str], CausalLM]
"""Loads a frozen model by its folder or name, sharded as the trained one is."""
DIVERGENCES: dict[str, type[Any]] = {
    "jsd": LigerFusedLinearJSDLoss,
    "forward_kl": LigerFusedLinearForwardKLLoss,
    "reverse_kl": LigerFusedLinearReverseKLLoss,
    "tvd": LigerFusedLinearTVDLoss,
    "cosine": LigerFusedLinearCosineSimilarityLoss,
}


def reader_of(model: CausalLM) -> Tokenizer | Processor:
    """What reads the data: the processor of a model with images whose checkpoint has its settings, or the tokenizer."""
    if isinstance(model, VisionLanguageModel) and settings_of(model.assets, "image_processor"):
        processor: Processor = model.processor
        return processor
    return model.tokenizer


class Reference:
    """The reference model: a frozen one, or with adapters the model without them, if ``name`` is None.

    Args:
        options: all options of the run.
        name: folder or name of the reference model; None for the model that is trained, as it was.
    """

    def __init__(self, options: Any, name: str | None) -> None:
        self.name = name or options.model
        self.by_adapters = options.lora_r > 0 and self.name == options.model
        self.model: CausalLM | None = None

    def prepare(self, load: Load) -> None:
        """Load the model, if there must be one."""
        if not self.by_adapters:
            self.model = load(self.name)

    def frozen_models(self) -> dict[str, str]:
        """See `Objective.frozen_models`."""
        if self.model is not None:
            return {"reference model": weight_checksum(self.model.named_parameters())}
        return {"reference model": "the model without adapters"} if self.by_adapters else {}

    @torch.no_grad()
    def __call__(self, model: CausalLM, run: Callable[[CausalLM], Tensor]) -> Tensor:
        """The result of ``run`` for the reference of ``model``."""
        with without_adapters(model) if self.by_adapters else nullcontext():
            log_probs = run(self.model or model)
        reshard(self.model or model)
        return log_probs


INPUTS = frozenset({"input_ids", "labels", "cu_seqlens", *PromptInputs.__annotations__})
"""The parts of a batch that a model's forward takes."""


class Objective:
    """Learning texts: the mean cross entropy of all tokens that have a label.

    Args:
        options: all options of the run.
        **settings: the objective's options that are not None.

    Raises:
        ValueError: an option is out of range.
    """

    formats: tuple[str, ...] = DOCUMENTS
    """Formats that examples may have."""
    shares_rows = True
    """Whether ranks may share a row (tensor and context parallelism)."""
    repeats = 1
    """Number of steps on the same batches."""
    compares = False
    """Whether examples are answers to compare, which are not packed into rows."""

    def __init__(self, options: Any, **settings: Any) -> None:
        self.accumulate = options.accumulate

    def prepare(self, model: CausalLM, load: Load) -> None:
        """Load what is needed besides the model."""

    def frozen_models(self) -> dict[str, str]:
        """What the loss needs besides the model -> a checksum of its weights. Every rank must call it."""
        return {}

    def dataset(self, source: Any, model: CausalLM, *, overflow: str | None, **options: Any) -> PackedDataset:
        """The data of the run. Every rank must call it."""
        return PackedDataset(source, reader_of(model), overflow=overflow or "split", formats=self.formats, **options)

    def eval_dataset(self, source: Any, model: CausalLM, **options: Any) -> PackedDataset:
        """The data of the evaluations. Every rank must call it."""
        return self.dataset(source, model, shuffle=False, **options)

    def batch(self, model: CausalLM, batch: Any) -> Batch:
        """The batch to train on, from a batch of the data. Every rank must call it."""
        return batch  # type: ignore[no-any-return]

    def num_items(self, batches: list[Batch]) -> Tensor | None:
        """The divisor of the losses of a step's batches, from all of these batches."""
        return targets_per_rank(batches)

    def loss(self, model: CausalLM, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, Metrics]:
        """The share of a batch in the loss of a step, and metrics."""
        return model(**batch, num_items_in_batch=num_items).loss, {}

    def evaluate(self, model: CausalLM, batch: Batch) -> Metrics:
        """The metrics of a batch, with its "loss" among them, without gradients or auxiliary losses."""
        out = model(**batch, num_items_in_batch=1)  # the sum of the losses
        loss = out.loss - (0 if out.aux_loss is None else out.aux_loss)
        return {"loss": pair(loss, (batch["labels"] != -100).sum())}


class PretrainObjective(Objective):
    """Learning texts or token ids; chats and other formats are refused, so that none is trained on by mistake."""

    formats = ("text", "input_ids")


class Compared(Objective):
    """A loss of whole answers, in a batch of them, computed by one of `liger_models.losses`."""

    formats = ("preference",)
    shares_rows, compares = False, True
    make: Callable[..., Any]
    """The class of the loss."""
    needs_reference = False
    rows_of_example = 2

    def __init__(self, options: Any, **settings: Any) -> None:
        super().__init__(options)
        self.reference = Reference(options, settings.pop("ref_model", None))
        self.settings = self._settings(settings)
        self.function = type(self).make(**self.settings)  # refuses options before a model is loaded

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the loss."""
        return options

    def prepare(self, model: CausalLM, load: Load) -> None:
        """See `Objective.prepare`."""
        head = {"softcap": model.lm_head.softcap, "logit_scale": model.lm_head.logit_scale}
        self.function = type(self).make(**self.settings, **head)
        if self.needs_reference:
            self.reference.prepare(load)

    def frozen_models(self) -> dict[str, str]:
        """See `Objective.frozen_models`."""
        return self.reference.frozen_models() if self.needs_reference else {}

    def dataset(self, source: Any, model: CausalLM, *, overflow: str | None, **options: Any) -> PackedDataset:
        """See `Objective.dataset`."""
        return AnswerDataset(source, reader_of(model), formats=self.formats, **options)

    def eval_dataset(self, source: Any, model: CausalLM, **options: Any) -> PackedDataset:
        """See `Objective.eval_dataset`. Each pair counts once; labeled answers need others in their batch."""
        return super().eval_dataset(source, model, complete=self.formats != ("preference",), **options)

    def num_items(self, batches: list[Batch]) -> Tensor | None:
        """None: each batch has the same number of examples."""
        return None

    def loss(self, model: CausalLM, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, Metrics]:
        """See `Objective.loss`."""
        out, metrics = self._run(model, batch)
        loss = out.loss[0] if out.aux_loss is None else out.loss[0] + out.aux_loss
        return loss / self.accumulate, metrics

    def evaluate(self, model: CausalLM, batch: Batch) -> Metrics:
        """See `Objective.evaluate`."""
        out, metrics = self._run(model, batch)
        number = self._counted(batch).sum()
        return {"loss": pair(out.loss[0] * number, number), **metrics}

    def _run(self, model: CausalLM, batch: Batch) -> tuple[Any, Metrics]:
        """The output of the model, whose loss is the loss and its metrics, and the metrics."""
        reference = {"ref_log_probs": self.reference(model, _log_probs(batch))} if self.needs_reference else {}
        # The loss runs inside the head, where FSDP has gathered its weight.
        out = model(**batch, loss_function=lambda x, weight, target: self.function(weight, x, target, **reference))
        values = out.loss[1]
        means = {
            "rewards/chosen": values.chosen_rewards,
            "rewards/rejected": values.rejected_rewards,
            "rewards/accuracies": values.accuracies,
            "logps/chosen": values.chosen_logps,
            "logps/rejected": values.rejected_logps,
        }
        if self.function.compute_nll_loss:
            means["nll_loss"] = values.nll_loss
        odds = ("log_odds_ratio", "log_odds_chosen")
        means |= {name: getattr(values, name) for name in odds if hasattr(values, name)}
        counted = self._counted(batch)
        return out, {name: pair((mean * counted).float().sum(), counted.sum()) for name, mean in means.items()}

    def _counted(self, batch: Batch) -> Tensor:
        """Which examples of a batch count in metrics: those with labels, [examples] bool."""
        return (batch["labels"] != -100).any(1).view(-1, len(batch["labels"]) // self.rows_of_example).any(0)


class DPOObjective(Compared):
    """Direct preference optimization."""

    make, needs_reference = LigerFusedLinearDPOLoss, True


class ORPOObjective(Compared):
    """Odds-ratio preference optimization."""

    make = LigerFusedLinearORPOLoss


class CPOObjective(Compared):
    """Contrastive preference optimization."""

    make: Callable[..., Any] = LigerFusedLinearCPOLoss
    alpha = 1.0

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        alpha = options.pop("cpo_alpha", self.alpha)
        names = {"simpo_gamma": "gamma"}
        settings = {names.get(name, name): value for name, value in options.items()}
        return {**settings, "alpha": alpha or 1.0, "compute_nll_loss": alpha != 0}


class SimPOObjective(CPOObjective):
    """SimPO: `CPOObjective` of mean log-probabilities with a margin, and by default without NLL."""

    make = LigerFusedLinearSimPOLoss
    alpha = 0.0


class KTOObjective(Compared):
    """Kahneman-Tversky optimization."""

    formats = ("kto",)
    make, needs_reference, rows_of_example = LigerFusedLinearKTOLoss, True, 1

    def __init__(self, options: Any, **settings: Any) -> None:
        if options.batch_size < 2:
            raise ValueError(
                "TrainOptions: batch_size must be at least 2 with objective kto, which compares the answers of a "
                f"batch, got {options.batch_size}."
            )
        super().__init__(options, **settings)

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "use_ref_model": True}

    def _run(self, model: CausalLM, batch: Batch) -> tuple[Any, Metrics]:
        answers = {name: tensor for name, tensor in batch.items() if name in INPUTS}
        unrelated = {name: batch.get(f"kl_{name}", tensor) for name, tensor in answers.items()}  # pixels are the same
        good = batch["preference_labels"]
        with torch.no_grad():
            moved = _log_probs(unrelated)(model).sum(-1)
            reshard(model)
            moved = moved - self.reference(model, _log_probs(unrelated)).sum(-1)
            z = mean_over_ranks(moved.mean()).clamp(min=0)
        log_probs = self.reference(model, _log_probs(answers))
        out = model(
            **answers,
            loss_function=lambda x, weight, target: self.function(
                x, weight, target, preference_labels=good, kl=z, ref_log_probs=log_probs
            ),
        )
        sums, goods, bads = out.loss[1], good.sum(), (~good).sum()
        return out, {
            "rewards/chosen": pair(sums.chosen_rewards_sum, goods),
            "rewards/rejected": pair(sums.rejected_rewards_sum, bads),
            "logps/chosen": pair(sums.chosen_logps_sum, goods),
            "logps/rejected": pair(sums.rejected_logps_sum, bads),
            "kl": pair(z, 1),
        }


class DistillObjective(Objective):
    """Learning the distributions of a larger model's tokens beside the tokens themselves."""

    shares_rows = False

    def __init__(self, options: Any, **settings: Any) -> None:
        super().__init__(options)
        if "teacher" not in settings:
            raise ValueError("TrainOptions: objective distill needs a teacher, got none. Name a model.")
        self.teacher_name, divergence = settings.pop("teacher"), settings.pop("divergence", "jsd")
        if divergence not in DIVERGENCES:
            raise ValueError(f"TrainOptions: divergence must be one of {', '.join(DIVERGENCES)}, got {divergence!r}.")
        self.make = DIVERGENCES[divergence]
        self.settings = {**settings, "return_soft_hard_loss": True}
        self.function = self.make(**self.settings)

    def prepare(self, model: CausalLM, load: Load) -> None:
        """See `Objective.prepare`."""
        self.teacher = load(self.teacher_name)
        ours, theirs = model.config.vocab_size, self.teacher.config.vocab_size
        if ours != theirs:
            raise ValueError(
                f"train: the teacher must have the model's vocabulary, got vocab_size {theirs} instead of {ours}. "
                "Choose a teacher of the same family, or resize the embeddings of one of them."
            )
        heads = ("", model.lm_head), ("teacher_", self.teacher.lm_head)
        scales = {
            f"{prefix}{name}": getattr(head, name) for prefix, head in heads for name in ("softcap", "logit_scale")
        }
        self.function = self.make(**self.settings, **scales)

    def frozen_models(self) -> dict[str, str]:
        """See `Objective.frozen_models`."""
        return {"teacher": weight_checksum(self.teacher.named_parameters())}

    def loss(self, model: CausalLM, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, Metrics]:
        """See `Objective.loss`."""
        out, metrics = self._run(model, batch)
        (loss, _, _), count = out.loss
        loss = loss if out.aux_loss is None else loss + out.aux_loss
        return loss * (count / num_items), {name: metrics[name] for name in ("soft_loss", "hard_loss")}

    def evaluate(self, model: CausalLM, batch: Batch) -> Metrics:
        """See `Objective.evaluate`."""
        return self._run(model, batch)[1]

    def _run(self, model: CausalLM, batch: Batch) -> tuple[Any, Metrics]:
        """The output of the model, whose loss is the mean losses and the number of targets, and the metrics."""
        with torch.no_grad():
            hidden, head, _ = self.teacher(**batch, loss_function=lambda *inputs: inputs).loss

        def compare(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Any, Tensor]:
            # Quantized weights are not sharded on one GPU; adapters then compute in float32, unlike the teacher.
            return self.function(x, weight, hidden.to(x.dtype), head.to(x.dtype), target), (target != -100).sum()

        # Without a backward the teacher's head stays gathered, so the student's loss can use it.
        out = model(**batch, loss_function=compare)
        reshard(self.teacher)
        losses, count = out.loss
        names = "loss", "soft_loss", "hard_loss"
        return out, {name: pair(loss * count, count) for name, loss in zip(names, losses, strict=True)}


def _log_probs(batch: Batch) -> Callable[[CausalLM], Tensor]:
    """A function from a model to the log-probabilities [rows, T] of the targets of a batch."""

    def run(model: CausalLM) -> Tensor:
        log_probs: Tensor = model(**batch, return_log_probs=True).log_probs
        return log_probs

    return run


def add_metrics(total: Metrics, metrics: Metrics) -> None:
    """Add the sums and numbers of ``metrics`` to those of ``total``, in place."""
    for name, pair in metrics.items():
        total[name] = total[name] + pair if name in total else pair.detach()


def mean_metrics(total: Mapping[str, Tensor], prefix: str = "") -> dict[str, float]:
    """The metrics over all ranks, of which every one must call it. A metric without summands is left out."""
    if not total:
        return {}
    pairs = mean_over_ranks(torch.stack([pair.float() for pair in total.values()])).tolist()
    means = {prefix + name: added / number for name, (added, number) in zip(total, pairs, strict=True) if number}
    chosen, rejected = (means.get(f"{prefix}rewards/{name}") for name in ("chosen", "rejected"))
    if chosen is not None and rejected is not None:
        means[f"{prefix}rewards/margins"] = chosen - rejected
    return means


def pair(total: Tensor, number: Tensor | float) -> Tensor:
    """A metric of `Metrics`: [2], a sum [] and the number of what was added, without waiting for the device."""
    total = total.detach().float()
    return torch.stack([total, number.float() if isinstance(number, Tensor) else torch.full_like(total, number)])
