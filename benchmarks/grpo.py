"""A GRPO step with adapters, in this package and in TRL: answers are sampled, rewarded and used for training.

All answers have the same length, so both libraries train on the same number of tokens.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from .clock import now, peak_gib
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
MODES = r"trl(\+liger)?(\+ac)?|ours(\+float8|\+nf4)?(\+rollout8)?(\+gateup8|\+selective|\+full)?"
NAMES = {
    "trl": "TRL", "ours": "liger_models", "liger": ", Liger Kernel's loss", "ac": ", activation checkpointing",
    "float8": ", float8 weights", "nf4": ", 4-bit weights", "rollout8": ", rollouts in float8",
    "gateup8": ", gate and up saved in 8 bits", "selective": ', policy "selective"', "full": ', policy "full"',
}  # fmt: skip
GROUP, MICRO_BATCH = 8, 16
"""Number of answers for each prompt, and number of answers in a forward."""
REPEATS = 2
"""Number of timed steps, after an untimed step that compiles kernels."""

Times = tuple[float, float]
"""Seconds that a step spends on sampling, and on everything else."""


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
    config["eos_token_id"] = None  # all answers have the full length
    if job.mode.library == "ours":
        extras = {name: value for name, value in job.mode.extras.items() if name != "rollout8"}
        model: Any = build_ours(config, Mode("ours", {"lora": None, **extras}))
        options = {"weight_dtype": "float8", "cache_dtype": "float8"} if "rollout8" in job.mode else {}
        steps = our_steps(model, config["vocab_size"], *job.shape, job.steps, options)
        times = [next(steps)]
        torch.cuda.reset_peak_memory_stats()
        times += [next(steps) for _ in range(REPEATS)]
        peak = peak_gib()
        steps.close()
        more = {"divergence": round(divergence(model, config["vocab_size"], job.shape[1], job.steps, options), 5)}
    else:
        model = build_hf(config, liger=False, recompute=False)
        times, more = trl_steps(model, job.mode, *job.shape, job.steps), {}
        peak = peak_gib()
    sampling, training = (statistics.median(seconds) for seconds in zip(*times[1:], strict=True))
    return {
        "new_tokens": job.steps,
        "step_s": round(sampling + training, 2),
        "sampling_s": round(sampling, 2),
        "training_s": round(training, 2),
        "peak_gib": peak,
        **more,
    }


def even(answer: Any) -> float:
    """The reward of an answer: the share of even ids in it."""
    return float((torch.as_tensor(answer) % 2 == 0).float().mean())


def our_steps(
    model: Any, vocabulary: int, rows: int, length: int, new: int, options: dict[str, Any]
) -> Iterator[Times]:
    """Run steps with this package, and yield the times of each step. ``options`` are options of the rollout."""
    from liger_models import LigerFusedLinearGRPOLoss
    from liger_models.common.device import on_device
    from liger_models.data import pack_answers

    grpo = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    while True:
        # Sample a group of answers for each prompt.
        begun = now()
        prompts = [torch.randint(5, vocabulary - 5, (length,)) for _ in range(rows // GROUP)]
        answers = model.rollout(
            prompts, max_new_tokens=new, do_sample=True, num_return_sequences=GROUP, eos_token_id=[], **options
        )
        sampled = now()

        # The advantage of an answer is relative to its group.
        rewards = torch.tensor([even(answer.tokens) for answer in answers]).view(-1, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

        # Train in micro-batches, in which the answers to a prompt share the prompt's tokens.
        for first in range(0, rows, MICRO_BATCH):
            part = slice(first, first + MICRO_BATCH)
            batch, tokens = pack_answers(
                prompts[first // GROUP : (first + MICRO_BATCH) // GROUP], [answer.tokens for answer in answers[part]]
            )
            old = pad_sequence([answer.log_probs for answer in answers[part]], batch_first=True)
            old = pad(old, (0, tokens.shape[1] - old.shape[1]))
            given = (on_device(tensor, model.device) for tensor in (tokens, old, advantages[part]))
            # The model reads the bounds and the parents of documents on the host.
            moved = {name: on_device(batch[name], model.device) for name in ("input_ids", "labels")}
            train_on(model, grpo, batch | moved, *given, share=MICRO_BATCH / rows, rounds=bool(options))
        optimizer.step()
        optimizer.zero_grad()
        yield sampled - begun, now() - sampled


def train_on(
    model: Any, grpo: Callable[..., Any], batch: dict[str, Tensor], tokens: Tensor, old: Tensor, advantages: Tensor,
    share: float, rounds: bool,
) -> None:  # fmt: skip
    """Add the gradients of a micro-batch that has the given share of all answers.

    Args:
        batch, tokens: as `pack_answers` returns them.
        old: [answers, n] fp32, log-probabilities of the answers' tokens under the sampling policy.
        advantages: [answers].
        share: the micro-batch's share of all answers.
        rounds: whether the rollout rounds weights, keys and values, so that the loss corrects for the difference.
    """
    from liger_models.layers import select_tokens

    def loss_function(x: Tensor, weight: Tensor, target: Tensor) -> Any:
        x, target = select_tokens(x, target, tokens)
        name = "sampling_per_token_logps" if rounds else "old_per_token_logps"
        return grpo(x, weight, target, target != -100, advantages, **{name: old})

    loss, _ = model(**batch, loss_function=loss_function).loss
    (share * loss).backward()


@torch.no_grad()
def divergence(model: Any, vocabulary: int, length: int, new: int, options: dict[str, Any]) -> float:
    """The mean absolute difference between the log-probabilities in sampling and in training, over a micro-batch."""
    from liger_models.common.device import on_device
    from liger_models.data import pack_answers
    from liger_models.kernels.loss.linear_logprobs import fused_linear_logprobs
    from liger_models.layers import select_tokens

    prompts = [torch.randint(5, vocabulary - 5, (length,)) for _ in range(MICRO_BATCH // GROUP)]
    answers = model.rollout(
        prompts, max_new_tokens=new, do_sample=True, num_return_sequences=GROUP, eos_token_id=[], **options
    )
    batch, tokens = pack_answers(prompts, [answer.tokens for answer in answers])
    moved = {name: on_device(batch[name], model.device) for name in ("input_ids", "labels")}
    tokens = tokens.to(model.device)

    def log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        x, target = select_tokens(x, target, tokens)
        return fused_linear_logprobs(x, weight, target)

    trained = model(**batch | moved, loss_function=log_probs).loss[:, :new].cpu()
    return float((trained - torch.stack([answer.log_probs for answer in answers])).abs().mean())


def trl_steps(model: Any, mode: Mode, rows: int, length: int, new: int, **options: Any) -> list[Times]:
    """Run all steps with TRL's trainer and transformers' generation. Peak memory is reset after the first step.

    Args:
        options: other options of the trainer's configuration.
    """
    import datasets
    import peft
    import trl
    from transformers import TrainerCallback

    times: list[Times] = []
    sampling = begun = 0.0

    # Times of sampling and of everything else, from the end of one step to the end of the next step.
    class Timed(trl.GRPOTrainer):
        def _generate_single_turn(self, *arguments: Any, **more: Any) -> Any:
            nonlocal sampling
            start = now()
            answers = super()._generate_single_turn(*arguments, **more)
            sampling += now() - start
            return answers

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

    # Prompts must be texts, because the trainer takes no ids.
    vocabulary, steps = model.config.vocab_size, 1 + REPEATS
    drawn = torch.randint(5, vocabulary - 5, (steps * rows // GROUP, length)).tolist()
    prompts = [{"prompt": " ".join(f"t{token}" for token in ids)} for ids in drawn]

    # All prompts of a step are sampled at once, and accumulated over micro-batches.
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
            reward_funcs=lambda completion_ids, **_: [even(ids) for ids in completion_ids],
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
    """One line per mode. Ratios are relative to TRL's fastest mode with the same number of tokens.

    A row that was measured at another commit than this mode has no ratios.
    """
    lines = []
    for row in rows:
        names = (row["model"], tokens(row["batch"]), title(row["mode"]))
        if "error" in row:
            lines.append((*names, row["error"], "", "", "", "", "", "", ""))
            continue
        peers = [
            peer for peer in rows
            if peer["mode"].startswith("trl") and "error" not in peer
            and all(peer[key] == row[key] for key in ("model", "batch", "new_tokens"))
        ]  # fmt: skip
        best: Row = min(peers, key=lambda peer: peer["step_s"], default={})
        best = best if best.get("commit") == row["commit"] else {}
        keys = ("new_tokens", "step_s", "sampling_s", "training_s", "peak_gib")
        ratios = ratio(best.get("step_s"), row["step_s"]), ratio(row["peak_gib"], best.get("peak_gib"))
        lines.append((*names, *(row[key] for key in keys), *ratios, row.get("divergence", "")))
    head = "model|answers||new tokens|s/step|sampling s|training s|peak GiB|speed ratio|memory ratio|divergence"
    return markdown(head, lines)
