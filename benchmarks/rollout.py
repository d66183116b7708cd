"""Continuation of many prompts of unequal length: by `rollout`, and in batches by `generate` of both libraries.

The modes of `drafts` compare rollouts with and without drafts by a block for multi-token prediction.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import drafts
from .clock import peak_gib, seconds
from .options import add_batch, add_model, add_modes, add_steps
from .processes import measure_all, plan_batch, plan_modes
from .rows import Row, Rows
from .tables import markdown, ratio, tokens
from .training.build import build
from .training.job import Job
from .training.models import read_config

HELP = "rollouts of many prompts of unequal length: new tokens/s"
MODES = r"hf|ours(\+generate|\+drafts(\+hybrid)?)?"
ROWS = {"hf": 64, "ours+generate": 256}
"""Maps a mode to the number of rows in a batch of ``generate``."""
NAMES = {
    "hf": "transformers, generate in batches of 64",
    "ours+generate": "liger_models, generate in batches of 256",
    "ours": "liger_models, rollout",
}
SHORTEST_PROMPT, SHORTEST_ANSWER = 8, 4
"""Ratio of the longest to the shortest prompt, and of the longest to the shortest answer."""

Continue = Callable[[list[Tensor], list[int]], list[Tensor]]
"""A function that takes prompts and their numbers of new tokens, and returns the new tokens."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "llama-3.2-3b")
    add_modes(parser, "hf,ours+generate,ours", MODES, f"comma-separated, of {', '.join((*NAMES, *drafts.MODES))}")
    add_batch(parser, "256x512", "prompts x tokens of the longest; the shortest has an eighth")
    add_steps(parser, 512, "new tokens of the longest answer; the shortest has a quarter")


def run(options: argparse.Namespace) -> Rows:
    # Drafts are measured with a separate model and with several numbers of rows.
    drafting = [mode for mode in options.modes if mode in drafts.MODES]
    options.modes = [mode for mode in options.modes if mode not in drafting]
    file = options.out / "rollout-drafts.jsonl"
    return measure_all(
        plan_batch("rollout", options) + plan_modes("rollout", ["demo"], drafting, "", options.steps, file)
    )


def draw_prompts(vocabulary: int, count: int, longest: int, new: int) -> tuple[list[Tensor], list[int]]:
    """Random prompts [T] int64 on the CPU, and each prompt's number of new tokens, the same in every process."""
    generator, draw = torch.Generator().manual_seed(0), random.Random(0)
    # Prompts and answers have independent lengths.
    lengths = [draw.randint(max(longest // SHORTEST_PROMPT, 1), longest) for _ in range(count)]
    prompts = [torch.randint(5, vocabulary - 5, (length,), generator=generator) for length in lengths]
    return prompts, [draw.randint(max(new // SHORTEST_ANSWER, 1), new) for _ in range(count)]


def in_batches(model: Any, rows: int, **options: Any) -> Continue:
    """Greedy ``generate`` in batches of ``rows`` prompts, padded on the left. A batch ends with its longest answer."""

    def continue_batch(prompts: list[Tensor], limits: list[int]) -> list[Tensor]:
        # Pad ids and mask together.
        longest = max(map(len, prompts))
        padded = [
            nn.functional.pad(torch.stack([ids, torch.ones_like(ids)]), (longest - len(ids), 0)) for ids in prompts
        ]
        ids, mask = torch.stack(padded, 1).to(model.device)  # [B, T] each
        sequences = model.generate(ids, attention_mask=mask, max_new_tokens=max(limits), do_sample=False, **options)
        return [row[longest : longest + limit] for row, limit in zip(sequences.cpu(), limits, strict=True)]

    def continue_all(prompts: list[Tensor], limits: list[int]) -> list[Tensor]:
        starts = range(0, len(prompts), rows)
        batches = (continue_batch(prompts[at : at + rows], limits[at : at + rows]) for at in starts)
        return [answer for answers in batches for answer in answers]

    return continue_all


def continuing(model: Any, mode: str) -> Continue:
    """The function that a mode uses to continue prompts."""
    if mode == "ours":
        return lambda prompts, limits: [
            row.tokens for row in model.rollout(prompts, max_new_tokens=limits, do_sample=False, eos_token_id=[])
        ]
    if mode == "hf":
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return in_batches(model, ROWS[mode], use_cache=True)
    return in_batches(model, ROWS[mode], eos_token_id=[])


def measure(job: Job) -> Row:
    """Time the continuation of all prompts, after a few prompts that compile kernels."""
    if "drafts" in job.mode:
        return drafts.measure(job)
    config = read_config(job.model)
    config["eos_token_id"] = None
    mode = "+".join([job.mode.library, *job.mode.extras])
    model: Any = build(config, job.mode).eval()
    return times(continuing(model, mode), *draw_prompts(config["vocab_size"], *job.shape, job.steps))


def times(work: Continue, prompts: list[Tensor], limits: list[int]) -> Row:
    with torch.no_grad():
        first = seconds(lambda: work(prompts[:8], [min(limit, 8) for limit in limits[:8]]))
        torch.cuda.reset_peak_memory_stats()
        elapsed = seconds(lambda: work(prompts, limits))
    return {
        "new_tokens": sum(limits),
        "prompt_tokens": sum(map(len, prompts)),
        "seconds": round(elapsed, 2),
        "tokens_per_s": round(sum(limits) / elapsed, 1),
        "first_call_s": round(first, 1),
        "peak_gib": peak_gib(),
    }


def table(rows: Rows) -> str:
    """One line per mode, with the speed relative to transformers on the same prompts."""
    drafting = [row for row in rows if row["mode"] in drafts.MODES]
    if drafting:
        others = [row for row in rows if row not in drafting]
        return "\n\n".join([*[table(others)][: len(others)], drafts.table(drafting)])
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), NAMES[row["mode"]])
        if "error" in row:
            lines.append((*names, row["error"], "", "", "", ""))
            continue
        same = ("model", "batch", "new_tokens")
        peer: Row = next((p for p in rows if p["mode"] == "hf" and all(p.get(k) == row[k] for k in same)), {})
        speed = ratio(row["tokens_per_s"], peer.get("tokens_per_s"))
        lines.append((*names, row["new_tokens"], row["seconds"], f"{row['tokens_per_s']:,.0f}", speed, row["peak_gib"]))
    return markdown("model|prompts||new tokens|seconds|new tokens/s|speed ratio|peak GiB", lines)
