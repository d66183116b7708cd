"""Rollouts with and without drafts from the model's multi-token prediction block, after training on the demo's data."""

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import ROOT
from .clock import now
from .rows import Row, Rows
from .tables import markdown, ratio
from .training.job import Job

MODES = ("ours+drafts", "ours+drafts+hybrid")
"""A model with only full attention, and a model in which three of four layers are gated delta nets, as in Qwen3.5."""
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 8192, "eos_token_id": None,
}  # fmt: skip
ROWS, DRAFTS, PROMPT = (1, 16, 64), (1, 2, 3), 32
"""Numbers of rows that run at the same time, numbers of drafts in a round, and number of tokens in a prompt."""
TOKENS, LR, ENOUGH, EVERY, SECONDS = 16384, 1e-3, 0.55, 50, 60.0
"""Tokens in a batch; peak learning rate; the acceptance at which training ends; number of steps between measurements
of the acceptance; and maximum seconds of training."""
REPEATS = 3
"""Number of timed rollouts, after an untimed first rollout."""


def documents() -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of the demo's functions: the training functions, and the held-out functions."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    seen, held_out = demo.read_standard_library()
    tokenizer = demo.train_tokenizer(seen)
    end = tokenizer.token_to_id(demo.EOS)
    first, second = ([[*each.ids, end] for each in tokenizer.encode_batch(texts)] for texts in (seen, held_out))
    return first, second


def batches(texts: list[list[int]], tokens: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless packed batches [1, tokens] of texts in random order, and the bounds of the texts [n + 1]."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = []
    bounds = [0]
    while True:
        for index in torch.randperm(len(texts), generator=generator).tolist():
            ids += texts[index]
            bounds.append(min(len(ids), tokens))
            if len(ids) >= tokens:
                yield torch.tensor([ids[:tokens]], device=device), torch.tensor(bounds, device=device).int()
                ids, bounds = [], [0]


def make(sizes: dict[str, Any], *, hybrid: bool, device: str) -> Any:
    """A new Qwen3.5 and its block for multi-token prediction, in bf16."""
    from liger_models import LigerMTP
    from liger_models.arch.qwen3_5.text import LigerQwen3_5Text, Qwen3_5TextConfig

    layers = sizes["num_hidden_layers"]
    kinds = ["full_attention" if not hybrid or index % 4 == 3 else "linear_attention" for index in range(layers)]
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**sizes, layer_types=kinds, mrope_section=[3, 3, 2])
    return LigerMTP(LigerQwen3_5Text.from_config(config, dtype=torch.bfloat16, device=device), loss_weight=0.5)


def train(mtp: Any, texts: list[list[int]], held_out: list[list[int]], tokens: int, seconds: float) -> Row:
    """Train until the model accepts enough drafts on held-out functions, or until the time is up."""
    from liger_models import LigerAdamW

    device, start, accepted = mtp.device.type, time.perf_counter(), 0.0
    optimizer = LigerAdamW(mtp.parameters(), lr=LR, betas=(0.9, 0.95), stochastic_rounding=True)
    test_ids, test_bounds = next(batches(held_out, tokens, device))
    for step, (ids, bounds) in enumerate(batches(texts, tokens, device), 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(step / 50, 1)
        mtp(ids, labels=ids, cu_seqlens=bounds).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            agreed, total = mtp.acceptance(test_ids, labels=test_ids, cu_seqlens=test_bounds).tolist()
            accepted = agreed / total
            if accepted >= ENOUGH or time.perf_counter() - start > seconds:
                return {"train_steps": step, "train_s": round(time.perf_counter() - start, 1), "accepted": accepted}
    raise AssertionError  # batches never end


def compare(mtp: Any, prompts: list[list[int]], rows: int, new: int) -> list[Row]:
    """Time rollouts of the first prompts: without drafts, and with several numbers of drafts."""
    found: list[Row] = []
    mtp.eval()
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": [], "batch_size": rows}
    want: list[list[int]] = []
    for drafts in (0, *DRAFTS):
        with_drafts = {"draft_model": mtp, "num_draft_tokens": drafts} if drafts else {}
        times = []
        for _ in range(1 + REPEATS):
            start = now()
            answers = mtp.model.rollout(prompts[:rows], **options, **with_drafts)
            times.append(now() - start)
        tokens = [answer.tokens.tolist() for answer in answers]
        want = want or tokens
        rounds = sum(answer.rounds or new for answer in answers)
        same = [
            next((i for i, (a, b) in enumerate(zip(*both, strict=True)) if a != b), new)
            for both in zip(want, tokens, strict=True)
        ]
        found.append(
            {
                "rows": rows, "drafts": drafts, "tokens_per_s": round(rows * new / min(times[1:]), 1),
                "tokens_per_round": round(rows * new / rounds, 3), "same": round(sum(same) / (rows * new), 3),
            }
        )  # fmt: skip
    return found


def measure(job: Job) -> Row:
    """Train the model, then compare."""
    texts, held_out = documents()
    mtp = make(SIZES, hybrid="hybrid" in job.mode, device="cuda")
    trained = train(mtp, texts, held_out, TOKENS, SECONDS)
    prompts = [text[:PROMPT] for text in held_out if len(text) > PROMPT]
    return {**trained, "rollouts": [row for rows in ROWS for row in compare(mtp, prompts, rows, job.steps)]}


def table(rows: Rows) -> str:
    """One line for each number of rows and drafts. The speed ratio is relative to the same rollout without drafts."""
    lines = []
    for row in rows:
        stack = "full attention" if row["mode"] == MODES[0] else "hybrid"
        if "error" in row:
            lines.append((stack, "", "", row["error"], "", "", ""))
        for each in row.get("rollouts", []):
            speed, rows_and_drafts = each["tokens_per_s"], (each["rows"], each["drafts"])
            plain = next(x["tokens_per_s"] for x in row["rollouts"] if (x["rows"], x["drafts"]) == (each["rows"], 0))
            values = f"{speed:,.0f}", ratio(speed, plain), each["tokens_per_round"], each["same"]
            lines.append((stack, *rows_and_drafts, *values))
    return markdown("layers|rows|drafts|new tokens/s|speed ratio|tokens/round|equal to the row without drafts", lines)
