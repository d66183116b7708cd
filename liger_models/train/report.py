"""The screen output of a training run: the banner, log lines, generated samples, and the final hints."""

import math
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.tqdm import tqdm
from torch import Tensor

from liger_models.adapters.lora import apply_lora
from liger_models.adapters.lora_layers import adapter_config
from liger_models.adapters.quantize import quantized_bytes, quantized_experts, quantized_layers
from liger_models.arch.auto import AutoLigerModel
from liger_models.base.causal_lm import CausalLM
from liger_models.common.printable import printable
from liger_models.distributed.ranks import rank
from liger_models.generation.options import resolve
from liger_models.kernels.optimizer.moments import moment_bytes
from liger_models.layers.frozen import frozen_parts, frozen_weights
from liger_models.layers.linear import is_sharded, local
from liger_models.memory.estimate import TrainingMemory, training_memory, with_parameters
from liger_models.parallel.gathered import reshard
from liger_models.train.moments import moment_dtype
from liger_models.train.objective_options import make_objective
from liger_models.train.train_options import STORED, TrainOptions

WIDTH = 100
"""Maximum number of characters in a line."""
FEW_STEPS, LARGE_STEP = 50, 1 / 20
"""A run prints a warning if it has fewer steps than the first value, or if a step uses a larger share of the data
than the second value."""
HEADER_EVERY = 25
"""Number of lines after which the column names are repeated."""
SAMPLE_TOKENS = 64
"""Number of tokens of a generated sample."""
COLUMNS = {"epoch": 6, "loss": 8, "lr": 8, "norm": 8, "loss_scale": 8, "tokens_per_s": 9, "mfu": 5, "memory_gib": 9}
COLUMNS |= {"eta": 10}
"""Maps the names of logged values to the widths of their columns. Other values have no column."""
HEADERS = {"loss_scale": "scale", "tokens_per_s": "tokens/s", "mfu": "MFU", "memory_gib": "memory", "eta": "ETA"}


def say(*lines: str) -> None:
    """Print lines on rank 0, above the progress bar."""
    if rank() == 0:
        # Characters that the terminal can't show must not end a run.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        lines = tuple(printable(line).encode(encoding, "replace").decode(encoding) for line in lines)
        with tqdm.external_write_mode():
            print(*lines, sep="\n", flush=True)


class Lines:
    """Converts entries of the log to the lines that are printed on the screen.

    The values in `COLUMNS` are printed as a row of a table. All other values follow on separate lines, with their
    names. A line has at most `WIDTH` characters.

    Args:
        start: number of finished steps.
        steps: number of all steps of the run, for the estimate of the remaining time.
    """

    def __init__(self, start: int, steps: int) -> None:
        self.start, self.steps, self.begin = start, steps, time.perf_counter()
        self._columns: list[str] = []
        self._printed = 0

    def make(self, step: int, values: Mapping[str, float | str]) -> list[str]:
        """Return the lines to print for one entry of the log."""
        position = f"{step}/{self.steps}".rjust(2 * len(str(self.steps)) + 1)
        lines = []

        # Values with a column. The column names are printed again if they have changed or are many lines above.
        if "loss" in values:
            seconds = (time.perf_counter() - self.begin) / (step - self.start) * (self.steps - step)
            row = {**values, "eta": duration(seconds)}
            columns = [name for name in COLUMNS if name in row]
            if columns != self._columns or self._printed % HEADER_EVERY == 0:
                names = [HEADERS.get(name, name).rjust(COLUMNS[name]) for name in columns]
                lines.append("  ".join(["step".rjust(len(position)), *names]))
                self._columns, self._printed = columns, 0
            self._printed += 1
            texts = [_text(name, row[name]).rjust(COLUMNS[name]) for name in columns]
            lines.append("  ".join([position, *texts]))
            values = {name: value for name, value in values.items() if name not in COLUMNS}
            position = " " * len(position)

        # Other values, with their names.
        if values:
            named = (f"{name.replace('_', ' ')} {_text(name, value)}" for name, value in values.items())
            lines += [f"{position}  {line}" for line in _fold(named, WIDTH - len(position) - 2)]
        return lines


