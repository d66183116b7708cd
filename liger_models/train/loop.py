"""Train or fine-tune a model on packed data with FSDP2: ``torchrun -m liger_models.train config.yaml``.

This file holds everything from options to export and is meant to be copied and changed. It trains all weights, or
adapters (LoRA). It runs on any number of GPUs, on CPUs with gloo, and without torchrun in a single process. Started
again, it resumes from its last checkpoint.
"""

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import field as option
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from liger_models.adapters.lora import apply_lora, language_targets
from liger_models.adapters.lora_layers import EXPERTS, LoRAConfig
from liger_models.adapters.peft_files import save_adapter
from liger_models.adapters.quantize import quantize_base
from liger_models.arch.auto import load_by_name
from liger_models.base.causal_lm import CausalLM
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.convert.files import as_dtype
from liger_models.data.batch import Batch
from liger_models.data.dataset import OVERFLOWS, PackedDataset
from liger_models.data.formats import Formats
from liger_models.data.loader import PackedLoader
from liger_models.data.pixels import BROKEN_MEDIA
from liger_models.data.sources import find_files
from liger_models.layers.layer import CHECKPOINTING_POLICIES, layers_of
from liger_models.memory.estimate import TrainingMemory
from liger_models.memory.plan import MemoryPlan, parse_memory, plan_memory
from liger_models.parallel.context import apply_cp
from liger_models.parallel.fsdp import apply_fsdp, compile_blocks, reshard
from liger_models.parallel.state import load_state, save_state
from liger_models.parallel.step import clip_grad_norm_, mean_over_ranks
from liger_models.parallel.tensor import apply_tp
from liger_models.train.metrics import Log, flops
from liger_models.train.modelscope import PREFIX, fetch
from liger_models.train.muon import LigerMuon
from liger_models.train.objective_options import ObjectiveOptions, make_objective
from liger_models.train.objectives import Metrics, Objective, add_metrics, mean_metrics
from liger_models.train.optimizer import LigerAdamW, step_in_backward
from liger_models.train.options import read_options
from liger_models.train.report import banner, check_turn_end, estimate, next_steps, sample, say
from liger_models.train.seed import seed_all
from liger_models.train.stopping import Stop, keep_signal_handlers

STORED = "lora_4bit", "lora_float8", "lora_keep_float8"
"""The options that store the weights under adapters in fewer bits."""

LEAST = {"length": 2, "workers": 0, "weight_decay": 0, "lora_r": 0, "seed": 0}
LEAST |= dict.fromkeys(
    ("batch_size", "accumulate", "steps", "tensor_parallel", "context_parallel", "keep", "max_samples", "max_pixels"), 1
)
LEAST |= dict.fromkeys(("log_every", "eval_every", "save_every"), 1)
"""The smallest allowed values of options."""
DTYPES = dict.fromkeys(("dtype", "export_dtype"), (torch.float32, torch.bfloat16, torch.float16))
"""The allowed dtypes of options."""
KNOWN = {"overflow": OVERFLOWS, "checkpointing": CHECKPOINTING_POLICIES, "broken_media": BROKEN_MEDIA}
KNOWN |= {"optimizer": ("adamw", "muon")}
TRACKERS = ("tensorboard", "wandb")
"""The allowed values of options."""
UNBOUNDED = frozenset({"max_norm", "epsilon", "epsilon_high"})
"""Options that may be infinite, which limits nothing."""


