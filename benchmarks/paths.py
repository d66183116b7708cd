"""What a user types: the training command, TRL's trainer, and ``generate``, from a checkpoint and texts on the disk.

The other benchmarks measure what is inside. Here, each mode is a command or a few lines of a script, with their own
defaults, and all modes of a path have the same checkpoint, texts, rows and precision.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .decode import seconds
from .options import add_batch, add_model, add_modes, add_steps
from .processes import common_start, measure_all, plan_batch
from .rows import Row, Rows
from .tables import markdown, ratio, tokens
from .training.build import LORA, build_ours
from .training.job import Job
from .training.models import read_config
from .training.modes import Mode
from .training.tokenizer import words_tokenizer

HELP = "what a user types: the training command, TRL's trainer, and generate"
MODES = r"(full|lora)\+(trl\+(liger|door)(\+ac)?|train)|generate\+(hf|door|ours)"
DEFAULT = ",".join(
    [f"{path}+{way}" for path in ("full", "lora") for way in ("trl+liger", "trl+liger+ac", "trl+door", "train")]
    + [f"generate+{way}" for way in ("hf", "door", "ours")]
)
NAMES = {
    "full": "full fine-tuning: ", "lora": "LoRA: ", "generate": "generate: ", "train": "liger-models train",
    "trl": "TRL, ", "liger": "transformers + Liger Kernel", "door": "liger_models.hf", "hf": "transformers",
    "ours": "liger_models", "ac": ", activation checkpointing",
}  # fmt: skip
WARM_UP = 8
"""Number of steps before the timed ones, in which kernels compile."""
NEW_TOKENS, REPEATS = 128, 5


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "llama-3.2-1b")
    add_modes(parser, DEFAULT, MODES, "comma-separated; default: all of them")
    add_batch(parser, "8x2048", "rows x tokens of a training step; generate has as many rows, and prompts of 1/8")
    add_steps(parser, 32, "optimizer steps; the first ones are not timed")


def run(options: argparse.Namespace) -> Rows:
    if options.steps <= WARM_UP + 1:
        raise argparse.ArgumentError(None, f"--steps must be more than {WARM_UP + 1}, got {options.steps}")
    with common_start("paths:save", options.model, options.batch, options.steps):
        return measure_all(plan_batch("paths", options))


def save(job: Job) -> Row:
    """Save a model with random weights, a tokenizer and texts of 100 to 1,500 words in $SAVE."""
    folder, config = Path(os.environ["SAVE"]), read_config(job.model)
    tokenizer = words_tokenizer(config["vocab_size"])
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    build_ours(config | ids, Mode("ours", {})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw = random.Random(0)
    (B, T), total = job.shape, 0
    with (folder / "texts.jsonl").open("w") as file:
        while total < 2 * job.steps * B * T:
            words = [f"t{draw.randrange(10, config['vocab_size'])}" for _ in range(draw.randrange(100, 1500))]
            total += len(words)
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return {}


def measure(job: Job) -> Row:
    if job.mode.library == "generate":
        return measure_generate(job)
    return measure_command(job) if "train" in job.mode else measure_trainer(job)


def measure_command(job: Job) -> Row:
    """Run the training command in this process. It logs its tokens per second and its memory."""
    from liger_models.cli.commands import app

    rows, length = job.shape
    start = os.environ["START"]
    with tempfile.TemporaryDirectory() as folder:
        command = ["--debug", "train", "--model", start, "--data", f"{start}/texts.jsonl"]
        options = {
            "output": f"{folder}/run", "length": length, "batch-size": rows, "steps": job.steps, "log-every": 4,
            "dtype": "bfloat16", "lr": 1e-5, **({"lora-r": LORA["r"]} if job.mode.library == "lora" else {}),
        }  # fmt: skip
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        app(command, standalone_mode=False)
        lines = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "tokens_per_s" in line and line["step"] > WARM_UP]
    speed = statistics.median(line["tokens_per_s"] for line in timed)
    return {"tokens_per_s": round(speed), "peak_gib": round(max(line.get("memory_gib", 0.0) for line in timed), 2)}


def measure_trainer(job: Job) -> Row:
    """Run TRL's SFTTrainer on a model of transformers with Liger Kernel, or of `liger_models.hf`."""
    import datasets
    import peft
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    start, (rows, length) = os.environ["START"], job.shape
    if "door" in job.mode:
        import liger_models.hf

        liger_models.hf.register()
    ends: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            folder, packing=True, packing_strategy="wrapped", max_length=length, per_device_train_batch_size=rows,
            max_steps=job.steps, bf16=True, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-5,
            gradient_checkpointing="ac" in job.mode, use_liger_kernel="liger" in job.mode, dataloader_num_workers=2,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16, device_map="cuda"),
            arguments,
            train_dataset=datasets.load_dataset("json", data_files=f"{start}/texts.jsonl", split="train"),
            processing_class=AutoTokenizer.from_pretrained(start),
            callbacks=[Watch()],
            peft_config=peft.LoraConfig(**LORA, task_type="CAUSAL_LM") if job.mode.library == "lora" else None,
        )
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    timed = ends[WARM_UP:]
    step = statistics.median(end - begin for begin, end in itertools.pairwise(timed))
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"tokens_per_s": round(rows * length / step), "peak_gib": round(peak, 2)}


