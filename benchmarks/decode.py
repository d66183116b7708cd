"""Greedy decoding: the time of a step, which adds a token to each row, and the time needed to read the weights."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .clock import seconds
from .ops.measure import ceilings
from .options import add_batch, add_model, add_modes, add_steps
from .processes import measure_all, on_gpus, plan_batch
from .rows import Row, Rows
from .tables import markdown, tokens
from .training.build import build
from .training.job import Job
from .training.models import read_config
from .training.modes import Mode, title

HELP = "decoding: milliseconds a token, beside the time to read the weights"
MODES = r"hf(\+static)?|ours(\+lora)?(\+nf4|\+float8)?|ours\+tp[1-9][0-9]*"
REPEATS = 5
"""Number of timed calls. Before them, an untimed call compiles, captures and tunes kernels."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "llama-3.2-3b")
    add_modes(
        parser, "hf,hf+static,ours", MODES,
        "comma-separated, of hf, hf+static and ours, ours with +lora, +nf4 or +float8, or +lora and one of these, and "
        "ours+tpK, tensor parallel over K GPUs",
    )  # fmt: skip
    add_batch(parser, "1x512", "prompts x tokens per prompt")
    add_steps(parser, 128, "new tokens")


def run(options: argparse.Namespace) -> Rows:
    plans = plan_batch("decode", options)
    gpus = [Mode.parse(plan.row["mode"]).extras.get("tp") for plan in plans]
    return measure_all([on_gpus(plan, number) if number else plan for plan, number in zip(plans, gpus, strict=True)])


def generating(job: Job, config: dict[str, Any]) -> Callable[[int], Tensor]:
    """A function that generates a given number of tokens for the same random prompts."""
    model: Any = build(config, job.mode).eval()
    if job.sharded:
        from liger_models.parallel import apply_tp

        apply_tp(model, init_device_mesh("cuda", (torch.distributed.get_world_size(),)))
        torch.manual_seed(0)  # the same prompts on all ranks
    prompts = torch.randint(5, config["vocab_size"] - 5, job.shape, device="cuda")
    options: dict[str, Any] = {"do_sample": False}
    if job.mode.library == "ours":
        options["eos_token_id"] = []
    else:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        options |= {"attention_mask": torch.ones_like(prompts), "use_cache": True}
        if "static" in job.mode:
            options["cache_implementation"] = "static"
    return lambda new: model.generate(prompts, max_new_tokens=new, **options)


def bytes_of_step(config: dict[str, Any], dtype: str | None = None, rows: int = 1) -> int:
    """Bytes of weights that a step reads, for one token in each of ``rows`` rows.

    Adapters do not count. The embedding counts only if it is also the head. In a mixture of experts, a step reads as
    many experts as the tokens choose on average if all experts are equally likely: K experts for one row. Weights are
    in bf16. With ``dtype`` "nf4" or "float8", the linear layers of the blocks and the experts are in this format.
    """
    from liger_models import AutoLigerModel
    from liger_models.adapters import apply_lora
    from liger_models.adapters.quantize import quantized_bytes, quantized_layers
    from liger_models.layers.moe import LigerMoE

    model = AutoLigerModel.from_config(config, device="meta")
    total = 2.0 * model.num_parameters(exclude_embeddings=not config.get("tie_word_embeddings"))
    for layer in model.modules():
        if isinstance(layer, LigerMoE):
            chosen = 1 - (1 - layer.active_share) ** rows
            for weight in layer.parameters(recurse=False):
                size = quantized_bytes(weight, dtype) if dtype and weight.dim() == 3 else 2 * weight.numel()
                total += chosen * size - 2 * weight.numel()
    if dtype is not None:
        weights = [layer.weight for layer in quantized_layers(apply_lora(model))]
        total -= sum(2 * weight.numel() - quantized_bytes(weight, dtype) for weight in weights)
    return round(total)


