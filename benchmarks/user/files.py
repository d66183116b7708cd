"""The files in $START from which all modes of a path start: a checkpoint with random weights, a tokenizer, and data."""

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..images import make_processor, write_chats, write_photos
from ..rows import Row
from ..training.build import build_ours
from ..training.job import Job
from ..training.models import read_config
from ..training.modes import Mode
from ..training.tokenizer import words_tokenizer
from .path import PATHS, shape_of

PHOTOS, SIZE = 64, (1280, 960)
"""Number of different photographs, and their width and height. A photograph has about 1500 tokens in Qwen2.5-VL."""
REWARDS = """def even(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
"""


def write_lines(file: Path, examples: Iterable[dict[str, Any]]) -> None:
    with file.open("w") as lines:
        lines.writelines(json.dumps(example) + "\n" for example in examples)


def save(job: Job) -> Row:
    """Save a text model, texts of 100 to 1,500 words, preference pairs, prompts and a reward function in $SAVE."""
    folder, config = Path(os.environ["SAVE"]), read_config(job.model)
    tokenizer = words_tokenizer(config["vocab_size"])
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    build_ours(config | ids, Mode("ours", {})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"t{draw.randrange(10, config['vocab_size'])}" for _ in range(count))

    # The texts have twice as many tokens as the steps need.
    (B, T), texts, total = shape_of("full", job), [], 0
    while total < 2 * max(job.steps, PATHS["full"].steps) * B * T:
        length = draw.randrange(100, 1500)
        texts.append({"text": words(length)})
        total += length
    write_lines(folder / "texts.jsonl", texts)

    # Pairs of exactly T tokens: the prompt is one half, and an answer with its end token is the other half.
    B, T = shape_of("dpo", job)
    half = T // 2
    pairs = (
        {"prompt": words(half), **{name: " " + words(T - half - 1) for name in ("chosen", "rejected")}}
        for _ in range(max(job.steps, PATHS["dpo"].steps) * B)
    )
    write_lines(folder / "pairs.jsonl", pairs)

    # Prompts, and a reward function that gives every answer of random tokens a partial reward.
    B, T = shape_of("grpo", job)
    write_lines(folder / "prompts.jsonl", ({"prompt": words(T)} for _ in range(4 * B)))
    (folder / "rewards.py").write_text(REWARDS)
    return {}


def save_vision(job: Job) -> Row:
    """Save a Qwen2.5-VL or Qwen3-VL model, its processor, photographs, and chats about one photograph each in $SAVE."""
    folder, config = Path(os.environ["SAVE"]), read_config(job.model)
    tower = config["vision_config"]
    settings = {
        "patch_size": tower["patch_size"], "merge_size": tower["spatial_merge_size"], "temporal_patch_size": 2,
        "size": {"shortest_edge": 3136, "longest_edge": SIZE[0] * SIZE[1]},
    }  # fmt: skip
    tokenizer = make_processor(config, SIZE[0] * SIZE[1]).tokenizer
    model = build_ours(config, Mode("ours", {}))
    tokens = {"eos_token": "end", "pad_token": "end", "unk_token": "?", "chat_template": tokenizer.chat_template}
    model.assets = {
        "tokenizer.json": tokenizer.backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(tokens | {"tokenizer_class": "PreTrainedTokenizerFast"}).encode(),
        "preprocessor_config.json": json.dumps(settings).encode(),
    }
    model.save_pretrained(folder)
    B, _ = shape_of("vision", job)
    photos = write_photos(folder, PHOTOS, SIZE)
    write_chats(folder / "chats.jsonl", photos, 2 * max(job.steps, PATHS["vision"].steps) * B)
    return {}