def measure_generate(job: Job) -> Row:
    """Time greedy decoding: the first token of a second call, and each further token."""
    start, (rows, length) = os.environ["START"], job.shape
    if "ours" in job.mode:
        from liger_models import AutoLigerModel

        model: Any = AutoLigerModel.from_pretrained(start, dtype=torch.bfloat16, device="cuda").eval()
        options: dict[str, Any] = {"eos_token_id": []}
    else:
        from transformers import AutoModelForCausalLM

        if "door" in job.mode:
            import liger_models.hf

            liger_models.hf.register()
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16, device_map="cuda").eval()
        model.generation_config.eos_token_id = None
        options = {}
    prompts = torch.randint(10, model.config.vocab_size, (rows, length // 8), device="cuda")
    options |= {"attention_mask": torch.ones_like(prompts), "do_sample": False}

    def times(new: int) -> list[float]:
        return [seconds(lambda: model.generate(prompts, max_new_tokens=new, **options)) for _ in range(REPEATS)]

    with torch.no_grad():
        times(NEW_TOKENS)
        first, whole = (statistics.median(times(new)[1:]) for new in (1, NEW_TOKENS))
    return {
        "first_ms": round(1e3 * first, 2),
        "step_ms": round(1e3 * (whole - first) / (NEW_TOKENS - 1), 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def title(mode: str) -> str:
    path, *words = mode.split("+")
    return NAMES[path] + "".join(NAMES[word] for word in words)


def is_peer(row: Row) -> bool:
    return "liger" in Mode.parse(row["mode"]) or row["mode"] == "generate+hf"


def rate(row: Row) -> float:
    """Tokens per second, or the inverse of the time of a token; 0 for an error."""
    return float(row.get("tokens_per_s") or (1e3 / row["step_ms"] if "step_ms" in row else 0))


def best_peer(row: Row, rows: Rows) -> Row:
    """The fastest way with transformers on the path of ``row``, with the same model and batch; {} if there is none."""
    path = Mode.parse(row["mode"]).library
    peers = [
        peer for peer in rows
        if is_peer(peer) and Mode.parse(peer["mode"]).library == path
        and (peer["model"], peer["batch"]) == (row["model"], row["batch"])
    ]  # fmt: skip
    return max(peers, key=rate, default={})


def table(rows: Rows) -> str:
    """One line per mode. Ratios are to the fastest way with transformers, Liger Kernel and TRL on the same path."""
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), title(row["mode"]))
        if "error" in row:
            lines.append((*names, row["error"], "", "", "", "", ""))
            continue
        best = best_peer(row, rows)
        speed = f"{row['tokens_per_s']:,}" if "tokens_per_s" in row else ""
        measured = (speed, row.get("first_ms", ""), row.get("step_ms", ""), row["peak_gib"])
        ratios = ratio(rate(row), best and rate(best)), ratio(row["peak_gib"], best.get("peak_gib"))
        lines.append((*names, *measured, *ratios))
    return markdown("model|rows||tokens/s|first token ms|ms/token|peak GiB|speed ratio|memory ratio", lines)
