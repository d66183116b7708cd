"""Training objectives. An objective defines how the loop reads the data and computes the loss of a batch."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from liger_models.adapters.lora import without_adapters
from liger_models.adapters.mtp import LigerMTP
from liger_models.base.causal_lm import CausalLM
from liger_models.base.images import settings_of
from liger_models.base.processor import Processor
from liger_models.base.vision_language import VisionLanguageModel, placeholder_ids
from liger_models.data.answers import AnswerDataset
from liger_models.data.batch import Batch
from liger_models.data.dataset import PackedDataset
from liger_models.data.formats import DOCUMENTS
from liger_models.data.sampled_answers import share_prompts
from liger_models.generation.options import PromptInputs
from liger_models.kernels.dispatch import ACCELERATORS
from liger_models.layers.lm_head import LabeledTokens
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
from liger_models.parallel.gathered import reshard
from liger_models.parallel.step import mean_over_ranks, targets_per_rank
from liger_models.text.tokenizer import Tokenizer

Metrics: TypeAlias = dict[str, Tensor]
"""Maps a metric's name to a tensor [2]: a sum on this rank, and the number of summands. The metric is sum / number."""
Load = Callable[[str], CausalLM]
"""A function that loads a frozen model by folder or name, and shards it in the same way as the trained model."""
DIVERGENCES: dict[str, type[Any]] = {
    "jsd": LigerFusedLinearJSDLoss,
    "forward_kl": LigerFusedLinearForwardKLLoss,
    "reverse_kl": LigerFusedLinearReverseKLLoss,
    "tvd": LigerFusedLinearTVDLoss,
    "cosine": LigerFusedLinearCosineSimilarityLoss,
}


def reader_of(model: CausalLM) -> Tokenizer | Processor:
    """Return the processor of a vision-language model if its checkpoint has image settings; otherwise the tokenizer."""
    if isinstance(model, VisionLanguageModel) and settings_of(model.assets, "image_processor"):
        processor: Processor = model.processor
        return processor
    return model.tokenizer


class Reference:
    """The reference model: a frozen model or, in a run with adapters, the trained model without its adapters.

    Args:
        options: all options of the run.
        name: folder or name of the reference model. None means the trained model as it was before training.
    """

    def __init__(self, options: Any, name: str | None) -> None:
        # Without adapters, training changes the model's weights, so the reference model is a second copy.
        self.name = name or options.model
        self.by_adapters = options.lora_r > 0 and self.name == options.model
        self.model: CausalLM | None = None

    def prepare(self, load: Load) -> None:
        """Load the reference model, unless the trained model without its adapters is the reference model."""
        if not self.by_adapters:
            self.model = load(self.name)

    def frozen_models(self) -> dict[str, str]:
        """See `Objective.frozen_models`."""
        if self.model is not None:
            return {"reference model": weight_checksum(self.model.named_parameters())}
        return {"reference model": "the model without adapters"} if self.by_adapters else {}

    @torch.no_grad()
    def __call__(self, model: CausalLM, run: Callable[[CausalLM], Tensor]) -> Tensor:
        """Call ``run`` with the reference model, and return the result of ``run``."""
        with without_adapters(model) if self.by_adapters else nullcontext():
            log_probs = run(self.model or model)
        reshard(self.model or model)
        return log_probs


def share_in(*models: CausalLM | None) -> bool:
    """Return whether answers share the tokens of their prompt in the forwards of all given models."""
    return all(model is None or (model.takes_parents and model.device.type in SHARING_DEVICES) for model in models)


def with_pixels(model: CausalLM, batch: Batch, pixels: Batch) -> Batch | None:
    """Add pixels to a batch of one row in which documents continue others.

    Returns:
        The batch; None if a prompt ends within an image, whose placeholders must be in one document.
    """
    if not pixels:
        return batch
    starts = batch["cu_seqlens"][:-1][batch["parents"] >= 0].long()
    placeholders = torch.tensor(placeholder_ids(model.config), device="cpu")
    return None if torch.isin(batch["input_ids"][0, starts], placeholders).any() else batch | pixels


INPUTS = frozenset({"input_ids", "labels", "cu_seqlens", "parents", *PromptInputs.__annotations__})
"""The keys of a batch that are arguments of a model's forward."""
SHARING_DEVICES: tuple[str, ...] = ACCELERATORS
"""Types of the devices on which answers share the tokens of their prompt. On the CPU, attention with a mask takes time
for all pairs of tokens in a row, and all answers of a batch are in one row."""
PACKED = frozenset({"input_ids", "labels", "cu_seqlens"})
"""The keys of a batch of text."""


