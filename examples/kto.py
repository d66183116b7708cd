"""Kahneman-Tversky optimization: a model learns from single answers marked good or bad, relative to a frozen copy.

    python examples/kto.py [--steps N]
    torchrun --nproc-per-node 8 examples/kto.py

The script generates the data: a good answer counts upwards from the last token of the prompt, and a bad answer counts
downwards. For your own model, replace `from_config` with `AutoLigerModel.from_pretrained(folder, shard=apply_fsdp)`.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models import LigerAdamW, LigerFusedLinearKTOLoss, LigerLlama, LlamaConfig
from liger_models.parallel import apply_fsdp, clip_grad_norm_, mean_over_ranks, reshard

VOCAB, PROMPT, ANSWER, ROWS, LEARNING_RATE = 32, 4, 8, 16, 1e-3
"""ROWS is the number of answers per GPU in one step."""


def start() -> torch.device:
    """Return this process's device. Under torchrun, also initialize the process group."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if "RANK" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    return device


def make_batch(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts with answers [ROWS, T], and whether each answer is good, [ROWS] bool."""
    prompt = torch.randint(VOCAB, (ROWS, PROMPT), generator=generator)
    good = torch.rand(ROWS, generator=generator) < 0.5
    direction = torch.where(good, 1, -1)[:, None]
    answer = (prompt[:, -1:] + direction * torch.arange(1, ANSWER + 1)) % VOCAB
    return torch.cat([prompt, answer], 1).to(device), good.to(device)


def with_labels(ids: Tensor) -> dict[str, Tensor]:
    """A batch whose labels are the tokens of the answers."""
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": ids, "labels": labels}


def main(steps: int) -> None:
    """Train, and compare the rewards of held-out good and bad answers before and after."""
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
    kto = LigerFusedLinearKTOLoss(beta=0.1, use_ref_model=True)

    def loss_and_rewards(ids: Tensor, good: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and [4]: sum of rewards and number of good answers, and the same of bad answers."""
        batch = with_labels(ids)
        with torch.no_grad():
            # z estimates the KL divergence of the policy from the reference, on answers to other prompts.
            mismatched = with_labels(torch.cat([ids[:, :PROMPT], ids[:, PROMPT:].roll(1, 0)], 1))
            log_ratios = policy(**mismatched, return_log_probs=True).log_probs.sum(-1)  # [ROWS]
            log_ratios = log_ratios - reference(**mismatched, return_log_probs=True).log_probs.sum(-1)
            z = mean_over_ranks(log_ratios.mean()).clamp(min=0)
            ref_log_probs = reference(**batch, return_log_probs=True).log_probs
        reshard(policy)

        # The loss runs inside the head, where FSDP has gathered its weight.
        loss, metrics = policy(
            **batch,
            loss_function=lambda x, weight, target: kto(
                x, weight, target, preference_labels=good, kl=z, ref_log_probs=ref_log_probs
            ),
        ).loss
        sums = [metrics.chosen_rewards_sum, good.sum(), metrics.rejected_rewards_sum, (~good).sum()]
        return loss, torch.stack([value.float() for value in sums])

    def evaluate() -> tuple[float, float]:
        with torch.no_grad():
            _, sums = loss_and_rewards(*make_batch(torch.Generator().manual_seed(0), device))
        reshard(policy)
        good, goods, bad, bads = mean_over_ranks(sums).tolist()
        return good / goods, bad / bads

    rank = dist.get_rank() if dist.is_initialized() else 0
    data = torch.Generator().manual_seed(1 + rank)  # different answers on each rank
    before = evaluate()
    for step in range(1, steps + 1):
        loss, _ = loss_and_rewards(*make_batch(data, device))
        loss.backward()
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            loss = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    after = evaluate()
    if rank == 0:
        for name, old, new in zip(("good", "bad"), before, after, strict=True):
            print(f"mean reward of {name} answers: {old:.3f} -> {new:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="KTO on generated good and bad answers.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    main(parser.parse_args().steps)
    if dist.is_initialized():
        dist.destroy_process_group()
