"""A step of GRPO with adapters: answers are sampled, rewarded and trained on, here and by TRL.

All answers have the same length, so that both libraries train on the same number of tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .options import add_batch, add_model, add_modes, add_steps
from .processes import measure_all, plan_batch
from .rows import Row, Rows
from .tables import markdown, ratio, tokens
from .training.build import LORA, build_hf, build_ours
from .training.job import Job
from .training.models import read_config
from .training.modes import Mode
from .training.tokenizer import words_tokenizer

HELP = "a GRPO step with adapters: seconds of sampling and of training, memory"
MODES = r"trl(\+liger)?(\+ac)?|ours(\+selective|\+full)?"
NAMES = {
    "trl": "TRL", "ours": "liger_models", "liger": ", Liger Kernel's loss", "ac": ", activation checkpointing",
    "selective": ', policy "selective"', "full": ', policy "full"',
}  # fmt: skip
GROUP, MICRO_BATCH = 8, 16
"""Answers to each prompt, and answers in a forward."""
REPEATS = 2
"""Timed steps, after one that compiles kernels."""

Times = tuple[float, float]
"""Seconds of a step: sampling, and the rest."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "llama-3.2-3b")
    add_modes(parser, "trl,trl+liger+ac,ours,ours+selective", MODES, "comma-separated, of trl and ours with extras")
    add_batch(parser, "256x256", f"answers, a multiple of {MICRO_BATCH}, x tokens of a prompt")
    add_steps(parser, 512, "tokens of each answer")


def run(options: argparse.Namespace) -> Rows:
    answers = int(options.batch.split("x")[0])
    if answers % MICRO_BATCH:
        raise argparse.ArgumentError(None, f"--batch must have a multiple of {MICRO_BATCH} answers, got {answers}")
    return measure_all(plan_batch("grpo", options))


def measure(job: Job) -> Row:
    config = read_config(job.model)
    config["eos_token_id"] = None
    if job.mode.library == "ours":
        model: Any = build_ours(config, Mode("ours", {"lora": None, **job.mode.extras}))
        steps = our_steps(model, config["vocab_size"], *job.shape, job.steps)
        times = [next(steps)]
        torch.cuda.reset_peak_memory_stats()
        times += [next(steps) for _ in range(REPEATS)]
    else:
        model = build_hf(config, liger=False, recompute=False)
        times = trl_steps(model, job.mode, *job.shape, job.steps)
    sampling, training = (statistics.median(each) for each in zip(*times[1:], strict=True))
    return {
        "new_tokens": job.steps,
        "step_s": round(sampling + training, 2),
        "sampling_s": round(sampling, 2),
        "training_s": round(training, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def even(answer: Any) -> float:
    """The reward: the part of an answer's ids that are even."""
    return float((torch.as_tensor(answer) % 2 == 0).float().mean())


def our_steps(model: Any, vocabulary: int, rows: int, length: int, new: int) -> Iterator[Times]:
    from liger_models import LigerFusedLinearGRPOLoss

    grpo = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-6, fused=True)
    while True:
        begun = now()
        prompts = [torch.randint(5, vocabulary - 5, (length,)) for _ in range(rows // GROUP)]
        answers = model.rollout(
            prompts, max_new_tokens=new, do_sample=True, num_return_sequences=GROUP, eos_token_id=[]
        )
        sampled = now()
        asked = [prompt for prompt in prompts for _ in range(GROUP)]
        ids = torch.stack([torch.cat([prompt, each.tokens]) for prompt, each in zip(asked, answers, strict=True)])
        old = pad(torch.stack([each.log_probs for each in answers]), (length - 1, 1))
        rewards = torch.tensor([even(each.tokens) for each in answers]).view(-1, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        labels = ids.index_fill(1, torch.arange(length), -100)
        whole = (each.to(model.device) for each in (ids, labels, old, advantages.flatten()))
        for part in zip(*(each.split(MICRO_BATCH) for each in whole), strict=True):
            train_on(model, grpo, *part, share=MICRO_BATCH / rows)
        optimizer.step()
        optimizer.zero_grad()
        yield sampled - begun, now() - sampled


def train_on(
    model: Any, grpo: Callable[..., Any], ids: Tensor, labels: Tensor, old: Tensor, advantages: Tensor, share: float
) -> None:
    """Add the gradients of some answers, which are this share of all."""
    loss, _ = model(
        ids,
        labels=labels,
        loss_function=lambda x, weight, target: grpo(
            x, weight, target, target != -100, advantages, old_per_token_logps=old
        ),
    ).loss
    (share * loss).backward()


def trl_steps(model: Any, mode: Mode, rows: int, length: int, new: int, **options: Any) -> list[Times]:
    """The times of all steps by TRL's trainer, with transformers' generation. Peak memory is that after the first.

    Args:
        options: of the trainer's configuration.
    """
    import datasets
    import peft
    import trl
    from transformers import TrainerCallback

    times: list[Times] = []
    sampling = begun = 0.0

    class Timed(trl.GRPOTrainer):
        def _generate_single_turn(self, *arguments: Any, **more: Any) -> Any:
            nonlocal sampling
            start = now()
            found = super()._generate_single_turn(*arguments, **more)
            sampling += now() - start
            return found

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal sampling, begun
            if times:
                return
            sampling, begun = 0.0, now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal sampling, begun
            end = now()
            times.append((sampling, end - begun - sampling))
            sampling, begun = 0.0, end
            if len(times) == 1 and torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()

    vocabulary, steps = model.config.vocab_size, 1 + REPEATS
    drawn = torch.randint(5, vocabulary - 5, (steps * rows // GROUP, length)).tolist()
    prompts = [{"prompt": " ".join(f"t{each}" for each in ids)} for ids in drawn]
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            folder, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=steps, learning_rate=1e-6,
            per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=rows // MICRO_BATCH,
            num_generations=GROUP, max_completion_length=new, beta=0.0,
            generation_kwargs={"min_new_tokens": new, "use_cache": True}, use_liger_kernel="liger" in mode,
            gradient_checkpointing="ac" in mode, **{"bf16": True, **options},
        )  # fmt: skip
        trainer = Timed(
            model=model,
            reward_funcs=lambda completion_ids, **_: [even(each) for each in completion_ids],
            args=arguments,
            train_dataset=datasets.Dataset.from_list(prompts),
            processing_class=words_tokenizer(vocabulary),
            callbacks=[Watch()],
            peft_config=peft.LoraConfig(**LORA, task_type="CAUSAL_LM"),
        )
        trainer.train()
    return times


def title(mode: str) -> str:
    return "".join(NAMES[word] for word in mode.split("+"))


def table(rows: Rows) -> str:
    """One line per mode; ratios are to the fastest mode of TRL with as many tokens."""
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), title(row["mode"]))
        if "error" in row:
            lines.append((*names, row["error"], "", "", "", "", "", ""))
            continue
        peers = [
            each for each in rows
            if each["mode"].startswith("trl") and "error" not in each
            and all(each[key] == row[key] for key in ("model", "batch", "new_tokens"))
        ]  # fmt: skip
        best: Row = min(peers, key=lambda each: each["step_s"], default={})
        keys = ("new_tokens", "step_s", "sampling_s", "training_s", "peak_gib")
        ratios = ratio(best.get("step_s"), row["step_s"]), ratio(row["peak_gib"], best.get("peak_gib"))
        lines.append((*names, *(row[key] for key in keys), *ratios))
    head = "model|answers||new tokens|s/step|sampling s|training s|peak GiB|speed ratio|memory ratio"
    return markdown(head, lines)
