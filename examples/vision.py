"""Teach a small Qwen2-VL to describe images of colored shapes, which this script draws with captions.

    python examples/vision.py [--output FOLDER] [--steps N] [--device cpu|cuda]

The script needs Pillow and Jinja2 (pip install 'liger_models[vision]'), but no network and no GPU. It writes a Hugging
Face checkpoint with random weights, trains it on drawings, saves it, loads it again, and describes new drawings from
files. A picture with some of these drawings is saved beside the checkpoints.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from liger_models import LigerQwen2VL
from liger_models.arch.qwen2_vl import Qwen2VLConfig, Qwen2VLVisionConfig

SIDE, PATCH, BATCH, PEAK_LR, REPORT_EVERY = 48, 8, 16, 2e-3, 50
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top right", "bottom left", "bottom right")
EOS, IMAGE, VIDEO, QUESTION, ANSWER = "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|question|>", "<|answer|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<|question|>{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% else %}<|answer|>{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)


class Drawing(NamedTuple):
    """An image, or the path of its file, and its caption."""

    image: Image.Image | Path
    caption: str


def draw(chance: random.Random) -> Drawing:
    """Draw a shape of random color and size in a random quarter of a dark image."""
    colour, shape, corner = chance.choice(COLOURS), chance.choice(SHAPES), chance.randrange(4)
    image = Image.new("RGB", (SIDE, SIDE), tuple(chance.randrange(50) for _ in range(3)))
    quarter, size = SIDE // 2, chance.randint(13, 21)
    left, top = (chance.randint(0, quarter - size - 1) + quarter * side for side in (corner % 2, corner // 2))
    pen, box = ImageDraw.Draw(image), (left, top, left + size, top + size)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(left, box[3]), (box[2], box[3]), (left + size // 2, top)], fill=colour)
    return Drawing(image, f"a {colour} {shape} at the {PLACES[corner]}")


def conversation(drawing: Drawing, *, answered: bool) -> list[dict]:
    """A question about the drawing and, if ``answered``, its answer."""
    question = [{"type": "image", "image": drawing.image}, {"type": "text", "text": "what is it"}]
    answer = [{"role": "assistant", "content": drawing.caption}] if answered else []
    return [{"role": "user", "content": question}, *answer]


def write_checkpoint(folder: Path) -> None:
    """Write a Qwen2-VL with random weights, its tokenizer and its processor's settings."""
    words = ["what", "is", "it", "a", "at", "the", "top", "bottom", "left", "right", *COLOURS, *SHAPES]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (EOS, IMAGE, VIDEO, QUESTION, ANSWER)]
    )
    ids = {token: tokenizer.token_to_id(token) for token in (EOS, IMAGE, VIDEO)}
    config = Qwen2VLConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=96, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, mrope_section=[4, 4, 4], max_position_embeddings=128,
        bos_token_id=None, eos_token_id=ids[EOS], image_token_id=ids[IMAGE], video_token_id=ids[VIDEO],
        initializer_range=0.08,  # learns faster than with the usual 0.02
        vision_config=Qwen2VLVisionConfig(depth=2, embed_dim=96, hidden_size=96, num_heads=4, patch_size=PATCH),
    )  # fmt: skip
    model = LigerQwen2VL.from_config(config)
    pixels = {"patch_size": PATCH, "merge_size": 2, "min_pixels": PATCH**2, "max_pixels": SIDE**2}
    special = {"eos_token": EOS, "pad_token": EOS, "chat_template": TEMPLATE}
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}).encode(),
        "preprocessor_config.json": json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **pixels}).encode(),
    }
    model.save_pretrained(folder)


def train(model: LigerQwen2VL, steps: int) -> None:
    """Train with AdamW on new drawings in each step, with linear warm-up and then cosine decay."""
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    start, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        rate = PEAK_LR * min(step / 50, 0.52 + 0.48 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate
        drawings = [conversation(draw(chance), answered=True) for _ in range(BATCH)]
        batch = model.processor.apply_chat_template(drawings, return_labels=True, padding_side="right")
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % REPORT_EVERY == 0 or step == steps:
            seconds, mean = time.perf_counter() - start, torch.stack(losses).mean().item()
            print(f"step {step:>4} of {steps}   loss {mean:.3f}   {step * BATCH / seconds:,.0f} images/s")
            losses.clear()


def describe(model: LigerQwen2VL, drawings: list[Drawing]) -> list[str]:
    """The captions that the model generates."""
    questions = [conversation(drawing, answered=False) for drawing in drawings]
    batch = model.processor.apply_chat_template(questions, add_generation_prompt=True)
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    answers = model.generate(**batch, max_new_tokens=10)[:, batch["input_ids"].shape[1] :]
    return model.processor.batch_decode(answers)


def side_by_side(drawings: list[Drawing], zoom: int = 3) -> Image.Image:
    """A picture with all drawings in a row."""
    whole = Image.new("RGB", (len(drawings) * (SIDE + 2) * zoom, SIDE * zoom), "gray")
    for column, drawing in enumerate(drawings):
        whole.paste(
            drawing.image.resize((SIDE * zoom, SIDE * zoom), Image.Resampling.NEAREST), (column * (SIDE + 2) * zoom, 0)
        )
    return whole


def main() -> None:
    """Read the options and run all stages."""
    parser = argparse.ArgumentParser(description="Teach a small Qwen2-VL to describe colored shapes.")
    parser.add_argument("--output", type=Path, default=Path("vision_output"), help="folder of checkpoints and picture")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be positive, got {args.steps}")
    sys.stdout.reconfigure(line_buffering=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads slow down matrix products as small as these
    args.output.mkdir(parents=True, exist_ok=True)
    write_checkpoint(args.output / "initial")
    model = LigerQwen2VL.from_pretrained(args.output / "initial", device=args.device, progress=False)
    print(f"{model.num_parameters():,} parameters on {args.device}")
    train(model, args.steps)
    model.save_pretrained(args.output / "trained")

    # Describe new drawings with the saved model.
    model = LigerQwen2VL.from_pretrained(args.output / "trained", device=args.device, progress=False)
    chance = random.Random(1)  # other drawings than in training
    drawn = [draw(chance) for _ in range(100)]
    folder = args.output / "unseen"
    folder.mkdir(exist_ok=True)
    unseen = []  # read from files, as photographs are
    for number, drawing in enumerate(drawn):
        drawing.image.save(folder / f"{number}.png")
        unseen.append(Drawing(folder / f"{number}.png", drawing.caption))
    said = describe(model, unseen)
    right = sum(drawing.caption == caption for drawing, caption in zip(unseen, said, strict=True))
    print(f"new images described right: {right} of {len(unseen)}")
    side_by_side(drawn[:6]).save(args.output / "unseen.png")
    print(f"{args.output / 'unseen.png'}, from left to right:")
    for caption in said[:6]:
        print(f"  {caption}")
    print(f'liger-models generate {args.output / "trained"} "what is it" --image {unseen[0].image}')


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"vision: {error}")