def cached_bytes(config: dict[str, Any], length: int) -> int:
    """Bytes that a step reads from or writes to the decode cache of one row with ``length`` tokens.

    Keys and values, or latents, are read once for each token in the window. States are both read and written. Recurrent
    states are in fp32, and everything else is in bf16.
    """
    from liger_models import AutoLigerModel
    from liger_models.layers.attention import LigerAttention
    from liger_models.layers.latent_attention import LigerLatentAttention
    from liger_models.layers.linear_attention import LinearAttention

    total = 0
    for layer in AutoLigerModel.from_config(config, device="meta").layers.modules():
        if isinstance(layer, LigerLatentAttention):
            total += 2 * length * (layer.kv_rank + layer.rope_dim)
        elif isinstance(layer, LigerAttention):
            total += 2 * min(length, layer.window or length) * 2 * layer.num_kv_heads * layer.head_dim
        elif isinstance(layer, LinearAttention):
            # The last inputs of the convolution, and the state of the recurrence in fp32.
            channels, _, width = layer.conv_weight.shape
            total += 2 * 2 * channels * (width - 1) + 2 * 4 * layer.state_elements
    return total


def measure(job: Job) -> Row:
    """Time a step: subtract the time for the prompts and one token from the time for N tokens, and divide by N − 1."""
    config = read_config(job.model)
    config["eos_token_id"] = None
    dtype = next((word for word in ("nf4", "float8") if word in job.mode), None)
    rows, prompt = job.shape
    # The bytes that a step reads on a GPU. The cache has the size that it has after half of the steps.
    gpus = job.mode.extras.get("tp") or 1
    weights = bytes_of_step(config, dtype, rows) / gpus
    read = weights + rows * cached_bytes(config, prompt + job.steps // 2) / gpus
    # Measure the speed of the device, then calls with N tokens and with one token.
    copy = ceilings("cuda", copied=2**31)["copy_gbs"]
    generate = generating(job, config)
    with torch.no_grad():
        first = seconds(lambda: generate(job.steps))
        torch.cuda.reset_peak_memory_stats()
        every = [seconds(lambda: generate(job.steps)) for _ in range(REPEATS)]
        peak = torch.cuda.max_memory_allocated()
        generate(1)
        prompts = statistics.median(seconds(lambda: generate(1)) for _ in range(REPEATS))
    times = [1e3 * (elapsed - prompts) / (job.steps - 1) for elapsed in every]
    step_ms = statistics.median(times)
    return {
        "new_tokens": job.steps,
        "step_ms": round(step_ms, 3),
        "step_ms_range": [round(min(times), 3), round(max(times), 3)],
        "floor_ms": round(weights / copy / 1e6, 3),
        "read_gb": round(read / 1e9, 3),
        "copy_share": round(read / copy / 1e6 / step_ms, 3),
        "prompts_ms": round(1e3 * prompts, 1),
        "first_call_s": round(first, 1),
        "peak_gib": round(peak / 2**30, 2),
    }


def table(rows: Rows) -> str:
    """One line per mode.

    ``floor_ms`` is the time the device needs to copy as many bytes as the weights that a step reads. ``copy_share``
    is the speed at which a step reads weights and cache, relative to the speed of this copy. Older rows do not have
    ``copy_share``.
    """
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), title(row["mode"]))
        if "error" in row:
            lines.append((*names, row["error"], *[""] * 7))
            continue
        rate = int(row["batch"].split("x")[0]) / row["step_ms"] * 1e3
        keys = ("floor_ms", "prompts_ms", "first_call_s", "peak_gib", "read_gb", "copy_share")
        lines.append((*names, row["step_ms"], f"{rate:,.0f}", *(row.get(key, "") for key in keys)))
    return markdown(
        "model|prompts||ms/step|tokens/s|weights alone, ms|prompts ms|first call s|peak GiB|read GB|share of copy",
        lines,
    )
