"""A few layers of each family at real width: full fine-tuning steps, their lower bound in time, and errors in bf16.

The lower bound, called the floor, is a time that no step can beat with the matrix products and the attention of
today's libraries. It is the sum of three times: matrix products at the rate of a large product, causal attention at
cuDNN's rate, and AdamW's reads and writes at the speed of a copy. All three speeds are measured in the same run. The
floor counts the layers of this package, for text only.
"""

import argparse
import gc
import statistics
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import train
from .ops.measure import ceilings, milliseconds
from .options import add_batch, add_modes, add_steps, several
from .processes import measure_all, plan_modes
from .rows import Row, Rows, grouped, of_transformers
from .tables import Bar, markdown, ratio, smallest, speed_bars, step_ms, tokens
from .training.batches import draw
from .training.build import build_hf
from .training.job import Job
from .training.models import FAMILIES, read_config
from .training.modes import MODE, title

HELP = "a few layers of each family: speed, memory, floor of the time, error against fp32"
ERROR_TOKENS = {"idefics3": 8192, "internvl": 8192, "llava_next": 4096, "smolvlm": 4096}
"""Maps a family whose images need more than 1024 tokens to the number of tokens with which errors are measured."""
HEADS, HEAD_DIM = 32, 128
"""Number of heads and head size of the attention that is measured for the floor."""
ADAMW_PASSES = 7
"""AdamW reads four tensors of the size of the weights (weights, gradients, two moments) and writes three of them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--families", type=several("|".join(FAMILIES)), default=",".join(FAMILIES), help="comma-separated"
    )
    modes = 'comma-separated, as for train, and "floor" and "error"'
    add_modes(parser, "floor,hf,hf+liger,ours,ours+adamw,error", f"{MODE}|floor|error", modes)
    add_batch(parser)
    add_steps(parser, 10, train.STEPS_HELP)


def run(options: argparse.Namespace) -> Rows:
    file = options.out / f"families-{options.batch}.jsonl"
    plans = plan_modes("families", options.families, options.modes, options.batch, options.steps, file)
    return measure_all([plan for plan in plans if plan.row["mode"] != "floor" or is_text(plan.row["model"])])


def is_text(family: str) -> bool:
    return "vision_config" not in read_config(family)


def measure(job: Job) -> Row:
    others = {"error": measure_errors, "floor": measure_floor}
    return others.get(job.mode.library, train.measure)(job)


def measure_floor(job: Job) -> Row:
    """The milliseconds of the floor's three parts and of their sum, and the measured speeds."""
    B, T = job.shape
    work = work_of_step(read_config(job.model), B, T)
    speeds = ceilings("cuda")
    speeds["attention_tflops"] = attention_tflops(B, T, "cuda")
    parts = {
        "products_ms": work["products"] / speeds["matmul_tflops"] / 1e9,
        "attention_ms": work["attention"] / speeds["attention_tflops"] / 1e9,
        "optimizer_ms": work["optimizer_bytes"] / speeds["copy_gbs"] / 1e6,
    }
    return {name: round(ms, 2) for name, ms in {"floor_ms": sum(parts.values()), **parts}.items()} | speeds


def work_of_step(config: dict[str, Any], B: int, T: int) -> dict[str, float]:
    """The operations of matrix products and of attention in forward and backward, and the bytes that AdamW moves."""
    from liger_models import AutoLigerModel
    from liger_models.layers.layer import layers_of
    from liger_models.train.metrics import flops

    model = AutoLigerModel.from_config(config, dtype=torch.bfloat16, device="meta")
    batch = {"input_ids": torch.empty(B, T, dtype=torch.int64), "cu_seqlens": torch.arange(B + 1) * T}
    lengths = torch.full((B,), float(T), dtype=torch.float64)
    specs = [layer.attention for layer in layers_of(model.layers)]
    attention = 3.0 * sum(spec.pair_flops * spec.pairs(lengths).sum().item() for spec in specs if spec is not None)
    return {
        "products": flops(model, [batch]) - attention,
        "attention": attention,
        "optimizer_bytes": float(ADAMW_PASSES * sum(weight.nbytes for weight in model.parameters())),
    }


def attention_tflops(B: int, T: int, device: str) -> float:
    """TFLOP/s of causal attention in bf16, forward and backward; on a GPU, with cuDNN."""
    shape = (B, HEADS, T, HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step(_: Any) -> Any:
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), upstream)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if device == "cuda" else SDPBackend.MATH):
        ms = statistics.median(milliseconds(lambda: None, step, device))
    return round(3 * 4 * B * HEADS * HEAD_DIM * T**2 / 2 / ms / 1e9, 1)