@dataclass(kw_only=True)
class TrainOptions(ObjectiveOptions):
    """The options of a run. Each is an option of the command line and a key of a YAML or JSON file."""

    model: str = option(
        metadata={"help": "folder of a checkpoint, or its name on the Hugging Face hub or modelscope:owner/name"}
    )
    data: list[str] = option(metadata={"help": "files or folders to train on: .jsonl, .txt, .parquet"})
    output: str = option(metadata={"help": "folder of the run, for checkpoints, log.jsonl and the trained model"})
    eval_data: list[str] = option(default_factory=list, metadata={"help": "files or folders to evaluate on"})
    length: int = option(default=4096, metadata={"help": "tokens in a packed row"})
    overflow: str | None = option(
        default=None, metadata={"help": "split (default) or truncate documents longer than a row"}
    )
    format: str | None = option(
        default=None, metadata={"help": "format of the examples, such as alpaca; default: recognised by their columns"}
    )
    field: str | None = option(default=None, metadata={"help": "column to read instead, whatever others there are"})
    data_shares: list[float] = option(
        default_factory=list,
        metadata={"help": "share of each entry of data in an epoch, such as 0.7 0.3; default: all of each"},
    )
    max_samples: int | None = option(default=None, metadata={"help": "the most examples to train on, for a short try"})
    broken_media: str = option(
        default="error", metadata={"help": "error, or skip examples with images that are broken"}
    )
    max_pixels: int | None = option(
        default=None, metadata={"help": "most pixels of an image (Qwen-VL); default: the checkpoint's"}
    )
    batch_size: int = option(default=1, metadata={"help": "rows, or pairs, per GPU in one forward pass"})
    accumulate: int = option(default=1, metadata={"help": "batches per GPU in one optimizer step"})
    workers: int = option(default=1, metadata={"help": "processes per rank that prepare batches"})
    steps: int | None = option(default=None, metadata={"help": "optimizer steps; default: enough for the epochs"})
    epochs: float = option(default=1.0, metadata={"help": "passes through the data, if steps is not set"})
    lr: float = option(default=2e-5, metadata={"help": "highest learning rate"})
    warmup: float = option(default=0.03, metadata={"help": "fraction of the steps in which the learning rate rises"})
    min_lr: float = option(default=0.1, metadata={"help": "fraction of lr at which the cosine ends"})
    weight_decay: float = option(default=0.1, metadata={"help": "weight decay of matrices; vectors have none"})
    optimizer: str = option(
        default="adamw", metadata={"help": "adamw, or muon: Muon for the weights of linear layers, AdamW for the rest"}
    )
    muon_lr: float | None = option(
        default=None, metadata={"help": "highest learning rate of what Muon trains; default: lr"}
    )
    max_norm: float = option(default=1.0, metadata={"help": "norm to which the gradients are clipped"})
    dtype: str = option(
        default="float32",
        metadata={
            "help": "dtype of the weights: float32, bfloat16, or float16 with a loss scale; float16 and adapters are "
            "trained in float32"
        },
    )
    moments_8bit: bool = option(
        default=False, metadata={"help": "AdamW's moments in 8 bits, whatever the dtype of the weights"}
    )
    lora_r: int = option(default=0, metadata={"help": "rank of LoRA adapters, which alone are then trained; 0: none"})
    lora_alpha: float | None = option(default=None, metadata={"help": "adapter scale times rank; default: 2 lora_r"})
    lora_dropout: float = option(default=0.0, metadata={"help": "dropout probability of the adapters' input"})
    lora_targets: list[str] = option(
        default_factory=list, metadata={"help": "adapted layers; default: all linear ones"}
    )
    lora_plus_ratio: float | None = option(
        default=None, metadata={"help": "LoRA+: learning rate of B divided by that of A, such as 16; default: 1"}
    )
    lora_tower: bool = option(default=False, metadata={"help": "adapt the vision tower, too"})
    lora_experts: bool = option(default=False, metadata={"help": "adapt the routed experts, too"})
    lora_4bit: bool = option(default=False, metadata={"help": "4-bit weights of adapted layers and of experts"})
    lora_float8: bool = option(default=False, metadata={"help": "float8 weights of adapted layers and of experts"})
    lora_keep_float8: bool = option(
        default=False,
        metadata={"help": "weights that the checkpoint has in float8, also of experts, as they are"},
    )
    tensor_parallel: int = option(default=1, metadata={"help": "GPUs that share the layers, and the batch"})
    context_parallel: int = option(default=1, metadata={"help": "GPUs that share the tokens of a row, and the batch"})
    checkpointing: str | None = option(
        default=None,
        metadata={"help": "checkpointing policy: none, selective (default) or full; with memory it is planned"},
    )
    memory: str | None = option(
        default=None,
        metadata={
            "help": "memory of each GPU that the run may take, such as 60GB or a share with a percent sign; what is "
            "recomputed or offloaded, and where the optimizer steps, is then planned"
        },
    )
    compile: bool = option(default=False, metadata={"help": "compile each block"})
    seed: int = option(default=0, metadata={"help": "seed of the data order and of dropout"})
    deterministic: bool = option(default=False, metadata={"help": "equal bits in every run, even where that is slower"})
    log_every: int = option(default=10, metadata={"help": "steps between lines of the log"})
    eval_every: int = option(default=500, metadata={"help": "steps between evaluations"})
    save_every: int = option(default=500, metadata={"help": "steps between checkpoints"})
    keep: int = option(default=2, metadata={"help": "number of checkpoints to keep"})
    sample_prompt: str | None = option(
        default=None, metadata={"help": "prompt that the model continues, or answers, at each evaluation"}
    )
    report_to: list[str] = option(
        default_factory=list, metadata={"help": "where to log besides log.jsonl: tensorboard, wandb"}
    )
    tensorboard: bool = option(default=False, metadata={"help": "deprecated: report_to: [tensorboard]"})
    export_dtype: str = option(default="bfloat16", metadata={"help": "dtype of the model in output/model"})

    def __post_init__(self) -> None:
        for name in ("data", "eval_data", "lora_targets", "report_to"):  # a str is a list of its letters
            value = getattr(self, name)
            if isinstance(value, str | os.PathLike):
                setattr(self, name, [os.fspath(value)])
        if self.tensorboard:
            warnings.warn(
                "TrainOptions: tensorboard is deprecated. Write report_to: [tensorboard].", FutureWarning, stacklevel=2
            )
            self.report_to, self.tensorboard = [*{*self.report_to, "tensorboard"}], False
        unknown = sorted({*self.report_to} - {*TRACKERS})
        if unknown:
            raise ValueError(f"TrainOptions: report_to must be among {', '.join(TRACKERS)}, got {', '.join(unknown)}.")
        if len(self.data) == 0:
            raise ValueError("TrainOptions: data must be files or folders, got none. Name one.")
        for path in (*self.data, *self.eval_data):  # "" is the current folder
            if not path:
                raise ValueError("TrainOptions: data must be files or folders, got ''. Name one.")
        for name in ("model", "output"):
            if not getattr(self, name):
                raise ValueError(f"TrainOptions: {name} must have a name, got ''. Give one.")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"TrainOptions: {name} must be at least {least}, got {value}.")
        if len(self.data_shares) not in (0, len(self.data)) or not all(
            0 < share < math.inf for share in self.data_shares
        ):
            raise ValueError(
                f"TrainOptions: data_shares must be {len(self.data)} positive numbers, one for each of data, got "
                f"{self.data_shares}."
            )
        for name in ("epochs", "lr", "muon_lr", "max_norm", "lora_plus_ratio"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"TrainOptions: {name} must be more than 0, got {value}.")
        for name in sorted(TrainOptions.__dataclass_fields__.keys() - UNBOUNDED):
            value = getattr(self, name)
            finite = not isinstance(value, float) or math.isfinite(value)
            if not finite:
                raise ValueError(f"TrainOptions: {name} must be finite, got {value}.")
        for name, known in KNOWN.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"TrainOptions: {name} must be one of {', '.join(known)}, got {value!r}.")
        for name, dtypes in DTYPES.items():  # "bf16" and torch.bfloat16 become "bfloat16"
            dtype = as_dtype(f"TrainOptions: {name}", getattr(self, name), dtypes)
            setattr(self, name, str(dtype).removeprefix("torch."))
        for name in ("warmup", "min_lr", "lora_dropout"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"TrainOptions: {name} must be a share from 0 to 1, got {value}.")
        for name in TrainOptions.__dataclass_fields__:
            value = name.startswith("lora_") and getattr(self, name)
            if not self.lora_r > 0 and value:
                raise ValueError(f"TrainOptions: {name} needs lora_r, got {value} and {self.lora_r}.")
        stored = [name for name in STORED if getattr(self, name)]
        if len(stored) >= 2:
            raise ValueError(
                f"TrainOptions: {', '.join(stored)} are ways to store the same weights, got {len(stored)}. Choose one."
            )
        muon = self.optimizer == "muon"
        if not muon and self.muon_lr is not None:
            raise ValueError(f"TrainOptions: muon_lr needs optimizer muon, got {self.muon_lr} and {self.optimizer}.")
        if muon and (self.lora_r != 0 or self.moments_8bit):
            raise ValueError(
                "TrainOptions: optimizer muon goes neither with adapters, which are AdamW's, nor with moments_8bit, "
                f"got lora_r={self.lora_r} and moments_8bit={self.moments_8bit}. Use adamw."
            )
        if self.tensor_parallel != 1 and self.context_parallel != 1:
            raise ValueError(
                f"TrainOptions: tensor_parallel does not go with context_parallel, got {self.tensor_parallel} and "
                f"{self.context_parallel}. Leave one out."
            )
        if self.sharing != 1 and self.sample_prompt is not None:
            raise ValueError(
                "TrainOptions: sample_prompt goes neither with tensor_parallel nor with context_parallel, which do not "
                "generate. Leave it out, and generate from a checkpoint."
            )
        if self.length % self.sharing != 0:
            raise ValueError(
                f"TrainOptions: length must be a multiple of the {self.sharing} GPUs that share a row, got "
                f"{self.length}."
            )

        objective = make_objective(self)
        Formats(objective.formats, self.format)  # refuses a format before a model is loaded
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

    @property
    def sharing(self) -> int:
        """Number of ranks that share a batch."""
        return self.tensor_parallel * self.context_parallel


