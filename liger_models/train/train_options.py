"""The options of the training command, in groups. Each option can be set on the command line and in an options file."""

# ruff: noqa: RUF009 (`option` returns a field)

import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from liger_models.convert.files import as_dtype
from liger_models.data.dataset import OVERFLOWS
from liger_models.data.encoding import ON_UNRENDERED
from liger_models.data.formats import Formats
from liger_models.data.pixels import BROKEN_MEDIA
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.text.chat import MULTI_TURN
from liger_models.train.objective_options import OBJECTIVES, ObjectiveOptions, make_objective
from liger_models.train.options import check_options, option

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = dict.fromkeys(("dtype", "export_dtype"), (torch.float32, torch.bfloat16, torch.float16))
"""Maps the options whose values are dtypes to their allowed values."""
LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "4bit": 2e-4}
"""Maps each training method to its default peak learning rate. Adapters start at zero and need a larger rate."""
COMPARING_RATES = {"full": 1e-6, "lora": 1e-5}
"""Maps each training method to its default peak learning rate for objectives that compare or sample answers."""
BATCH_SIZES = {"embed": 32, "rerank": 32, "kto": 2}
"""Maps objectives that compare the examples of a batch to their default batch size. All other objectives have 1."""
STORED = "lora_4bit", "lora_float8", "lora_keep_quantized"
"""Options that quantize the weights under adapters."""

_adapter_option = partial(option, needs="lora_r")