def gradients_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def measure_errors(job: Job) -> Row:
    """Relative errors of logits, and of all gradients together, in bf16 compared with transformers in fp32.

    transformers and this package have the same weights.
    """
    from liger_models import AutoLigerModel

    config = read_config(job.model)
    # Eager attention keeps all attention scores, which needs too much memory for image patches.
    attention = None if "vision_config" in config else "eager"
    theirs = build_hf(config, liger=False, recompute=False, attention=attention)

    # Logits and gradients of both libraries in bf16.
    batch = draw(config, 1, ERROR_TOKENS.get(job.model, 1024), torch.Generator("cuda").manual_seed(0))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = AutoLigerModel.from_pretrained(folder, device="cuda", progress=False)
        for label, model in (("hf", theirs), ("ours", ours)):
            out = model(**batch, **({"return_logits": True} if model is ours else {}))
            out.loss.backward()
            results[label] = (out.logits.detach().cpu(), gradients_by_name(model))
            del out

        # Save our gradients as weights and load them, so that they get transformers' names.
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        ours.save_pretrained(folder)
        named = type(theirs).from_pretrained(folder, dtype=torch.bfloat16)
        results["ours"] = (results["ours"][0], {n: p.detach().to("cuda") for n, p in named.named_parameters()})
    del ours, named

    # Logits and gradients in fp32. `float` converts the model in place, so clone its gradients before.
    truth = theirs.float()
    results["hf"] = (results["hf"][0], {n: g.clone() for n, g in results["hf"][1].items()})
    truth.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    out = truth(**batch)
    out.loss.backward()
    logits, exact = out.logits.detach().cpu(), gradients_by_name(truth)

    # The errors.
    row = {}
    for label, (approximate, gradients) in results.items():
        squares = sum(((gradients[n].float() - g).double().norm() ** 2).item() for n, g in exact.items())
        total = sum((g.double().norm() ** 2).item() for g in exact.values())
        row[f"{label}_logits"] = ((approximate.float() - logits).norm() / logits.norm()).item()
        row[f"{label}_gradients"] = (squares / total) ** 0.5
    return row


def by_family(rows: Rows) -> dict[str, Rows]:
    """Map the name of a family to its rows, in order. The name includes the batch if there are several batches.

    If a family has a run with only `LigerAdamW` and another run with torch's AdamW, the former gets a separate name.
    """
    groups = sorted(grouped(rows, "model", "batch").items())
    several_batches = len({batch for (_, batch), _ in groups}) > 1
    families = {}
    for (model, batch), group in groups:
        name = f"{model}, {tokens(batch)}" if several_batches else model
        # A row of mode "error" already compares both libraries.
        runs = grouped([row for row in group if row["mode"] != "error"], "run")
        alone = [run for run in runs.values() if len(runs) > 1 and all(row["mode"] != "ours" for row in run)]
        apart = [row for run in alone for row in run]
        families[name] = [row for row in group if row not in apart]
        if apart:
            families[f"{name}, LigerAdamW"] = apart
    return families


def table(rows: Rows) -> str:
    """One line per family. Speed is relative to the faster peer, memory to the peer that needs less.

    Cells without a measurement are empty.

    All libraries step with torch's fused AdamW, and this package also with `LigerAdamW`. Memory and first step are
    measured with torch's AdamW unless only `LigerAdamW` was measured. The share is the floor divided by the shorter
    of this package's step times.
    """
    # Each cell shows what a mode measured, or that it failed.
    lines = []
    for family, group in by_family(rows).items():
        by_mode = {row["mode"]: row for row in group}
        peers = [row for row in group if of_transformers(row) and "error" not in row]
        ours, adamw, warm = (by_mode.get(mode, {}) for mode in ("ours", "ours+adamw", "ours+warm"))
        error = by_mode.get("error")
        floor = by_mode.get("floor", {}).get("floor_ms", "")
        theirs, own = [by_mode.get(mode, {}) for mode in ("hf", "hf+liger")], ours or adamw
        warmed = f" ({warm.get('first_step_s', 'failed')})" if warm else ""

        def show(key: str, *measured: Row) -> list[str]:
            return [str(row.get(key, "failed")) if row else "" for row in measured]

        def pair(quantity: str, error: Row | None = error) -> str:
            values = [error.get(f"{library}_{quantity}") for library in ("hf", "ours")] if error else []
            return " / ".join("failed" if value is None else f"{value:.2e}" for value in values)

        least_memory = smallest(peers, lambda row: row.get("peak_gib"))
        least_ms = smallest(peers, step_ms).get("step_ms")
        lines.append((
            family, *show("step_ms", *theirs, ours), ratio(least_ms, ours.get("step_ms")),
            *show("step_ms", adamw), ratio(least_ms, adamw.get("step_ms")),
            floor, ratio(floor, smallest([ours, adamw], step_ms).get("step_ms")),
            *show("peak_gib", *theirs, own), ratio(own.get("peak_gib"), least_memory.get("peak_gib")),
            " / ".join(show("first_step_s", *theirs, own)) + warmed, pair("logits"), pair("gradients"),
        ))  # fmt: skip
    return markdown(
        "family|HF ms|HF + Liger ms|ours ms|speed ratio|with LigerAdamW ms|speed ratio|floor ms|share of floor"
        "|HF GiB|HF + Liger GiB|ours GiB|memory ratio"
        "|first step s, HF / HF + Liger / ours (after warm_up)|logits error, HF / ours"
        "|gradients error, HF / ours",
        lines,
    )


def bars(rows: Rows) -> list[Bar]:
    return speed_bars(by_family(rows), step_ms, title)
