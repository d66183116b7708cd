"""Generation, the time to the first token, and requests of lm-evaluation-harness."""

import os
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch

from ..clock import peak_gib, seconds
from ..rows import Row
from ..training import build
from ..training.job import Job
from ..training.modes import Mode
from .path import shape_of
from .trainers import load_model

REPEATS = 5
FIRST = ((1, 16), (8, 256), (1, 512))
"""Numbers of prompts and of tokens per prompt for which the time to the first token is measured."""
FIRST_REPEATS = 41
"""Number of calls for a first token. Single calls mostly take host time, which varies by a factor of two."""
LMEVAL_BATCH = 16


def median(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median time of the calls in milliseconds, without the first call."""
    return 1e3 * statistics.median([seconds(function) for _ in range(repeats)][1:])


def generator(mode: Mode) -> tuple[Any, dict[str, Any]]:
    """A model with a method ``generate``, and options with which generation never stops early."""
    options: dict[str, Any] = {"do_sample": False}
    if "ours" in mode:
        from liger_models import AutoLigerModel

        model = AutoLigerModel.from_pretrained(os.environ["START"], dtype=torch.bfloat16, device=build.DEVICE)
        return model.eval(), options | {"eos_token_id": []}
    model = load_model(mode).eval()
    model.generation_config.eos_token_id = None
    return model, options


@torch.no_grad()
def measure_generate(job: Job) -> Row:
    """Time greedy decoding: the first token, and each further token. An untimed call comes before."""
    model, options = generator(job.mode)
    rows, length = shape_of("generate", job)
    prompts = torch.randint(10, model.config.vocab_size, (rows, length // 8), device=build.DEVICE)
    options["attention_mask"] = torch.ones_like(prompts)
    run = lambda new: median(lambda: model.generate(prompts, max_new_tokens=new, **options))
    run(job.steps)
    first, whole = run(1), run(job.steps)
    return {
        "first_ms": round(first, 2),
        "step_ms": round((whole - first) / (job.steps - 1), 3),
        "peak_gib": peak_gib(),
    }


@torch.no_grad()
def measure_first(job: Job) -> Row:
    """Time the first token for several prompts, with one forward and with ``generate``."""
    model, options = generator(job.mode)
    times: dict[str, dict[str, float]] = {}
    for rows, length in FIRST:
        prompts = torch.randint(10, model.config.vocab_size, (rows, length), device=build.DEVICE)
        options["attention_mask"] = torch.ones_like(prompts)
        forward = lambda ids=prompts: model(input_ids=ids, logits_to_keep=1)
        generate = lambda ids=prompts: model.generate(ids, max_new_tokens=1, **options)
        for call in (forward, generate):
            median(call)
        times[f"{rows}x{length}"] = {
            "forward_ms": round(median(forward, FIRST_REPEATS), 2),
            "generate_ms": round(median(generate, FIRST_REPEATS), 2),
        }
    return {"prompts": times, "peak_gib": peak_gib()}


def measure_lmeval(job: Job) -> Row:
    """Time requests of lm-evaluation-harness, answered by its own model class or by this package's.

    The job's batch gives the maximum number of tokens in a prompt. Each ``generate_until`` request is answered with
    exactly ``job.steps`` tokens, and each ``loglikelihood`` request rates a continuation of 16 tokens.
    """
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model_class: Any = HFLM
    if "door" in job.mode:
        from liger_models.hf.lm_eval import LigerLM as model_class

    model = model_class(pretrained=os.environ["START"], dtype="bfloat16", batch_size=LMEVAL_BATCH, device=build.DEVICE)
    draw, (count, length) = random.Random(0), shape_of("lmeval", job)
    words = lambda number: " ".join(f"t{draw.randrange(10, model.model.config.vocab_size)}" for _ in range(number))
    prompts = [words(draw.randrange(length // 8, length)) for _ in range(count)]
    until = {"until": [], "max_gen_toks": job.steps, "do_sample": False}
    kinds = {
        "loglikelihood": [(prompt, " " + words(16)) for prompt in prompts],
        "generate_until": [(prompt, {**until}) for prompt in prompts],
    }
    row: Row = {}
    for name, arguments in kinds.items():
        requests = [Instance(name, {}, pair, index) for index, pair in enumerate(arguments)]  # type: ignore[arg-type]
        answer = getattr(model, name)
        answer(requests[:LMEVAL_BATCH])
        row[f"{name}_s"] = round(seconds(lambda: answer(requests)), 3)  # noqa: B023 called at once
    return row | {"peak_gib": peak_gib()}
