"""Training on images from files: the speed of workers that decode and pack, beside the speed of a model."""

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .clock import peak_gib
from .options import add_batch, add_modes, add_steps
from .processes import measure_all, plan_batch
from .rows import Row, Rows
from .tables import markdown, tokens
from .training.job import Job
from .training.models import CONFIGS, FAMILIES
from .training.modes import title
from .training.step import make_step

HELP = "photographs from files, by 1 to 8 workers, and training steps on them"
MODELS = ("qwen2_5_vl", "qwen2_vl_2b", "qwen3_vl")
WORKERS = (1, 2, 4, 8)
PHOTOS, SIZE = 256, (1280, 960)
"""Number of different files, and their width and height. A file has about 1500 tokens of Qwen2.5-VL."""
MAX_PIXELS = 1280 * 960
SETTLE = 3
"""Number of steps, and of batches, before the timed ones."""

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %} a {{ m.content }} end"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %} <|image_pad|>{% else %} {{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %} a{% endif %}"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODELS[0], choices=MODELS)
    add_modes(parser, "ours+adamw+selective", help="comma-separated modes of liger_models, as for train")
    add_batch(parser)
    add_steps(parser, 20, f"timed steps and batches, after {SETTLE}")


def run(options: argparse.Namespace) -> Rows:
    return measure_all(plan_batch("images", options))


def write_photos(folder: Path, number: int, size: tuple[int, int]) -> list[Path]:
    """Write JPEG files with about the size and detail of photographs: noise at several scales."""
    from PIL import Image

    paths = []
    for index in range(number):
        generator = torch.Generator().manual_seed(index)
        scales = [torch.rand(1, 3, side * 3 // 4, side, generator=generator) for side in (8, 40, 200)]
        pixels = sum(torch.nn.functional.interpolate(scale, size[::-1], mode="bilinear") for scale in scales) / 3 * 255
        image = Image.frombytes("RGB", size, bytes(pixels[0].byte().permute(1, 2, 0).contiguous().numpy().tobytes()))
        paths.append(folder / f"{index}.jpg")
        image.save(paths[-1], quality=90)
    return paths


def make_processor(config: dict[str, Any], max_pixels: int) -> Any:
    """Make a processor of Qwen-VL with the placeholder ids of ``config`` and few words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    from liger_models import Tokenizer
    from liger_models.arch._qwen_vl.processor import QwenVLImages, QwenVLProcessor

    special = {"<|image_pad|>": config["image_token_id"], "<|video_pad|>": config["video_token_id"]}
    words = ["?", "end", "a", "what", "is", "it", *(f"w{n}" for n in range(100))]
    vocabulary = {word: number for number, word in enumerate(words)} | special
    backend = Backend(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(special))
    tokenizer = Tokenizer(backend, {"eos_token": "end", "pad_token": "end", "chat_template": TEMPLATE})

    # Images and videos with the patches of the model.
    tower = config["vision_config"]
    settings = {"patch_size": tower["patch_size"], "min_pixels": 3136, "max_pixels": max_pixels}
    images, videos = QwenVLImages(settings), QwenVLImages(settings, of="frame")
    return QwenVLProcessor(tokenizer, images, videos, image_token="<|image_pad|>", video_token="<|video_pad|>")


def write_chats(file: Path, paths: list[Path], number: int) -> None:
    """Write chats about one photograph each, with answers of 10 to 100 words."""
    answers = (" ".join(f"w{word}" for word in range(n * 37 % 90 + 10)) for n in range(number))
    with file.open("w") as lines:
        for path, answer in zip(itertools.cycle(paths), answers, strict=False):
            parts = [{"type": "image", "image": path.name}, {"type": "text", "text": "what is it"}]
            messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
            lines.write(json.dumps({"messages": messages}) + "\n")


def images_of(batch: dict[str, torch.Tensor]) -> int:
    return len(batch.get("image_grid_thw", ()))


def endless(loader: Any) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


def rate(next_batch: Callable[[], dict[str, torch.Tensor]], count: int) -> dict[str, float]:
    """Images and tokens per second of ``count`` batches."""
    begun, images, number = time.perf_counter(), 0, 0
    for _ in range(count):
        batch = next_batch()
        images, number = images + images_of(batch), number + batch["input_ids"].numel()
    seconds = time.perf_counter() - begun
    return {"images_per_s": round(images / seconds, 2), "tokens_per_s": round(number / seconds, 1)}


def loader_rate(data: Any, workers: int, count: int) -> dict[str, float]:
    """Images and tokens per second of a loader with pixels, without the batches that workers prepare ahead."""
    from liger_models import PackedLoader

    batches = endless(PackedLoader(data, num_workers=workers, pin_memory=torch.cuda.is_available()))
    for _ in range(SETTLE * workers + 1):
        next(batches)
    rates = rate(lambda: next(batches), count * workers)
    batches.close()  # type: ignore[attr-defined]
    return rates


def measure(job: Job) -> Row:
    """Measure the loader alone with each number of workers, the model alone on kept batches, and both together."""
    from liger_models import PackedDataset, PackedLoader

    config = json.loads((CONFIGS / FAMILIES[job.model][0]).read_text())
    B, T = job.shape
    with tempfile.TemporaryDirectory() as path:
        # The loader alone. Reading the headers is timed, too.
        folder = Path(path)
        paths = write_photos(folder, PHOTOS, SIZE)
        write_chats(folder / "train.jsonl", paths, 100 * PHOTOS)
        processor = make_processor(config, MAX_PIXELS)
        begun = time.perf_counter()
        data = PackedDataset(
            folder / "train.jsonl", processor, length=T, batch_size=B, cache_dir=folder, progress=False
        )
        headers = 100 * PHOTOS / (time.perf_counter() - begun)
        loaders = {str(workers): loader_rate(data, workers, job.steps) for workers in WORKERS}

        # The model alone, and the model with the loader.
        train = make_step(job.mode, config, lr=1e-5)
        loader = PackedLoader(data, num_workers=WORKERS[-1], pin_memory=True)
        batches = endless(loader)

        def step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            train({name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()})
            torch.cuda.synchronize()
            return batch

        # The model alone trains on a few kept batches.
        kept = [next(batches) for _ in range(8)]
        again = itertools.cycle(kept)
        for _ in range(SETTLE):
            step(next(again))
        alone = rate(lambda: step(next(again)), job.steps)
        together = rate(lambda: step(next(batches)), job.steps)
        batches.close()  # type: ignore[attr-defined]
    return {
        "photo": list(SIZE),
        "cores": len(os.sched_getaffinity(0)),
        "headers_per_s": round(headers, 1),
        "loader": loaders,
        "model_alone": alone,
        "together": together,
        "peak_gib": peak_gib(),
    }


def table(rows: Rows) -> str:
    """One line per number of workers, one for the model alone, and one for both together."""
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), title(row["mode"]))
        if "error" in row:
            lines.append((*names, row["error"], "", ""))
            continue
        by_source = {f"loader, workers: {workers}": rates for workers, rates in row["loader"].items()}
        by_source |= {"model alone": row["model_alone"], f"model and loader, workers: {WORKERS[-1]}": row["together"]}
        for source, rates in by_source.items():
            lines.append((*names, source, f"{rates['images_per_s']:,.1f}", f"{rates['tokens_per_s']:,.0f}"))
    return markdown("model|tokens/step|run||images/s|tokens/s", lines)