@dataclass(kw_only=True)
class DataOptions:
    """Model and data."""

    model: str = option("folder of a checkpoint, or its name on the Hugging Face hub or modelscope:owner/name")
    data: list[str] = option(
        "files or folders to train on: .jsonl, .txt, .parquet; or data sets: hub:owner/name, hub:owner/name:split, "
        "modelscope:owner/name"
    )
    output: str | None = option(
        "folder of the run, for checkpoints, log.jsonl and the trained model; default: a new folder in runs", None
    )
    eval_data: list[str] = option("files, folders or data sets to evaluate on", [])
    length: int = option("tokens in a packed row", 4096, at_least=2)
    overflow: str | None = option("split (default) or truncate documents longer than a row", None, choices=OVERFLOWS)
    format: str | None = option("format of the examples, such as alpaca; default: recognized by their columns", None)
    field: str | None = option("column to read instead, whatever others there are", None)
    data_shares: list[float] = option(
        "share of each entry of data in an epoch, such as 0.7 0.3; default: all of each", []
    )
    max_samples: int | None = option("the most examples to train on, for a short try", None, at_least=1)
    broken_media: str = option("error, or skip examples with images that are broken", "error", choices=BROKEN_MEDIA)
    multi_turn: str = option(
        "split chats whose template changes earlier answers into an example for each of these; all in one; or the last",
        "split",
        choices=MULTI_TURN,
    )
    on_unrendered: str = option(
        "error, warn or drop if the chat template leaves out a field of a message", "error", choices=ON_UNRENDERED
    )
    max_pixels: int | None = option("most pixels of an image (Qwen-VL); default: the checkpoint's", None, at_least=1)
    batch_size: int = option(
        "rows, or examples of what is compared, per GPU in one forward pass; default: 1; 2 for objective kto, and 32 "
        "for embed and rerank",
        None,
        at_least=1,
    )
    accumulate: int = option("batches per GPU in one optimizer step", 1, at_least=1)
    workers: int = option("processes per rank that prepare batches", 1, at_least=0)
    steps: int | None = option("optimizer steps; default: enough for the epochs", None, at_least=1)
    epochs: float = option("passes through the data, if steps is not set", 1.0, more_than=0)


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimizer and precision."""

    lr: float = option(
        "highest learning rate; default: 2e-5, and 1e-6 for objectives that compare or sample answers; ten times that "
        "for adapters",
        None,
        more_than=0,
    )
    warmup: float = option("fraction of the steps in which the learning rate rises", 0.03, is_share=True)
    min_lr: float = option("fraction of lr at which the cosine ends", 0.1, is_share=True)
    weight_decay: float = option("weight decay of matrices; vectors and biases have none", 0.1, at_least=0)
    optimizer: str = option(
        "adamw, or muon: Muon for the weights of linear layers, AdamW for the rest", "adamw", choices=("adamw", "muon")
    )
    muon_lr: float | None = option(
        "highest learning rate of what Muon trains; default: lr", None, more_than=0, read_by=("optimizer", ["muon"])
    )
    max_norm: float = option("norm to which the gradients are clipped", 1.0, more_than=0, may_be_infinite=True)
    dtype: str | None = option(
        "dtype of the weights: float32, bfloat16, or float16 with a loss scale; float16 and adapters are trained in "
        "float32; default: float32, and under adapters the checkpoint's",
        None,
    )
    attention_dropout: float | None = option(
        "dropout probability of attention weights; default: the checkpoint's, often 0", None, is_share=True
    )
    moments_8bit: bool = option("AdamW's moments in 8 bits, whatever the dtype of the weights", False)
    export_dtype: str = option("dtype of the model in output/model", "bfloat16")


@dataclass(kw_only=True)
class AdapterOptions:
    """Adapters (LoRA)."""

    lora_r: int = option("rank of LoRA adapters, which alone are then trained; 0: none", 0, at_least=0)
    lora_alpha: float | None = _adapter_option("adapter scale times rank; default: 2 lora_r", None, more_than=0)
    lora_dropout: float = _adapter_option("dropout probability of the adapters' input", 0.0, is_share=True)
    lora_targets: list[str] = _adapter_option("adapted layers; default: all linear ones", [])
    lora_plus_ratio: float | None = _adapter_option(
        "LoRA+: learning rate of B divided by that of A, such as 16; default: 1", None, more_than=0
    )
    lora_tower: bool = _adapter_option("adapt the vision tower, too", False)
    lora_experts: bool = _adapter_option("adapt the routed experts, too", False)
    lora_4bit: bool = _adapter_option("4-bit weights of adapted layers and of experts", False)
    lora_float8: bool = _adapter_option("float8 weights of adapted layers and of experts", False)
    lora_keep_quantized: bool = _adapter_option(
        "quantized weights of the checkpoint, also of experts, as they are", False
    )


@dataclass(kw_only=True)
class ParallelOptions:
    """Parallelism, memory and reproducibility."""

    tensor_parallel: int = option("GPUs that share the layers, and the batch", 1, at_least=1)
    context_parallel: int = option("GPUs that share the tokens of a row, and the batch", 1, at_least=1)
    checkpointing: str | None = option(
        "checkpointing policy: none, selective or full; default: a plan, the fastest one that fits",
        None,
        choices=CHECKPOINTING_POLICIES,
    )
    gate_up_8bit: bool = option("save gate and up of the MLPs in 8 bits for the backward", False)
    memory: str | None = option(
        "memory of each GPU that the plan may take, such as 60GB or a share with a percent sign; default: what is free",
        None,
    )
    device: str | None = option(
        "cpu, cuda, or cuda:1 for a single process; default: the GPU of each process, or the CPU if there is none", None
    )
    compile: bool = option("compile each block", False)
    seed: int = option("seed of the data order and of dropout", 0, at_least=0)
    deterministic: bool = option("equal bits in every run, even where that is slower", False)

    @property
    def sharing(self) -> int:
        """Number of ranks that share each batch."""
        return self.tensor_parallel * self.context_parallel


@dataclass(kw_only=True)
class LoggingOptions:
    """Log, evaluations and checkpoints."""

    log_every: int = option("steps between lines of the log", 10, at_least=1)
    eval_every: int = option("steps between evaluations", 500, at_least=1)
    save_every: int = option("steps between checkpoints", 500, at_least=1)
    keep: int = option("number of checkpoints to keep", 2, at_least=1)
    sample_prompt: str | None = option("prompt that the model continues, or answers, at each evaluation", None)
    report_to: list[str] = option(
        "where to log besides log.jsonl: tensorboard, wandb", [], choices=("tensorboard", "wandb")
    )
    tensorboard: bool = option("deprecated: report_to: [tensorboard]", False)


# Dataclasses put the fields of the last base class first.
@dataclass(kw_only=True)
class TrainOptions(LoggingOptions, ParallelOptions, AdapterOptions, OptimizerOptions, ObjectiveOptions, DataOptions):
    """The options of a run."""

    def __post_init__(self) -> None:
        # Store the user's values of options whose defaults depend on other options.
        self.given = {name: getattr(self, name) for name in ("objective", "lr", "dtype", "output", "batch_size")}
        self.objective = self.objective or "sft"
        if self.given["batch_size"] is None:
            self.batch_size = BATCH_SIZES.get(self.objective, 1)
        if self.dtype is None and not self.lora_r:
            self.dtype = "float32"

        # Check each option separately, against the metadata of its field.
        check_options(self)
        for name, dtypes in DTYPES.items():  # "bf16" and torch.bfloat16 become "bfloat16"
            if getattr(self, name) is not None:
                dtype = as_dtype(f"TrainOptions: {name}", getattr(self, name), dtypes)
                setattr(self, name, str(dtype).removeprefix("torch."))
        if self.tensorboard:
            warnings.warn(
                "TrainOptions: tensorboard is deprecated. Write report_to: [tensorboard].", FutureWarning, stacklevel=2
            )
            self.report_to, self.tensorboard = [*{*self.report_to, "tensorboard"}], False

        # Objectives that compare answers need smaller learning rates.
        rates = COMPARING_RATES if OBJECTIVES[self.objective].is_gentle else LEARNING_RATES
        self.lr = self.lr or rates["lora" if self.lora_r else "full"]

        # Check options that exclude each other.
        self._check_names()
        self._check_weights()
        self._check_sharing()
        self._check_objective()
        self._check_saved()

    def changed(self, **changes: Any) -> "Self":
        """Return a copy with changed options. The copy still knows which options the user has given."""
        copy = replace(self, **changes)
        copy.given = self.given
        return copy

    def _check_names(self) -> None:
        if len(self.data) == 0:
            raise ValueError("TrainOptions: data must be files or folders, got none. Name one.")
        if "" in (*self.data, *self.eval_data):  # "" is the current folder
            raise ValueError("TrainOptions: data must be files or folders, got ''. Name one.")
        for name in ("model", "output"):
            if getattr(self, name) == "":
                raise ValueError(f"TrainOptions: {name} must have a name, got ''. Give one.")
        are_positive = all(0 < share < math.inf for share in self.data_shares)
        if len(self.data_shares) not in (0, len(self.data)) or not are_positive:
            raise ValueError(
                f"TrainOptions: data_shares must be {len(self.data)} positive numbers, one for each of data, got "
                f"{self.data_shares}."
            )

    def _check_weights(self) -> None:
        # Weights can have only one format. Muon supports neither adapters nor 8-bit moments. The multi-token prediction
        # block can be trained neither with adapters nor with Muon.
        stored = [name for name in STORED if getattr(self, name)]
        if len(stored) >= 2:
            raise ValueError(
                f"TrainOptions: {', '.join(stored)} are ways to store the same weights, got {len(stored)}. Choose one."
            )
        if self.optimizer == "muon" and (self.lora_r != 0 or self.moments_8bit):
            raise ValueError(
                "TrainOptions: optimizer=muon can't be combined with LoRA or moments_8bit, got "
                f"lora_r={self.lora_r} and moments_8bit={self.moments_8bit}. Use adamw."
            )

        if self.mtp_weight is not None and (self.lora_r != 0 or self.optimizer == "muon"):
            raise ValueError(
                "TrainOptions: mtp_weight can't be combined with LoRA, whose adapters are exported without the block, "
                f"or with muon, got lora_r={self.lora_r} and optimizer={self.optimizer}. Leave one out."
            )

    def _check_sharing(self) -> None:
        # Ranks share either layers or tokens, in equal parts.
        if self.tensor_parallel != 1 and self.context_parallel != 1:
            raise ValueError(
                "TrainOptions: tensor_parallel can't be combined with context_parallel, got "
                f"{self.tensor_parallel} and {self.context_parallel}. Leave one out."
            )
        if self.sharing != 1 and self.sample_prompt is not None:
            raise ValueError(
                "TrainOptions: sample_prompt can't be combined with tensor_parallel or context_parallel, under which "
                "models do not generate. Leave it out, and generate from a checkpoint."
            )
        if self.length % self.sharing != 0:
            raise ValueError(
                f"TrainOptions: length must be a multiple of the {self.sharing} GPUs that share a row, got "
                f"{self.length}."
            )

    def _check_saved(self) -> None:
        # Neither adapters with dropout nor recomputation save gate and up for the fused MLP.
        if self.gate_up_8bit and (self.lora_dropout > 0 or self.checkpointing in ("selective", "full")):
            raise ValueError(
                "TrainOptions: gate_up_8bit has no effect with lora_dropout, or with checkpointing selective or full, "
                f"got lora_dropout={self.lora_dropout} and checkpointing={self.checkpointing}. Leave it out."
            )

    def _check_objective(self) -> None:
        # Creating the objective checks the options of the objective.
        objective = make_objective(self)
        Formats(objective.formats, self.format)  # raises an error before a model is loaded
        if not objective.shares_rows and self.sharing != 1:
            raise ValueError(
                f"TrainOptions: tensor_parallel and context_parallel must be 1 with objective {self.objective}, whose "
                f"loss needs whole rows, got {self.tensor_parallel} and {self.context_parallel}."
            )
        if self.memory is not None and (self.objective not in ("sft", "pretrain") or self.tensor_parallel != 1):
            raise ValueError(
                "TrainOptions: memory is planned for objectives sft and pretrain without tensor_parallel, got "
                f"{self.objective} and {self.tensor_parallel}. Leave it out, and set checkpointing."
            )
        for name in ("field", "overflow"):
            value = getattr(self, name)
            if value is not None and objective.compares:
                raise ValueError(
                    f"TrainOptions: {name} must be left out with objective {self.objective}, got {value!r}."
                )
