"""Run docs/tutorial.md on the CPU, with a tiny model instead of the model on the hub.

    python examples/tutorial.py [--output FOLDER] [--write]

The script trains a chat model of 0.1 million parameters that names capitals, and a model that names the colors of
images. Both talk like a pirate if asked to. Then it runs the Python blocks of the page, and every command with an
output below it. ``--write`` puts the new outputs into the page. Needs no network and no GPU.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from liger_models import LigerAdamW, LigerLlama, LigerQwen2VL, LlamaConfig
from liger_models.arch.qwen2_vl import Qwen2VLConfig, Qwen2VLVisionConfig
from liger_models.base import CausalLM
from liger_models.cli.commands import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorial.md"
INSIDE = r"(?:(?!^```).*\n)*"
BLOCK = re.compile(
    rf"^```python\n(?P<python>{INSIDE})```$|^```sh\n(?P<sh>{INSIDE})```\n\n```text\n(?P<text>{INSIDE})```$",
    re.MULTILINE,
)
"""A Python block, or commands with their output."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip
END, IMAGE, VIDEO = "<|end|>", "<|image|>", "<|video|>"
SPECIAL = ("<|user|>", "<|assistant|>", END, IMAGE, VIDEO)
STYLES = ("Ahoy! {} it be, matey.", "It is {}.")
UNSEEN = {"Norway": "Oslo", "Kenya": "Nairobi"}
"""Capitals that the tiny model knows in addition to those of the page."""


def make_assets(texts: list[str]) -> tuple[Tokenizer, dict[str, bytes]]:
    """Train a byte-level BPE tokenizer on texts, and return it with its files in a checkpoint."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    generation = {"do_sample": False, "eos_token_id": tokenizer.token_to_id(END)}
    return tokenizer, {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings | {"chat_template": TEMPLATE}).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }


def fit(model: CausalLM, batch: dict[str, torch.Tensor], steps: int) -> None:
    """Train on one batch until the model knows it by heart."""
    optimizer = LigerAdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write_model(folder: Path, capitals: dict[str, str]) -> None:
    """Train a tiny chat model to name ``capitals`` and `UNSEEN`, and save it with its tokenizer."""
    capitals = capitals | UNSEEN
    asked = [f"{pirate}What is the capital of {country}?" for pirate in ("Pirate! ", "") for country in capitals]
    told = [text.format(city) for text in STYLES for city in capitals.values()]
    tokenizer, assets = make_assets(asked + told)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.token_to_id(END),
    )  # fmt: skip
    model = LigerLlama.from_config(config)
    model.assets = assets
    texts = [f"<|user|>{ask}{END}<|assistant|>{tell}{END}" for ask, tell in zip(asked, told, strict=True)]
    rows = [tokenizer.encode(text).ids for text in texts]
    ids = torch.tensor([[token for row in rows for token in row]])
    fit(model, {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, *map(len, rows)]).cumsum(0)}, 200)
    model.save_pretrained(folder)


def write_vision_model(folder: Path, colours: list[str]) -> None:
    """Train a tiny Qwen2-VL to name the colors of images, and save it with its tokenizer and processor."""
    told = [text.format(colour) for text in STYLES for colour in colours]
    tokenizer, assets = make_assets([*told, "Pirate! What colour is it?"])
    ids = {token: tokenizer.token_to_id(token) for token in (END, IMAGE, VIDEO)}
    config = Qwen2VLConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=96, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, mrope_section=[4, 4, 4], max_position_embeddings=256,
        bos_token_id=None, eos_token_id=ids[END], image_token_id=ids[IMAGE], video_token_id=ids[VIDEO],
        vision_config=Qwen2VLVisionConfig(depth=1, embed_dim=48, hidden_size=96, num_heads=2, patch_size=8),
    )  # fmt: skip
    model = LigerQwen2VL.from_config(config)
    pixels = {"patch_size": 8, "merge_size": 2, "min_pixels": 256, "max_pixels": 1024}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", **pixels}
    model.assets = assets | {"preprocessor_config.json": json.dumps(processor).encode()}
    chats = []
    for number, answer in enumerate(told):
        image = {"type": "image", "image": f"images/{colours[number % len(colours)]}.png"}
        text = "What colour is it?" if number >= len(colours) else "Pirate! What colour is it?"
        question = {"role": "user", "content": [image, {"type": "text", "text": text}]}
        chats.append([question, {"role": "assistant", "content": answer}])
    fit(model, model.processor.apply_chat_template(chats, return_labels=True, padding_side="right"), 80)
    model.save_pretrained(folder)


def printed_by(commands: str) -> str:
    """The output of the commands of a block. ``liger-models`` runs in this process."""
    printed = io.StringIO()
    for line in commands.splitlines():
        name, *arguments = shlex.split(os.path.expandvars(line))
        if name != "liger-models":
            raise ValueError(f"{PAGE}: a command with an output must be liger-models, got {line!r}.")
        with contextlib.redirect_stdout(printed):
            app(arguments, prog_name=name, standalone_mode=False)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def main(output: Path, write: bool) -> None:
    """Run the page in the folder ``output``."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    output.mkdir(parents=True, exist_ok=True)
    os.chdir(output)
    os.environ |= {"MODEL": "tiny", "VISION_MODEL": "tiny-vision", "XDG_CACHE_HOME": "cache"}
    page = PAGE.read_text(encoding="utf-8")

    # Python blocks share their names. The first blocks write the data on which the tiny models are trained.
    names: dict = {}
    for block in BLOCK.finditer(page):
        if block["python"]:
            exec(block["python"], names)
            if "COLOURS" in names:
                write_vision_model(Path("tiny-vision"), [*names["COLOURS"]])
            else:
                write_model(Path("tiny"), names["CAPITALS"])
            continue
        printed = printed_by(block["sh"])
        print(as_typed(block["sh"]), printed, sep="", flush=True)
        if write:
            shown = block[0][: block.start("text") - block.start()] + printed + "```"
            page = page.replace(block[0], shown)
    if write:
        PAGE.write_text(page, encoding="utf-8")


def as_typed(commands: str) -> str:
    """The commands with prompts, as in a shell."""
    return "".join(f"\n$ {line}\n" for line in commands.splitlines())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run docs/tutorial.md on a tiny model.")
    parser.add_argument("--output", type=Path, default=Path("tutorial_output"), help="folder of models and data")
    parser.add_argument("--write", action="store_true", help="put the outputs into the page")
    main(**vars(parser.parse_args()))
