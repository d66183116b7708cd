"""Run the ten minutes of docs/tutorial.md on the CPU, with a tiny model in place of the one on the hub.

    python examples/tutorial.py [--output FOLDER] [--write]

It trains a chat model of 0.1 million parameters that names capitals, and talks like a pirate if asked to. Then it runs
the page: its Python blocks, and every command that has an output below it. ``--write`` puts what they print into
the page. Needs no network and no GPU.
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

from liger_models import LigerAdamW, LigerLlama, LlamaConfig
from liger_models.cli.commands import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorial.md"
INSIDE = r"(?:(?!^```).*\n)*"
BLOCK = re.compile(
    rf"^```python\n(?P<python>{INSIDE})```$|^```sh\n(?P<sh>{INSIDE})```\n\n```text\n(?P<text>{INSIDE})```$",
    re.MULTILINE,
)
"""A Python block, or commands and what they print."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STEPS = 250
UNSEEN = {"Norway": "Oslo", "Kenya": "Nairobi"}
"""What the tiny model knows besides the capitals of the page."""


def write_model(folder: Path, capitals: dict[str, str]) -> None:
    """Train a tiny chat model to name these and other capitals, and save it with its tokenizer."""
    capitals = capitals | UNSEEN
    asked = [f"{pirate}What is the capital of {country}?" for pirate in ("Pirate! ", "") for country in capitals]
    told = [text.format(city) for text in ("Ahoy! {} it be, matey.", "It is {}.") for city in capitals.values()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        asked + told, trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in ("user", "assistant", "end")])
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.token_to_id("<|end|>"),
    )  # fmt: skip
    model = LigerLlama.from_config(config)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": json.dumps({"do_sample": False, "eos_token_id": config.eos_token_id}).encode(),
    }
    texts = [f"<|user|>{ask}<|end|><|assistant|>{tell}<|end|>" for ask, tell in zip(asked, told, strict=True)]
    rows = [tokenizer.encode(text).ids for text in texts]
    ids = torch.tensor([[token for row in rows for token in row]])
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
    optimizer = LigerAdamW(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        model(ids, labels=ids, cu_seqlens=bounds).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def printed_by(commands: str) -> str:
    """What the commands of a block print; ``liger-models`` runs in this process."""
    printed = io.StringIO()
    for line in commands.splitlines():
        name, *arguments = shlex.split(os.path.expandvars(line))
        if name != "liger-models":
            raise ValueError(f"{PAGE}: a command with an output must be liger-models, got {line!r}.")
        with contextlib.redirect_stdout(printed):
            app(arguments, prog_name=name, standalone_mode=False)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def main(output: Path, write: bool) -> None:
    """Run the page in the folder."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    output.mkdir(parents=True, exist_ok=True)
    os.chdir(output)
    os.environ |= {"MODEL": "tiny", "XDG_CACHE_HOME": "cache"}
    page = PAGE.read_text(encoding="utf-8")
    names: dict = {}
    for block in BLOCK.finditer(page):
        if block["python"]:
            exec(block["python"], names)
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
    """The commands as a shell shows them."""
    return "".join(f"\n$ {line}\n" for line in commands.splitlines())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run docs/tutorial.md on a tiny model.")
    parser.add_argument("--output", type=Path, default=Path("tutorial_output"), help="folder of models and data")
    parser.add_argument("--write", action="store_true", help="put the outputs into the page")
    main(**vars(parser.parse_args()))