def duration(seconds: float) -> str:
    """Format seconds as "0:01:02" or "3d 4:05:06"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d " * bool(days) + f"{hours}:{minutes:02}:{rest:02}"


def _text(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    formats = {"epoch": ".2f", "lr": ".2e", "norm": ".3g", "tokens_per_s": ",.0f", "mfu": ".0%"}
    if name == "memory_gib":
        return f"{value:.1f} GiB"
    return format(value, formats.get(name, ".4f" if abs(value) < 1000 else ".3g"))


def _fold(parts: Iterator[str], width: int) -> list[str]:
    """Join parts into lines of at most ``width`` characters.

    A part that is too long or has several lines is wrapped.
    """
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines += [row for line in part.splitlines() for row in textwrap.wrap(line, width) or [""]]
    return lines


def banner(
    model: CausalLM, options: TrainOptions, *, ranks: int, memory: float | None, start: int, steps: int, epochs: float
) -> list[str]:
    """Return the first lines that a run prints.

    Args:
        model: the model as it is trained.
        options: the options of the run.
        ranks: number of processes.
        memory: estimated memory on each device in bytes; None if there is no estimate.
        start, steps: number of finished steps, and total number of steps.
        epochs: number of passes through the data in ``steps``.
    """
    # Parameters, rows of a step, and the name and memory of the device.
    length, sharing, device = options.length, options.sharing, model.device
    parameters = model.num_parameters()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    sequences = options.batch_size * options.accumulate * (ranks // sharing)
    device_name, total = "CPU", 0
    if device.type != "cpu":
        device_name = torch.get_device_module(device).get_device_name()
        total = torch.get_device_module(device).get_device_properties(device).total_memory
    begin = f"resumed after step {start:,}" if start else "from the start"

    # What is trained and how. Defaults that the user did not choose are marked.
    default = {name: " (default)" if value is None else "" for name, value in options.given.items()}
    if default["objective"] and options.objective != "sft":
        default["objective"] = " (recognized by the columns of the data)"
    if default["dtype"] and options.lora_r:
        default["dtype"] = " (the checkpoint's)"
    default["output"] = " (default; to resume the run, name it with --output)" if default["output"] else ""
    weights = f"adapters of rank {options.lora_r} on weights" if options.lora_r else "all weights"
    stored = next((name for name in STORED if getattr(options, name)), None)
    stored = "" if stored is None else f", {stored}"
    batch = f"{sequences:,} sequences of {length:,} tokens: {sequences * length:,} tokens a step"
    if not make_objective(options).generates:
        batch = f"{sequences:,} examples of texts of up to {length:,} tokens"
    parts = {
        "model": f"{options.model} ({type(model).__name__.removeprefix('FSDP')})",
        "parameters": f"{parameters:,}, of which {trained:,} ({trained / parameters:.2%}) are trained",
        "objective": f"{options.objective}{default['objective']}",
        "training": f"{weights} in {options.dtype}{default['dtype']}{stored}",
        "optimizer": f"{options.optimizer}, lr {options.lr:g}{default['lr']}",
        "batch": batch,
        "devices": f"{ranks} x {device_name}" + f", {sharing} of which share a batch" * (sharing > 1),
        "memory": None if memory is None else f"about {memory / 2**30:.1f} of {total / 2**30:.1f} GiB (estimate)",
        "output": f"{Path(str(options.output))}{default['output']}",
        "steps": f"{steps:,} ({epochs:.2f} epochs), {begin}",
    }
    return [f"{part:<10}  {text}" for part, text in parts.items() if text is not None]


def estimate(
    model: CausalLM,
    tokens: int,
    *,
    four_bit: bool = False,
    float8: bool = False,
    moments_8bit: bool = False,
    muon: bool = False,
) -> TrainingMemory:
    """Estimate the memory of a step on this rank's device, for a model that FSDP shards.

    Parameters, gradients and the optimizer's moments are counted at their size on this rank. Activations, the head, and
    the weights that FSDP gathers (embedding, head, two blocks) are counted in bfloat16, the dtype of the computation.
    Quantized weights are counted at their stored size. The estimate includes the temporary tensors of one matrix
    product with a quantized weight. If the quantized weight is in 4 bits, belongs to experts, or is kept as in the
    checkpoint (``keep_quantized``), the only temporary tensor is the dequantized weight. For any other float8 weight,
    the temporary tensors are the transposed weight and the rounded rows of the input. On one device, nothing is
    gathered.

    Args:
        model: the model as it is trained, but not sharded by `apply_tp`. It may be on the meta device.
        tokens: number of tokens in a batch on this rank.
        four_bit: whether experts and weights with adapters are counted at 4 bits per element, as after `quantize_base`.
        float8: whether the same weights are counted in float8, as after ``quantize_base(model, dtype="float8")``.
        moments_8bit: whether moments are counted at 8 bits per element, as with ``LigerAdamW(state_dtype=torch.int8)``.
        muon: whether the optimizer is `LigerMuon`, which has one momentum for each matrix.
    """
    # The memory of activations and the head is estimated with an unsharded model on the meta device.
    empty, adapters = model, adapter_config(model)
    if model.device.type != "meta" or frozen_weights(model):
        empty = AutoLigerModel.from_config(model.config, device="meta", kernels=model.kernels)
        if adapters is not None:
            apply_lora(empty, adapters)
    step = training_memory(empty, tokens, torch.bfloat16)
    name = "nf4" if four_bit else "float8" if float8 else None
    frozen = frozen_weights(model).values()

    # Weights that are still dense, but are counted at the size at which `quantize_base` will store them.
    pending: set[Any] = set()
    if name is not None:
        pending = {layer.weight for layer in quantized_layers(model) if not frozen_parts(layer)}
        pending |= {weight for weight in quantized_experts(model) if isinstance(weight, Tensor)}
    matrices = {*model.hidden_matrices().values()} if muon else set()

    def bytes_of(parameter: Any) -> int:
        if name is not None and parameter in pending:
            return quantized_bytes(parameter, name)
        return int(local(parameter).nbytes)

    def moments(parameter: Any) -> list[int]:
        if parameter in matrices:
            return [bytes_of(parameter)]
        return moment_bytes(local(parameter).shape, moment_dtype(parameter, torch.int8 if moments_8bit else None))

    # FSDP gathers embedding, head and two blocks in bfloat16.
    sharded = any(map(is_sharded, model.parameters()))
    ends = {id(weight): weight.numel() for weight in (empty.embed_tokens.weight, empty.lm_head.weight)}
    gathered = 2 * (sum(ends.values()) + 2 * max(sum(p.numel() for p in block.parameters()) for block in empty.layers))

    # On one device, nothing is gathered, but the product with a weight in the checkpoint's own format needs the dense
    # weight.
    kept = [weight.shape.numel() for weight in frozen if weight.format.is_kept]
    if kept and not sharded:
        gathered = 2 * max(kept)

    # Quantized weights are gathered as they are stored.
    if name is not None:
        layers, experts = quantized_layers(empty), quantized_experts(empty)
        # Only FSDP gathers quantized experts. After apply_ep and apply_tp, experts stay on their ranks.
        of_ranks = [weight for weight in frozen if len(weight.shape) == 3]
        by_fsdp = sharded and any(weight.sharded is None for weight in of_ranks)
        stored: dict[Any, int] = {layer.weight: quantized_bytes(layer.weight, name) for layer in layers}
        stored |= {weight: quantized_bytes(weight, name) if by_fsdp else 0 for weight in experts}
        saved = [
            sum(2 * parameter.numel() - stored[parameter] for parameter in block.parameters() if parameter in stored)
            for block in empty.layers
        ]
        gathered = gathered - 2 * max(saved) if sharded else 0

        # A product with experts or with a 4-bit weight needs the dense weight. A product with a float8 weight needs the
        # transposed weight and the rounded rows of the input.
        made = [2 * math.prod(weight.shape if by_fsdp else weight.local_shape) for weight in of_ranks]
        made += [2 * local(weight).numel() for weight in quantized_experts(model) if isinstance(weight, Tensor)]
        if layers:
            shapes = [layer.weight.shape for layer in layers]
            largest = max(shape.numel() for shape in shapes)
            made.append(2 * largest if four_bit else largest + tokens * max(map(max, shapes)))
        gathered += max(made, default=0)
    of_rank = with_parameters(step, model, {each: bytes_of(each) for each in model.parameters()}, moments)
    return of_rank._replace(temporary=gathered)


def warn_of_few_steps(options: TrainOptions, steps: int, share: float, ranks: int) -> str | None:
    """Return a warning if the run has few steps or a step uses a large share of the data; otherwise None.

    Args:
        options: the options of the run.
        steps: number of steps of the whole run.
        share: share of the data that one step uses.
        ranks: number of processes.
    """
    is_short, is_large = steps < FEW_STEPS, share > LARGE_STEP
    if not is_short and not is_large:
        return None
    sequences = options.batch_size * options.accumulate * (ranks // options.sharing)
    unit = "examples" if make_objective(options).compares else f"sequences of {options.length:,} tokens"
    step = f"a step of {sequences} {unit} takes {share:.0%} of the data"
    reasons = [f"the run has only {steps} steps"] * is_short + [step] * is_large

    # Name the options to change: the size of a step if it is too large, the number of steps if it is too small.
    sizes = {name: getattr(options, name) for name in ("accumulate", "batch_size")}
    sizes = {name: size for name, size in sizes.items() if size > 1} or {"length": options.length}
    advice = [f"lower {' or '.join(f'{name} ({size})' for name, size in sizes.items())}"] * is_large
    more = f"epochs ({options.epochs:g})" if options.steps is None else f"steps ({options.steps})"
    advice += [f"raise {more}"] * is_short
    return f"warning: {', and '.join(reasons)}. So few updates often learn little: {', or '.join(advice)}."


def check_turn_end(model: CausalLM) -> str | None:
    """Return a warning if the chat template ends an answer with a token that is not a stop token; otherwise None."""
    # If the last token of an answer is a special token, it must be a stop token.
    tokenizer = model.tokenizer
    if not tokenizer.chat_template:
        return None
    try:
        messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        text, spans = tokenizer.render_answers(messages)
    except ValueError:  # the template does not support this conversation
        return None
    if not spans:
        return None
    ids = tokenizer.encode(text[slice(*spans[-1])], add_special_tokens=False)
    token = tokenizer.backend.get_added_tokens_decoder().get(ids[-1]) if ids else None
    stops = resolve(model, 1, {}).eos_token_id
    if token is None or ids[-1] in stops:
        return None
    return (
        f"warning: the chat template ends an answer with {token.content} ({ids[-1]}), which is not a stop token "
        f"({', '.join(map(str, stops)) or 'there is none'}). A model trained on conversations will not stop there: add "
        f"{ids[-1]} to eos_token_id in the checkpoint's generation_config.json."
    )


def sample(model: CausalLM, prompt: str) -> str:
    """Greedily generate the continuation of a prompt or, if there is a chat template, the answer to the prompt.

    If the model is sharded, every rank must call this function. All ranks generate the same number of tokens, so that
    no rank waits for a rank that has stopped. Tokens after a stop token are removed from the result.
    """
    tokenizer: Any = model.tokenizer
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    else:
        ids = tokenizer.encode(prompt)
    with torch.compiler.set_stance("force_eager"):  # compiled blocks would recompile as the length grows
        row = model.generate(ids, max_new_tokens=SAMPLE_TOKENS, do_sample=False, eos_token_id=[], stop_strings=[])
    reshard(model)
    tokens = row[0, len(ids) :].tolist()
    stops = resolve(model, 1, {}).eos_token_id
    end = next((index for index, token in enumerate(tokens) if token in stops), len(tokens))
    text: str = tokenizer.decode(tokens[:end])
    return text


def next_steps(output: Path, *, model: str, adapters: bool, chat: bool, generates: bool = True) -> list[str]:
    """Return the last lines that a run prints. These lines name the exported files and the commands that use them."""
    folder = output / ("adapter" if adapters else "model")
    result = [model, "--adapter", str(folder)] if adapters else [str(folder)]
    commands = {}
    if generates:
        commands["generate"] = ["liger-models", "generate", *result, *["--chat"] * chat, "Hello"]
    if adapters:
        merged = output / "model"
        commands["merge"] = ["liger-models", "merge", model, str(folder), str(merged)]
    else:
        commands["convert"] = ["liger-models", "convert", str(folder), f"{folder}-fp16", "--dtype", "fp16"]
    commands["push"] = ["hf", "upload", "USER/NAME", str(folder)]
    return [
        f"The {'adapters are' if adapters else 'model is'} in {folder}.",
        *(f"  {name + ':':<9} {shlex.join(command)}" for name, command in commands.items()),
    ]
