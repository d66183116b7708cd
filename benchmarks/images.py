"""Training on images from files: the speed of workers that decode and pack, compared with the speed of a model."""

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
from .training.models import CHANGES, FAMILIES, changed, keep_first, read_release, text_part
from .training.modes import title
from .training.step import make_step

HELP = "photographs from files, by 1 to 8 workers, and training steps on them"
MODELS = (
    "qwen2_5_vl", "qwen2_vl_2b", "qwen3_vl", "llava", "llava_next", "mistral3", "paligemma", "internvl", "smolvlm",
    "idefics3", "glm4v", "lfm2_vl", "gemma3",
)  # fmt: skip
DEPTHS = {"mistral3": 10}
"""Maps a family to a smaller number of layers, if not all layers and their optimizer states fit on a GPU."""
WORKERS = (1, 2, 4, 8)
PHOTOS, SIZE = 256, (1280, 960)
"""Number of different files, and their width and height. An image of this size has about 1500 tokens in Qwen2.5-VL."""
MAX_PIXELS = 1280 * 960
SETTLE = 3
"""Number of untimed steps, and of untimed batches, at the beginning."""

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
QWEN = ({"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}, (), CLIP)
IDEFICS = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
)
LFM = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
IMAGES = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "glm4v": (QWEN[0], ("<|begin_of_image|>", "<|end_of_image|>"), CLIP),
    "llava": ({"image_token_index": "<image>"}, (), {"size": {"shortest_edge": 336}, "crop_size": 336, **CLIP}),
    "llava_next": ({"image_token_index": "<image>"}, (), {"size": {"shortest_edge": 336}, "crop_size": 336, **CLIP}),
    "mistral3": (
        {"image_token_index": "[IMG]"}, ("[IMG_BREAK]", "[IMG_END]"), {"size": {"longest_edge": 1540}, **CLIP}
    ),
    "paligemma": ({"image_token_index": "<image>"}, (), {"size": {"height": 224, "width": 224}}),
    "internvl": (
        {"image_token_id": "<IMG_CONTEXT>"},
        ("<img>", "</img>"),
        {"size": {"height": 448, "width": 448}, "max_patches": 12, **IMAGENET},
    ),
    "smolvlm": (
        {"image_token_id": "<image>"},
        IDEFICS,
        {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
    ),
    "idefics3": (
        {"image_token_id": "<image>"},
        IDEFICS,
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    ),
    "lfm2_vl": (
        {"image_token_id": "<image>"},
        (*LFM, *(f"<|img_row_{i}_col_{j}|>" for i in range(1, 11) for j in range(1, 11))),
        {"tile_size": 512},
    ),
    "gemma3": (
        {"boi_token_index": "<boi>", "image_token_index": "<img>", "eoi_token_index": "<eoi>"},
        (),
        {"size": {"height": 896, "width": 896}},
    ),
}  # fmt: skip
"""Maps a model type to three values: (1) the image tokens that config.json names, by their keys there, the placeholder
first; (2) the other image tokens; and (3) the settings in preprocessor_config.json.
"""
FIRST_WORD, FIRST_TOKEN = 20, 500
"""The first id of the words, and the first id of the other image tokens. Placeholders have other ids."""
QUESTION = FIRST_WORD + 3
"""The id of the word "what", which occurs once in a chat about one image."""

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %} a {{ m.content }} end"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %} IMAGE{% else %} {{ part.text }}"
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


def whole_config(name: str) -> dict[str, Any]:
    """The config.json of a family's release. If the family is in `DEPTHS`, the number of layers is reduced."""
    config = read_release(FAMILIES[name][0])
    if name in DEPTHS:
        keep_first(text_part(config), "num_hidden_layers", DEPTHS[name])
    return changed(config, CHANGES.get(name, {}))


