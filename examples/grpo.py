"""Group-relative policy optimization: sample answers, reward them, and make better answers more likely.

    python examples/grpo.py [--steps N] [--deterministic]
    torchrun --nproc-per-node 8 examples/grpo.py

The method needs no value model. The reward is the fraction of an answer's tokens that are one more than the token
before them. For your own model, replace `from_config` with `AutoLigerModel.from_pretrained(folder, shard=apply_fsdp)`,
and `make_prompts` and `reward` with your prompts and reward.
"""

import argparse
import copy
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from liger_models import LigerAdamW, LigerFusedLinearGRPOLoss, LigerLlama, LlamaConfig
from liger_models.generation import deterministic_forward
from liger_models.parallel import apply_fsdp, clip_grad_norm_, mean_over_ranks, unsharded

VOCAB, SHORTEST, LONGEST, ANSWER, LEARNING_RATE = 16, 1, 5, 6, 2e-3
PROMPTS, GROUP, UPDATES = 8, 16, 2
"""Numbers per GPU and step: prompts, answers to each prompt, and optimizer steps on these answers."""


def start() -> torch.device:
    """Return this process's device. Under torchrun, also initialize the process group."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if "RANK" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    return device


def make_prompts(generator: torch.Generator) -> list[Tensor]:
    """PROMPTS prompts of 1 to 5 token ids."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (PROMPTS,), generator=generator).tolist()
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def reward(prompt: Tensor, answer: Tensor) -> float:
    """The reward of an answer [n] to a prompt [T]."""
    before = torch.cat([prompt[-1:], answer[:-1]])
    return (answer == (before + 1) % VOCAB).float().mean().item()


def main(steps: int, deterministic: bool) -> None:
    """Train, and print the mean reward. With ``deterministic`` all ratios in the first update are exactly 1."""
    device = start()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )

    # The policy, and a frozen copy as the reference.
    torch.manual_seed(0)  # the same weights on all ranks
    policy = LigerLlama.from_config(config, device=device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    if dist.is_initialized():
        apply_fsdp(policy)
        apply_fsdp(reference)
    optimizer = LigerAdamW(policy.parameters(), lr=LEARNING_RATE)
    grpo = LigerFusedLinearGRPOLoss(beta=0.01, epsilon_low=0.2, epsilon_high=0.28, loss_type="dapo")

    def improve(ids: Tensor, labels: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Train on sampled answers. Returns the KL divergence from the reference, and the clipped fraction.

        Args:
            ids: [rows, T] int64, prompts and answers, padded on the right.
            labels: [rows, T] int64, the tokens of answers, and −100 elsewhere.
            old: [rows, T] fp32, log-probability of each next token when it was sampled.
            advantages: [rows] fp32.
        """
        with torch.no_grad():
            ref = reference(ids, labels=labels, return_log_probs=True).log_probs
        for _ in range(UPDATES):
            with deterministic_forward(policy) if deterministic else nullcontext():
                # The loss runs inside the head, where FSDP has gathered its weight.
                loss, metrics = policy(
                    ids,
                    labels=labels,
                    loss_function=lambda x, weight, target: grpo(
                        x, weight, target, target != -100, advantages, ref_per_token_logps=ref, old_per_token_logps=old
                    ),
                ).loss
            loss.backward()
            clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return metrics

    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(1 + rank)  # different prompts and samples on each rank
    data = torch.Generator().manual_seed(1 + rank)
    rewards = []
    for step in range(1, steps + 1):
        # Sample a group of answers to each prompt.
        prompts = make_prompts(data)
        with unsharded(policy) as sampled:  # each rank by itself
            answers = sampled.rollout(
                prompts, max_new_tokens=ANSWER, do_sample=True, num_return_sequences=GROUP, eos_token_id=[],
                deterministic=deterministic,
            )  # fmt: skip

        # Prompts with answers, as a padded batch [rows, T].
        repeated = [prompt for prompt in prompts for _ in range(GROUP)]
        pairs = [*zip(repeated, answers, strict=True)]
        ids = pad_sequence([torch.cat([prompt, answer.tokens]) for prompt, answer in pairs], True)
        labels = pad_sequence(
            [F.pad(answer.tokens, (len(prompt), 0), value=-100) for prompt, answer in pairs], True, -100
        )
        # The log-probability of a token stands at the position of the token before it.
        old = pad_sequence([F.pad(answer.log_probs, (len(prompt) - 1, 1)) for prompt, answer in pairs], True)

        # The advantage of an answer is relative to its group.
        scores = torch.tensor([reward(prompt, answer.tokens) for prompt, answer in pairs])
        groups = scores.view(PROMPTS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        kl, clipped = improve(*(tensor.to(device) for tensor in (ids, labels, old, advantages)))
        mean_reward, kl, clipped = (mean_over_ranks(value).item() for value in (scores.mean(), kl, clipped))
        rewards.append(mean_reward)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: mean reward {mean_reward:.3f}, KL {kl:.3f}, clipped {clipped:.3f}")
    if rank == 0:
        few = max(steps // 10, 1)
        print(f"mean reward: {sum(rewards[:few]) / few:.3f} -> {sum(rewards[-few:]) / few:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO with a reward computed by a function.")
    parser.add_argument("--steps", type=int, default=60, help="number of times that answers are sampled")
    parser.add_argument("--deterministic", action="store_true", help="sample with the bits of the training forward")
    main(**vars(parser.parse_args()))
    if dist.is_initialized():
        dist.destroy_process_group()
