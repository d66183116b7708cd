"""Train a small Llama on the functions of Python's standard library until it writes text that looks like Python.

    python examples/demo.py [--output FOLDER] [--steps N] [--seconds S] [--device cpu|cuda]

The script needs no network and no GPU. It trains a tokenizer, writes a Hugging Face checkpoint with random weights,
loads it, trains on packed documents, evaluates on held-out files, saves, loads again, and generates.
"""

import argparse
import ast
import json
import math
import random
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from liger_models import LigerLlama, LlamaConfig

VOCAB, TOKENS_PER_BATCH, EVAL_BATCHES = 4096, 512, 32
PEAK_LR, WARMUP_STEPS, REPORT_EVERY = 1.5e-3, 30, 50
BOS, EOS = "<s>", "</s>"
PROMPTS = ("def __init__(self", "def is_", "def close(self")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}

Batch = tuple[Tensor, Tensor]
"""Token ids [1, T] of concatenated documents, and their boundaries [n + 1], which a forward takes as ``cu_seqlens``."""


def functions_in(file: Path) -> list[str]:
    """The source of each function and method, without comments, docstrings and decorators."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # some files are invalid on purpose
        return []
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
    functions = [node for scope in scopes for node in scope.body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        function.decorator_list = []
        if ast.get_docstring(function) is not None:
            function.body = function.body[1:] or [ast.Pass()]
    return [ast.unparse(function) for function in functions]


def read_standard_library() -> tuple[list[str], list[str]]:
    """Functions for training, and for evaluation the functions of every 20th file."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for path in library.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts)]
    seen: list[str] = []
    held_out: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated escape sequences
        for number, file in enumerate(sorted(files)):
            (seen if number % 20 else held_out).extend(functions_in(file))
    if len(seen) < 1000 or len(held_out) < 100:
        sys.exit(f"demo: {library} must hold Python's own source files, got {len(seen)} functions. Install them.")
    return seen, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer that begins every text with `BOS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": VOCAB, "special_tokens": [BOS, EOS], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options))
    begin = [(BOS, tokenizer.token_to_id(BOS))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=begin)
    return tokenizer


def write_checkpoint(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a Llama with random weights and its tokenizer as a Hugging Face checkpoint."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=528,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=TOKENS_PER_BATCH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    special_tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": config.eos_token_id}
    model = LigerLlama.from_config(config)
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(special_tokens).encode(),
        "generation_config.json": json.dumps(sampling).encode(),
    }
    model.save_pretrained(folder)


def pack(documents: list[list[int]], device: torch.device) -> Iterator[Batch]:
    """Yield full batches of concatenated documents in random order. A split document continues in the next batch."""
    order = random.Random(0)
    tokens: list[int] = []
    bounds = [0]
    while True:
        for document in order.sample(documents, len(documents)):
            while document:
                room = TOKENS_PER_BATCH - len(tokens)
                tokens, document = tokens + document[:room], document[room:]
                bounds.append(len(tokens))
                if len(tokens) == TOKENS_PER_BATCH:
                    yield torch.tensor([tokens], device=device), torch.tensor(bounds, device=device)
                    tokens, bounds = [], [0]


@torch.no_grad()
def evaluate(model: LigerLlama, batches: list[Batch]) -> float:
    """Mean loss over all targets: all tokens except the first token of each document."""
    model.eval()
    targets = sum(ids.numel() - (len(bounds) - 1) for ids, bounds in batches)
    return sum(
        model(ids, labels=ids, cu_seqlens=bounds, num_items_in_batch=targets).loss.item() for ids, bounds in batches
    )


def train(model: LigerLlama, batches: Iterator[Batch], steps: int, seconds: float) -> None:
    """Train with AdamW for ``steps`` or ``seconds``, with linear warm-up and then cosine decay."""
    # Only matrices have weight decay.
    model.train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    # `progress` goes from 0 to 1 with the steps or the seconds, whichever end first.
    start, progress, losses = time.perf_counter(), 0.0, []
    for step, (ids, bounds) in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(step / WARMUP_STEPS, 0.55 + 0.45 * math.cos(math.pi * progress))
        loss = model(ids, labels=ids, cu_seqlens=bounds).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        elapsed = time.perf_counter() - start
        progress = min(max(step / steps, elapsed / seconds), 1.0)
        if step % REPORT_EVERY == 0 or progress == 1.0:
            mean = torch.stack(losses).mean().item()
            print(f"step {step:>4} of {steps}   loss {mean:.3f}   {step * ids.numel() / elapsed:,.0f} tokens/s")
            losses.clear()
        if progress == 1.0:
            return


def main() -> None:
    """Read the options and run all stages."""
    parser = argparse.ArgumentParser(description="Train a small Llama on Python's standard library, and generate code.")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=600, help="maximum number of optimizer steps")
    parser.add_argument("--seconds", type=float, default=90, help="maximum training time in seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    try:
        device = torch.zeros(0, device=args.device).device
    except (AssertionError, RuntimeError) as error:
        parser.error(f"--device {args.device}: {error}")
    if args.steps < 1 or args.seconds <= 0:
        parser.error(f"--steps and --seconds must be positive, got {args.steps} and {args.seconds}")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    torch.manual_seed(0)
    initial, trained = args.output / "initial", args.output / "trained"
    args.output.mkdir(parents=True, exist_ok=True)

    # The data, and a checkpoint with random weights.
    texts, held_out = read_standard_library()
    write_checkpoint(initial, train_tokenizer(texts))
    print(f"{initial}: a checkpoint with random weights, and a tokenizer made from {len(texts):,} functions")

    # Train, and evaluate before and after.
    model = LigerLlama.from_pretrained(initial, dtype=dtype, device=device, progress=False)
    eos = model.tokenizer.eos_token_id
    documents, unseen = ([[*ids, eos] for ids in model.tokenizer.encode(group)] for group in (texts, held_out))
    tests = list(islice(pack(unseen, device), EVAL_BATCHES))
    size = sum(map(len, documents))
    print(f"{model.num_parameters():,} parameters in {dtype} on {device}, {size:,} tokens to train on")
    before = evaluate(model, tests)
    print(f"loss on files that it does not train on: {before:.3f}")
    train(model, pack(documents, device), args.steps, args.seconds)
    after = evaluate(model, tests)
    print(f"loss on files that it did not train on: {after:.3f}, before {before:.3f}")

    # The saved checkpoint has the same loss, and writes functions.
    model.save_pretrained(trained)
    model = LigerLlama.from_pretrained(trained, device=device, progress=False)
    reloaded = evaluate(model, tests)
    if not math.isclose(reloaded, after, rel_tol=1e-4):
        sys.exit(f"demo: the checkpoint in {trained} must have the model's loss, {after:.6f}, got {reloaded:.6f}.")
    print(f"{trained}: saved, loaded again, same loss; transformers loads it too")
    for prompt in PROMPTS:
        ids = torch.tensor([model.tokenizer.encode(prompt)], device=device)
        print(f"\n--- {prompt} ...\n{model.tokenizer.decode(model.generate(ids, max_new_tokens=100)[0])}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"demo: {error}")