def make_processor(config: dict[str, Any], max_pixels: int = MAX_PIXELS) -> Any:
    """Make a family's processor with a release's settings, the placeholder ids of ``config``, and a few words.

    Args:
        config: the content of config.json.
        max_pixels: maximum number of pixels of an image in Qwen-VL and GLM-4.1V.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    from liger_models import AutoLigerModel

    names, more, settings = IMAGES[config["model_type"]]
    if "video_token_id" in names:
        settings = settings | {"max_pixels": max_pixels, "min_pixels": 3136}
    if "image_grid_pinpoints" in config:
        settings = settings | {"image_grid_pinpoints": config["image_grid_pinpoints"]}

    # The words, and the image tokens with their ids in the config.
    words = ["?", "end", "a", "what", "is", "it", *(f"w{n}" for n in range(100))]
    special = {token: number for number, token in enumerate(more, FIRST_TOKEN)}
    model = AutoLigerModel.from_config(config, device="meta")
    special |= {token: config.get(key, getattr(model.config, key, None)) for key, token in names.items()}
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words, FIRST_WORD)} | special, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(special))

    # Create the processor through a model without weights.
    template = TEMPLATE.replace("IMAGE", next(iter(names.values())))
    files = {
        "tokenizer_config.json": {"eos_token": "end", "pad_token": "end", "chat_template": template},
        "preprocessor_config.json": settings,
    }
    model.assets = {name: json.dumps(content).encode() for name, content in files.items()}
    model.assets["tokenizer.json"] = backend.to_str().encode()
    return model.processor


def write_chats(file: Path, paths: list[Path], number: int) -> None:
    """Write chats about one photograph each, with answers of 10 to 100 words."""
    answers = (" ".join(f"w{word}" for word in range(n * 37 % 90 + 10)) for n in range(number))
    with file.open("w") as lines:
        for path, answer in zip(itertools.cycle(paths), answers, strict=False):
            parts = [{"type": "image", "image": path.name}, {"type": "text", "text": "what is it"}]
            messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
            lines.write(json.dumps({"messages": messages}) + "\n")


def images_of(batch: dict[str, torch.Tensor]) -> int:
    """The number of images in a batch. In the text, each image is followed by the question."""
    return int((batch["input_ids"] == QUESTION).sum())


def endless(loader: Any) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


def rate(next_batch: Callable[[], dict[str, torch.Tensor]], count: int) -> dict[str, float]:
    """Images and tokens per second over ``count`` batches."""
    begun, images, number = time.perf_counter(), 0, 0
    for _ in range(count):
        batch = next_batch()
        images, number = images + images_of(batch), number + batch["input_ids"].numel()
    seconds = time.perf_counter() - begun
    return {"images_per_s": round(images / seconds, 2), "tokens_per_s": round(number / seconds, 1)}


def loader_rate(data: Any, workers: int, count: int) -> dict[str, float]:
    """Images and tokens per second of a loader that decodes pixels. Batches that workers prepare ahead do not count."""
    from liger_models import PackedLoader

    batches = endless(PackedLoader(data, num_workers=workers, pin_memory=torch.cuda.is_available()))
    for _ in range(SETTLE * workers + 1):
        next(batches)
    rates = rate(lambda: next(batches), count * workers)
    batches.close()  # type: ignore[attr-defined]
    return rates


def measure(job: Job) -> Row:
    """Measure the loader alone with each number of workers, the model alone on stored batches, and both together."""
    from liger_models import PackedDataset, PackedLoader

    config = whole_config(job.model)
    B, T = job.shape
    with tempfile.TemporaryDirectory() as path:
        # The loader alone. The time for reading headers is measured, too.
        folder = Path(path)
        paths = write_photos(folder, PHOTOS, SIZE)
        write_chats(folder / "train.jsonl", paths, 20 * PHOTOS)
        processor = make_processor(config)
        begun = time.perf_counter()
        data = PackedDataset(
            folder / "train.jsonl", processor, length=T, batch_size=B, cache_dir=folder, progress=False
        )
        headers = 20 * PHOTOS / (time.perf_counter() - begun)
        loaders = {str(workers): loader_rate(data, workers, job.steps) for workers in WORKERS}

        # The model alone, and the model with the loader.
        train = make_step(job.mode, config, lr=1e-5)
        loader = PackedLoader(data, num_workers=WORKERS[-1], pin_memory=True)
        batches = endless(loader)

        def step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            train({name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()})
            torch.cuda.synchronize()
            return batch

        # The model alone trains on a few stored batches.
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
    """One line for each number of workers, one line for the model alone, and one line for both together."""
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