class Objective:
    """Supervised fine-tuning (SFT), and the base class of all objectives.

    SFT's loss is the mean cross entropy over all tokens that have a label.

    Args:
        options: all options of the run.
        settings: the options of the objective that are not None.

    Raises:
        ValueError: an option is out of range.
    """

    formats: tuple[str, ...] = DOCUMENTS
    """Allowed formats of examples."""
    shares_rows = True
    """Whether several ranks may share a row (tensor and context parallelism)."""
    repeats = 1
    """Number of optimizer steps that use the same batches."""
    compares = False
    """Whether the loss compares answers or texts. If so, examples are not packed into rows."""
    has_head = True
    """Whether the model has a language-model head."""
    generates = True
    """Whether the model generates text."""
    is_gentle = False
    """Whether the default learning rate is low, because the objective compares or samples answers."""

    def __init__(self, options: Any, **settings: Any) -> None:
        self.accumulate = options.accumulate
        self.block: LigerMTP | None = None
        """The model with its multi-token prediction block; None without ``mtp_weight``."""

    def prepare(self, model: CausalLM, load: Load) -> None:
        """Load the models that the loss needs in addition to the trained model."""

    def frozen_models(self) -> dict[str, str]:
        """Return the name and weight checksum of each model that the loss needs in addition to the trained model.

        Every rank must call this method.
        """
        return {}

    def dataset(self, source: Any, model: CausalLM, *, overflow: str | None, **options: Any) -> PackedDataset:
        """Return the training data of the run. Every rank must call this method."""
        return PackedDataset(source, reader_of(model), overflow=overflow or "split", formats=self.formats, **options)

    def eval_dataset(self, source: Any, model: CausalLM, **options: Any) -> PackedDataset:
        """Return the evaluation data. Every rank must call this method."""
        return self.dataset(source, model, shuffle=False, **options)

    def batch(self, model: CausalLM, batch: Any) -> Batch:
        """Convert a batch of the data to the batch to train on. Every rank must call this method."""
        return batch  # type: ignore[no-any-return]

    def num_items(self, batches: list[Batch]) -> Tensor | None:
        """Return the divisor that the losses of all batches in a step share; None if each loss has its own divisor."""
        return targets_per_rank(batches)

    def loss(self, model: CausalLM, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, Metrics]:
        """Return the contribution of a batch to the loss of its step, and the metrics of the batch."""
        if self.trained_block is not None and num_items is not None:
            out = self.trained_block(**batch, num_items_in_batch=num_items)
            return out.loss, {"mtp_loss": pair(out.mtp_loss * num_items, (batch["labels"] != -100).sum())}
        return model(**batch, num_items_in_batch=num_items).loss, {}

    def step(self, model: CausalLM, batches: list[Batch], backward: Callable[[Tensor], None]) -> tuple[Tensor, Metrics]:
        """Compute the gradients of a step by calling ``backward`` with parts of the loss.

        Returns:
            The loss of this rank [] and the metrics.
        """
        num_items = self.num_items(batches)
        total, metrics = torch.zeros((), dtype=torch.float32, device=model.device), Metrics()
        for batch in batches:
            loss, batch_metrics = self.loss(model, batch, num_items)
            backward(loss)
            total += loss.detach()
            add_metrics(metrics, batch_metrics)
        return total, metrics

    @property
    def trained_block(self) -> LigerMTP | None:
        """The model with its multi-token prediction block; None if the block is not trained."""
        return self.block if self.block is not None and self.block.loss_weight else None

    def finish_evaluation(self, device: torch.device) -> Metrics:
        """Return metrics computed over all batches of an evaluation together. Every rank must call this method."""
        return {}

    def export(self, model: CausalLM, folder: Path) -> None:
        """Write additional files to the folder of the exported model or adapters. Every rank must call this method."""

    def evaluate(self, model: CausalLM, batch: Batch) -> Metrics:
        """Compute the metrics of a batch, including "loss", without gradients. Auxiliary losses are not included."""
        out = model(**batch, num_items_in_batch=1)  # the sum of the losses
        loss = out.loss - (0 if out.aux_loss is None else out.aux_loss)
        return {"loss": pair(loss, (batch["labels"] != -100).sum())}


class PretrainObjective(Objective):
    """Pretraining on texts or token ids. Chats and other formats are refused, so that they are not used by mistake."""

    formats = ("text", "input_ids")


