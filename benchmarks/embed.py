"""Steps that train an embedding model with in-batch and hard negatives, compared with sentence-transformers.

An example is a query, a document, and a hard negative. The lengths of texts are evenly spread on a logarithmic scale,
from a sixteenth of the maximum length up to the maximum. Both libraries get the same weights, token ids, batches and
AdamW settings. sentence-transformers pads the texts of a batch, as its own collator does. This package packs them.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .clock import now, peak_gib
from .options import add_batch, add_model, add_modes, add_steps
from .processes import measure_all, plan_batch
from .rows import Row, Rows
from .tables import markdown, ratio, tokens
from .training.build import build_ours
from .training.job import Job
from .training.models import read_config
from .training.modes import Mode

HELP = "a step of a model of embeddings: examples/s, memory"
MODES = r"(st|ours)(\+cached)?"
TITLES = {"st": "sentence-transformers", "ours": "liger_models", "cached": ", cached gradients"}
WARM_UP = 4
"""Number of untimed steps at the beginning, in which kernels compile."""
PARTS = 4
"""Number of parts into which a batch is divided if gradients are cached."""
TEMPERATURE = 0.05
ROLES = 3
"""Number of texts in an example: the query, its document, and a hard negative."""

Step = Callable[[list[Tensor]], Tensor]
"""A training step. It takes the texts of a batch (all queries, all documents, all negatives) and returns the loss."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "qwen3-0.6b")
    add_modes(parser, "st,st+cached,ours,ours+cached", MODES, "comma-separated, of st and ours, with +cached")
    add_batch(parser, "64x256", "examples of a step x tokens of the longest text")
    add_steps(parser, 12, f"timed steps, after {WARM_UP}")


def run(options: argparse.Namespace) -> Rows:
    return measure_all(plan_batch("embed", options))


def draw_texts(examples: int, longest: int, words: int, generator: torch.Generator) -> list[Tensor]:
    """The token ids of the texts in a batch: all queries, then all documents, then all negatives."""
    sizes = longest / 16 * torch.exp(torch.rand(ROLES * examples, generator=generator) * math.log(16))
    return [torch.randint(words, (int(size),), generator=generator, dtype=torch.int32) for size in sizes]


def measure(job: Job, device: str = "cuda") -> Row:
    """Measure the time and the memory of steps. Drawing the texts is not included."""
    config = read_config(job.model)
    examples, longest = job.shape
    model = build_ours(config, Mode("ours", {}))
    parts = PARTS if "cached" in job.mode else 1
    step = our_step(model, parts) if job.mode.library == "ours" else their_step(model, device, parts)

    generator = torch.Generator().manual_seed(0)
    batches = [draw_texts(examples, longest, config["vocab_size"], generator) for _ in range(WARM_UP + job.steps)]
    losses = [step(texts) for texts in batches[:WARM_UP]]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = now()
    losses += [step(texts) for texts in batches[WARM_UP:]]
    took = now() - start
    timed = sum(len(text) for texts in batches[WARM_UP:] for text in texts)
    return {
        "examples_per_s": round(job.steps * examples / took, 1),
        "tokens_per_s": round(timed / took),
        "peak_gib": peak_gib(),
        "losses": [round(loss.item(), 4) for loss in losses],
    }


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def our_step(model: Any, parts: int) -> Step:
    """A step of ``liger-models train --objective embed``, which caches gradients if a step has several batches."""
    from liger_models.retrieval.texts import pack_texts
    from liger_models.train import TrainOptions
    from liger_models.train.objective_options import make_objective

    model.has_head = False
    model.train()
    model.lm_head.requires_grad_(model.config.tie_word_embeddings)
    optimizer = optimizer_of(model)
    names = {"model": "random weights", "data": "random tokens", "output": "nowhere"}  # they are not read
    objective = make_objective(TrainOptions(**names, objective="embed", temperature=TEMPERATURE))

    def step(texts: list[Tensor]) -> Tensor:
        examples = len(texts) // ROLES
        size = examples // parts
        batches = []
        for first in range(0, examples, size):
            of_part = [text for role in range(ROLES) for text in texts[role * examples + first :][:size]]
            batch = pack_texts(of_part, 0) | {
                "counted": torch.ones(size, dtype=torch.bool),
                "keys": torch.arange(ROLES * size) + ROLES * first,  # no two texts are equal
            }
            batches.append({name: tensor.to(model.device, non_blocking=True) for name, tensor in batch.items()})
        loss, _ = objective.step(model, batches, lambda part: part.backward())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def their_step(model: Any, device: str, parts: int) -> Step:
    """A step of sentence-transformers on a transformers model that has the weights of ``model``."""
    import tempfile

    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
    from transformers import AutoModel

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        model.to("meta")  # frees its memory
        body = Body(AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device))
    theirs = SentenceTransformer(
        modules=[body, Pooling(body.model.config.hidden_size, pooling_mode="lasttoken"), Normalize()], device=device
    )
    theirs.train()
    optimizer = optimizer_of(theirs)
    name = "MultipleNegativesRankingLoss" if parts == 1 else "CachedMultipleNegativesRankingLoss"
    loss_class, options = getattr(losses, name), {"scale": 1 / TEMPERATURE}

    def step(texts: list[Tensor]) -> Tensor:
        examples = len(texts) // ROLES
        if parts > 1:
            options["mini_batch_size"] = -(-examples // parts)
        columns = [padded(texts[role * examples : (role + 1) * examples], device) for role in range(ROLES)]
        loss: Tensor = loss_class(theirs, **options)(columns, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Body(nn.Module):
    """Wraps a transformers model as a module of sentence-transformers that takes token ids instead of texts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        out = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return features | {"token_embeddings": out.last_hidden_state}


def padded(texts: list[Tensor], device: str) -> dict[str, Tensor]:
    """Pad texts on the left, as the tokenizers of decoders do."""
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = text
        mask[row, longest - len(text) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def table(rows: Rows) -> str:
    """One line per mode, with ratios to the same mode of sentence-transformers."""
    peers = {row["mode"].removeprefix("st"): row for row in rows if row["mode"].startswith("st")}
    lines = []
    for row in rows:
        library, *words = row["mode"].split("+")
        names = (row["model"], tokens(row["batch"]), "".join(TITLES[word] for word in (library, *words)))
        if "error" in row:
            lines.append((*names, row["error"], "", "", "", ""))
            continue
        peer = {} if library == "st" else peers.get("".join(f"+{word}" for word in words), {})
        lines.append((
            *names, row["examples_per_s"], f"{row['tokens_per_s']:,}", row["peak_gib"],
            ratio(row["examples_per_s"], peer.get("examples_per_s")), ratio(row["peak_gib"], peer.get("peak_gib")),
        ))  # fmt: skip
    return markdown("model|examples and tokens||examples/s|tokens/s|peak GiB|speed ratio|memory ratio", lines)