@keep_signal_handlers()
def train(options: TrainOptions) -> None:
    """Train from the last checkpoint in ``options.output``, or from the start, and export the model.

    Every rank must call it. It initialises the process group if there is none: torchrun's, or one of this process only.
    After SIGINT (Ctrl-C) or SIGTERM it saves a checkpoint and exports nothing; a second signal ends it at once.

    Raises:
        KeyboardInterrupt: SIGINT has stopped it; SystemExit: SIGTERM has.
        ValueError: a data file does not exist, data have no targets, ``options.output`` is a file, or holds the run of
            another model or of other data, the number of ranks does not fit, no step fits into ``options.memory``, or
            the gradients' norm is not finite.
        OSError: ``options.output`` cannot be written, or its newest checkpoint is damaged.
    """
    for path in (*options.data, *options.eval_data):
        there = Path(path).exists() or path.startswith(PREFIX)
        if not there:
            raise ValueError(f"train: data must be files or folders, got {path}, which does not exist.")
    output = Path(options.output)
    try:  # other ranks make it at the same time
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        message = f"train: output must be a folder, or not exist, got the file {output}. Name another."
        raise ValueError(message) from None
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    budget = None if options.memory is None else parse_memory("train: memory", options.memory, device)
    started = not dist.is_initialized()
    if started:
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, **({} if "RANK" in os.environ else alone))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks % options.sharing != 0:
        raise ValueError(
            f"train: the number of ranks ({ranks}) must be a multiple of the {options.sharing} that share a batch. "
            "Start another number of ranks."
        )
    mesh = init_device_mesh(device.type, (ranks // options.sharing, options.sharing), mesh_dim_names=("dp", "shared"))
    data_ranks = {"rank": mesh["dp"].get_local_rank(), "ranks": mesh["dp"].size()}
    seed_all(options.seed + data_ranks["rank"], deterministic=options.deterministic)

    if any(name.startswith(PREFIX) for name in (options.model, *options.data, *options.eval_data)):
        files = [[fetch(name, dataset=True) for name in names] for names in (options.data, options.eval_data)]
        options = replace(options, model=fetch(options.model), data=files[0], eval_data=files[1])
    find_files([*options.data, *options.eval_data])  # fails before a large model is loaded
    computed = computing_dtype(options, device)
    model, objective = load_model(options, device, mesh, computed), make_objective(options)
    objective.prepare(model, lambda name: load_frozen(fetch(name), device, computed))

    packing: dict[str, Any] = {"length": options.length, "overflow": options.overflow, "field": options.field}
    packing |= {"format": options.format, "broken_media": options.broken_media}
    packing |= {"batch_size": options.batch_size, "seed": options.seed, **data_ranks}
    chosen: dict[str, Any] = {"max_samples": options.max_samples, "shares": options.data_shares or None}
    bound_images(model, options.max_pixels)
    data = objective.dataset(options.data, model, **chosen, **packing)
    if not options.lora_r and not data.has_images:
        freeze_images(model)
    plan = None if budget is None else plan_step(options, model, budget, computed)
    if plan is None:
        model.set_checkpointing(options.checkpointing or "selective")
    else:
        plan.apply(model)
    if options.compile:
        compile_blocks(model)
    loader = PackedLoader(data, num_workers=options.workers, pin_memory=device.type != "cpu")
    tests = objective.eval_dataset(options.eval_data, model, **packing) if options.eval_data else None
    epoch_steps = options.epochs * len(data) / options.accumulate * objective.repeats
    steps = options.steps or math.ceil(epoch_steps)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(model, options, plan)
    groups = [{name: group[name] for name in ("lr", "weight_decay")} for group in optimizer.param_groups]

    def share(step: int) -> float:
        return cosine(step, max(1, round(options.warmup * steps)), steps, options.min_lr)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    scaler = torch.amp.GradScaler(device.type, enabled=computed == torch.float16)
    if scaler.is_enabled():  # the first steps may be left out
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)

    start = load_state(output, model, optimizer, scheduler, loader, scaler) or 0
    in_backward = plan is not None and plan.in_backward
    if in_backward:
        step_in_backward(optimizer)
    passed = data.passed / (data_ranks["ranks"] * options.batch_size * options.accumulate)
    passed *= objective.repeats  # in steps of this run
    if options.steps is None and passed != start:  # steps had another size before
        steps = start + max(math.ceil(epoch_steps - passed), 0)
    if start >= steps and rank == 0:
        print(
            f"{output}: the run is finished after {start} steps, {steps} were asked for. Nothing is trained; what was "
            "trained is written again. Raise steps or epochs to train on, or use another output for a new run."
        )
    scheduler.base_lrs = [group["lr"] for group in groups]  # the current options override the saved ones
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = given["lr"] * share(start)
        group["weight_decay"] = given["weight_decay"]
    batches, saving = endless(loader), None
    memory = None
    known = objective.shares_rows and options.tensor_parallel == 1 and model.visual is None
    if plan is None and known and device.type != "cpu":
        memory = estimate_step(options, model).peak(options.checkpointing or "selective", options.accumulate)
    size = {"rows": options.batch_size, "length": options.length, "accumulate": options.accumulate, "ranks": ranks}
    size |= {"sharing": options.sharing, "start": start, "steps": steps}
    epochs = steps * options.accumulate / len(data) / objective.repeats
    say(*banner(model, name=options.model, device=device, memory=memory, output=output, epochs=epochs, **size))
    if plan is not None and rank == 0:
        say(*str(plan).splitlines())
        (output / "memory.json").write_text(json.dumps({**asdict(plan), "peak": plan.peak}, indent=2) + "\n")
    if rank == 0:
        say(f"data        {data.describe()}")
    if warning := check_turn_end(model):
        say(warning)
    log = Log(output, start, steps, device, data_ranks["ranks"], report_to=options.report_to, options=asdict(options))
    stop = Stop()
    accumulated: list[Batch] = []
    operations = 0.0
    for step in range(start + 1, steps + 1):
        if not accumulated or (step - 1) % objective.repeats == 0:
            accumulated = [objective.batch(model, next(batches)) for _ in range(options.accumulate)]
            operations = flops(model, accumulated)
            accumulated = [to_device(batch, device, model) for batch in accumulated]
        log.count(accumulated, operations)
        num_items = objective.num_items(accumulated)
        loss, metrics = torch.zeros((), device=device), Metrics()
        for batch in accumulated:
            part, found = objective.loss(model, batch, num_items)
            scaler.scale(part).backward()
            loss += part.detach()
            add_metrics(metrics, found)
        scaler.unscale_(optimizer)
        norm = None if in_backward else clip_grad_norm_(trained, options.max_norm)
        lr = float(optimizer.param_groups[0]["lr"])
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()

        last, stopping = step == steps, stop.check() and step % objective.repeats == 0
        if step % options.log_every == 0 or last:
            loss = mean_over_ranks(loss)
            means = mean_metrics(metrics)
            epochs = data.passed / (len(data) * data.ranks * data.batch_size)
            values = {"loss": loss.item(), "lr": lr, "epoch": data.epoch, **means}
            values |= {} if norm is None else {"norm": norm.item()}
            values |= {"loss_scale": scaler.get_scale()} if scaler.is_enabled() else {}
            log.write(step, epochs=epochs, **values, **log.rates())
        if tests is not None and (step % options.eval_every == 0 or last):
            log.write(step, **evaluate(model, tests, device, objective))
            log.restart()
        if options.sample_prompt is not None and (step % options.eval_every == 0 or last):
            log.write(step, sample=sample(model, options.sample_prompt))
            log.restart()
        if step % options.save_every == 0 or last or stopping:
            if saving is not None:
                saving.result()  # raises if the previous save failed
            checked = loss if norm is None else norm
            # One overflow halves the loss scale; below 1 it is none of the scale.
            if not math.isfinite(checked) and not (scaler.is_enabled() and scaler.get_scale() >= 1):
                raise ValueError(
                    f"train: the {'loss' if norm is None else 'norm of the gradients'} must be finite to save step "
                    f"{step}, got {checked.item()}. Resume from the last checkpoint with a lower lr, or inspect the "
                    "data of that step."
                )
            parts = (optimizer, scheduler, loader, scaler)
            saving = save_state(output, step, model, *parts, background=True, keep=options.keep)
            log.restart()
        log.bar.update()
        if stopping:
            break
    stop.close()
    log.close()
    if saving is not None:
        saving.result()
    if stop.signal:
        say(f"Stopped after step {step} of {steps}, which is saved in {output}. The same command goes on from there.")
    else:
        if options.lora_r:
            save_adapter(model, output / "adapter", base=options.model)
        else:
            model.save_pretrained(output / "model", dtype=options.export_dtype)
        chat = bool(model.tokenizer.chat_template)
        say(*next_steps(output, model=options.model, adapters=options.lora_r > 0, chat=chat))
    if started:
        dist.destroy_process_group()
        if device.type == "cpu":  # Python aborts if it exits while a thread of gloo still frees a tensor
            time.sleep(0.2)
    stop.leave()


def computing_dtype(options: TrainOptions, device: torch.device) -> torch.dtype:
    """The dtype of the computation: bfloat16, or float16 if ``options.dtype`` is that or a GPU has no bfloat16.

    Raises:
        ValueError: ``options.dtype`` is bfloat16 on such a GPU.
    """
    has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if not has_bfloat16 and options.dtype == "bfloat16":
        raise ValueError(
            "train: dtype must be float16 or float32 on a GPU without bfloat16, got bfloat16. Use float16."
        )
    return torch.bfloat16 if has_bfloat16 and options.dtype != "float16" else torch.float16


def load_model(options: TrainOptions, device: torch.device, mesh: DeviceMesh, computed: torch.dtype) -> CausalLM:
    """The model, sharded over the ranks, with adapters if ``options`` asks for them; it computes in ``computed``."""

    def shard(model: CausalLM) -> CausalLM:
        if options.tensor_parallel > 1:
            model = apply_tp(model, mesh["shared"], sequence_parallel=True)
            return apply_fsdp(model, mesh["dp"], param_dtype=computed)
        return apply_fsdp(apply_cp(model, mesh["shared"]), param_dtype=computed)

    given: dict[str, Any] = {"dtype": options.dtype, "device": device}
    if options.lora_r == 0 and options.dtype == "float16":  # which would lose small updates
        given["dtype"] = torch.float32
    if options.lora_r == 0:
        return load_by_name(options.model, shard=shard, **given)
    alpha = 2 * options.lora_r if options.lora_alpha is None else options.lora_alpha

    def adapt(model: CausalLM) -> CausalLM:
        targets: Sequence[str] | str = options.lora_targets or "all-linear"
        if model.visual is not None and not options.lora_tower:
            targets = language_targets(model, targets)
        sizes: dict[str, Any] = {"r": options.lora_r, "lora_alpha": alpha, "lora_dropout": options.lora_dropout}
        if options.lora_experts:
            sizes["target_parameters"] = EXPERTS
        return apply_lora(model, LoRAConfig(target_modules=targets, **sizes))

    if any(getattr(options, name) for name in STORED):
        kept, alone = options.lora_keep_float8, dist.get_world_size() == 1

        def shard_quantised(model: CausalLM) -> CausalLM:
            model = adapt(model)
            if not kept:
                quantize_base(model, dtype="nf4" if options.lora_4bit else "float8")
            return model if alone else shard(model)

        return load_by_name(options.model, shard=shard_quantised, keep_float8=kept, **given)
    return load_by_name(options.model, shard=lambda model: shard(adapt(model)), **given)


def load_frozen(name: str, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """A reference model or teacher, without gradients, sharded over all ranks, in the dtype in which it computes."""
    shard = partial(apply_fsdp, param_dtype=dtype)
    model = load_by_name(name, shard=shard, dtype=dtype, device=device)
    return model.requires_grad_(False).eval()


def estimate_step(options: TrainOptions, model: CausalLM) -> TrainingMemory:
    """The estimate of the memory of a step on this rank."""
    tokens = options.batch_size * options.length // options.sharing
    kinds = {"four_bit": options.lora_4bit, "float8": options.lora_float8, "moments_8bit": options.moments_8bit}
    return estimate(model, tokens, muon=options.optimizer == "muon", **kinds)


def plan_step(options: TrainOptions, model: CausalLM, budget: int, computed: torch.dtype) -> MemoryPlan:
    """The fastest step within a budget in bytes, the same on all ranks.

    The optimizer steps in the backward only where nothing needs all gradients: without clipping (``max_norm`` inf),
    accumulation and a loss scale. Muon's momentum stays on the device, and it needs whole gradients.
    """
    estimated = [estimate_step(options, model)]
    dist.broadcast_object_list(estimated)  # shards of rank 0 are the largest
    tokens = options.batch_size * options.length // options.sharing
    adamw = options.optimizer == "adamw"
    free = adamw and options.max_norm == math.inf and options.accumulate == 1 and computed != torch.float16
    return plan_memory(
        model, tokens, budget, memory=estimated[0], length=options.length, accumulate=options.accumulate,
        checkpointing=options.checkpointing, host_moments=adamw and model.device.type == "cuda", in_backward=free,
    )  # fmt: skip


def bound_images(model: CausalLM, max_pixels: int | None) -> None:
    """Set the most pixels of an image, if they are given.

    Raises:
        ValueError: the model's images have no such bound.
    """
    if max_pixels is None:
        return
    images: Any = model.processor.images if isinstance(model, VisionLanguageModel) else None
    if not hasattr(images, "max_pixels"):
        raise ValueError(
            f"train: max_pixels is a bound on images of Qwen-VL, got {type(model.config).__name__}. Leave it out."
        )
    images.max_pixels = max_pixels


def freeze_images(model: CausalLM) -> None:
    """Freeze the parameters that only images use. If sharded they get zero gradients, and weight decay shrinks them."""
    unreached = [layer for layer in layers_of(model.layers) if layer.needs_images]
    for module in [*unreached, *([] if model.visual is None else [model.visual])]:
        module.requires_grad_(False)


def make_optimizer(model: CausalLM, options: TrainOptions, plan: MemoryPlan | None) -> LigerAdamW:
    """The optimizer that ``options`` name, with the trained parameters in groups and its moments where planned."""
    rounding = options.dtype == "bfloat16"
    if options.optimizer == "muon":
        lr = options.lr if options.muon_lr is None else options.muon_lr
        return LigerMuon(model, lr, options.weight_decay, adamw_lr=options.lr, stochastic_rounding=rounding)
    return LigerAdamW(
        parameter_groups(model, options), lr=options.lr, betas=(0.9, 0.95), stochastic_rounding=rounding,
        state_dtype=torch.int8 if options.moments_8bit else None, offload=plan.moments(model) if plan else (),
    )  # fmt: skip


def parameter_groups(model: CausalLM, options: TrainOptions) -> list[dict[str, Any]]:
    """The trained parameters in the optimizer's groups: matrices, vectors without weight decay, and B of LoRA+."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ratio = options.lora_plus_ratio
    raised = {name: each for name, each in trained.items() if ratio and name.endswith("lora_B")}
    plain = [each for name, each in trained.items() if name not in raised]
    decayed: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    groups = [
        {**decayed, "params": [each for each in plain if each.dim() > 1]},
        {**decayed, "params": [each for each in plain if each.dim() == 1], "weight_decay": 0.0},
    ]
    if ratio is not None:
        groups.append({**decayed, "params": [*raised.values()], "lr": options.lr * ratio})
    return groups


@torch.no_grad()
def evaluate(model: CausalLM, data: PackedDataset, device: torch.device, objective: Objective) -> dict[str, float]:
    """The metrics of all batches on all ranks, such as ``eval_loss``, without mixtures' auxiliary losses."""
    model.eval()
    data.set_epoch(0)
    total = Metrics()
    for batch in data:
        add_metrics(total, objective.evaluate(model, to_device(objective.batch(model, batch), device, model)))
    reshard(model)
    model.train()
    return mean_metrics(total, "eval_")


def endless(loader: PackedLoader) -> Iterator[Batch]:
    """The batches of all epochs, without end."""
    while True:
        yield from loader


def to_device(batch: Batch, device: torch.device, model: CausalLM) -> Batch:
    """Copy a batch to the device asynchronously.

    Raises:
        ValueError: a token id is not in the model's vocabulary.
    """
    words, largest = model.embed_tokens.num_embeddings, int(batch["input_ids"].max())
    if not largest < words:
        raise ValueError(
            f"train: token ids must be less than the model's vocab_size ({words}), got {largest}. Were tokens added to "
            "the tokenizer, but not to the embedding?"
        )
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def cosine(step: int, warmup: int, steps: int, floor: float) -> float:
    """Factor of the peak learning rate: a linear warm-up to 1, then a cosine decay to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def main(arguments: Sequence[str] | None = None, command: str | None = None) -> None:
    """Read the options and train. Exits with 130 or 143 if SIGINT or SIGTERM has stopped it."""
    options = read_options(TrainOptions, arguments, command)
    try:
        train(options)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