class Compared(Objective):
    """The base class of objectives whose loss compares whole answers within a batch; see `liger_models.losses`."""

    formats = ("preference",)
    shares_rows, compares, is_gentle = False, True, True
    make: Callable[..., Any]
    """The class of the loss."""
    needs_reference = False
    """Whether the loss compares the trained model with a reference model."""
    rows_of_example = 2
    """Number of rows of an example in a batch: 2 for a chosen and a rejected answer, otherwise 1."""

    def __init__(self, options: Any, **settings: Any) -> None:
        super().__init__(options)
        self.reference = Reference(options, settings.pop("ref_model", None))
        self.settings = self._settings(settings)
        self.function = type(self).make(**self.settings)  # raises errors before a model is loaded

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """Translate the objective's options into arguments of the loss."""
        return options

    def prepare(self, model: CausalLM, load: Load) -> None:
        """See `Objective.prepare`."""
        # The loss computes the head itself, with the settings of the model's head.
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

    def batch(self, model: CausalLM, batch: Any) -> Batch:
        """See `Objective.batch`. The answers of a pair share the tokens of their prompt if the models support this."""
        if self.rows_of_example != 2 or not share_in(model, self.reference.model):
            return batch  # type: ignore[no-any-return]
        # Both answers of a pair have the pixels of their prompt, first those of the chosen answers.
        pixels = {name: tensor[: len(tensor) // 2] for name, tensor in batch.items() if name not in PACKED}
        shared = with_pixels(model, share_prompts(batch, model.tokenizer.padding_id), pixels)
        return batch if shared is None else shared

    def eval_dataset(self, source: Any, model: CausalLM, **options: Any) -> PackedDataset:
        """See `Objective.eval_dataset`. Batches of pairs may be incomplete, but labeled answers need full batches."""
        return super().eval_dataset(source, model, complete=self.formats != ("preference",), **options)

    def num_items(self, batches: list[Batch]) -> Tensor | None:
        """Return None: the batches need no common divisor, because each batch has the same number of examples."""
        return None

    def loss(self, model: CausalLM, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, Metrics]:
        """See `Objective.loss`."""
        out, metrics = self._run(model, batch)
        loss = out.loss[0] if out.aux_loss is None else out.loss[0] + out.aux_loss
        return loss / self.accumulate, metrics

    def evaluate(self, model: CausalLM, batch: Batch) -> Metrics:
        """See `Objective.evaluate`."""
        out, metrics = self._run(model, batch)
        # The loss is a mean over the examples that count in metrics.
        number = self._counted(batch).sum()
        return {"loss": pair(out.loss[0] * number, number), **metrics}

    def _run(self, model: CausalLM, batch: Batch) -> tuple[Any, Metrics]:
        """Run the model. Returns (output, metrics), where ``output.loss`` is a pair: the loss, and the values from
        which the metrics are computed."""
        inputs = {name: tensor for name, tensor in batch.items() if name in INPUTS}
        tokens = LabeledTokens(batch["labels"], batch.get("answer_tokens"))
        log_probs = self.reference(model, _log_probs(inputs)) if self.needs_reference else None

        # The loss runs inside the forward of the head, for which FSDP gathers the head's weight.
        def loss_function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
            x, target, reference = tokens.select(x, target, log_probs)
            options = {"ref_log_probs": reference} if self.needs_reference else {}
            return self.function(weight, x, target, **options)

        out = model(**inputs, loss_function=loss_function)
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
        # The values are scalars or have one element per example. Examples that only fill a batch do not count.
        counted = self._counted(batch)
        return out, {name: pair((mean * counted).float().sum(), counted.sum()) for name, mean in means.items()}

    def _counted(self, batch: Batch) -> Tensor:
        """Return, for each example of a batch, whether it has labels and thus counts in metrics: [examples] bool."""
        labels = batch["labels"]
        if "parents" in batch:  # a token predicts the label of the next token
            labels = labels.flatten().roll(-1)[batch["answer_tokens"]]
        # [rows, T] -> [rows] -> [rows of an example, examples]: all chosen answers come before all rejected answers.
        return (labels != -100).any(1).view(-1, len(labels) // self.rows_of_example).any(0)


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
        # The options have TRL's names. With a weight of 0, the loss has no NLL term.
        alpha = options.pop("cpo_alpha", self.alpha)
        names = {"simpo_gamma": "gamma"}
        settings = {names.get(name, name): value for name, value in options.items()}
        return {**settings, "alpha": alpha or 1.0, "compute_nll_loss": alpha != 0}


class SimPOObjective(CPOObjective):
    """SimPO: `CPOObjective` with mean log-probabilities and a margin. By default, the loss has no NLL term."""

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
        # The answers, and the unrelated pairs: each prompt with the answer to another prompt.
        answers = {name: tensor for name, tensor in batch.items() if name in INPUTS}
        unrelated = {name: batch.get(f"kl_{name}", tensor) for name, tensor in answers.items()}  # pixels are the same
        good, tokens = batch["preference_labels"], LabeledTokens(answers["labels"])

        # The KL term z is a mean over all ranks and has no gradient.
        with torch.no_grad():
            moved = _log_probs(unrelated)(model).sum(-1)
            reshard(model)
            moved = moved - self.reference(model, _log_probs(unrelated)).sum(-1)
            z = mean_over_ranks(moved.mean()).clamp(min=0)
        log_probs = self.reference(model, _log_probs(answers))

        def loss_function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
            x, target, reference = tokens.select(x, target, log_probs)
            return self.function(x, weight, target, preference_labels=good, kl=z, ref_log_probs=reference)

        out = model(**answers, loss_function=loss_function)
        sums, goods, bads = out.loss[1], good.sum(), (~good).sum()
        return out, {
            "rewards/chosen": pair(sums.chosen_rewards_sum, goods),
            "rewards/rejected": pair(sums.rejected_rewards_sum, bads),
            "logps/chosen": pair(sums.chosen_logps_sum, goods),
            "logps/rejected": pair(sums.rejected_logps_sum, bads),
            "kl": pair(z, 1),
        }


class DistillObjective(Objective):
    """Distillation. The model learns a larger model's token distributions in addition to the tokens themselves."""

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
        """Run the model. Returns (output, metrics), where ``output.loss`` is (mean losses, number of targets)."""
        tokens = LabeledTokens(batch["labels"])

        def head_inputs(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            return tokens.select(x, target)[0], weight

        # The teacher's hidden states [B, n, C] and its head. The loss computes the teacher's logits in chunks.
        with torch.no_grad():
            hidden, head = self.teacher(**batch, loss_function=head_inputs).loss

        def compare(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Any, Tensor]:
            # The dtypes of student and teacher may differ. On one GPU, a student with quantized weights is not sharded,
            # and its adapters then compute in float32. The teacher computes in the dtype of the run.
            x, target = tokens.select(x, target)
            return self.function(x, weight, hidden.to(x.dtype), head.to(x.dtype), target), (target != -100).sum()

        # Without a backward the teacher's head stays gathered, so the student's loss can use it.
        out = model(**batch, loss_function=compare)
        reshard(self.teacher)
        losses, count = out.loss
        names = "loss", "soft_loss", "hard_loss"
        return out, {name: pair(loss * count, count) for name, loss in zip(names, losses, strict=True)}


def _log_probs(batch: Batch) -> Callable[[CausalLM], Tensor]:
    """Return a function that takes a model and returns the log-probabilities [rows, T] of a batch's targets."""

    def run(model: CausalLM) -> Tensor:
        log_probs: Tensor = model(**batch, return_log_probs=True).log_probs
        return log_probs

    return run


def add_metrics(total: Metrics, metrics: Metrics) -> None:
    """Add the sums and counts of ``metrics`` to the sums and counts in ``total``, in place."""
    for name, pair in metrics.items():
        total[name] = total[name] + pair if name in total else pair.detach()


def mean_metrics(total: Mapping[str, Tensor], prefix: str = "") -> dict[str, float]:
    """Return the means of metrics over all ranks, without metrics that have no summands.

    Every rank must call this function.
    """
    if not total:
        return {}
    # All metrics are in one collective, [metrics, 2]. Dividing both sums and counts by the number of ranks keeps
    # the ratios.
    pairs = mean_over_ranks(torch.stack([pair.float() for pair in total.values()])).tolist()
    means = {prefix + name: added / number for name, (added, number) in zip(total, pairs, strict=True) if number}
    chosen, rejected = (means.get(f"{prefix}rewards/{name}") for name in ("chosen", "rejected"))
    if chosen is not None and rejected is not None:
        means[f"{prefix}rewards/margins"] = chosen - rejected
    return means


def pair(total: Tensor, number: Tensor | float) -> Tensor:
    """Return an entry of `Metrics`, [2]: a sum and its number of summands.

    This function does not wait for the device.
    """
    total = total.detach().float()
    return torch.stack([total, number.float() if isinstance(number, Tensor) else torch.full_like(total, number)])
