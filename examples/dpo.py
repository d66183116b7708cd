"""Direct preference optimization: a model learns to prefer one of two answers, and stays close to a frozen copy.

    python examples/dpo.py [--steps N]
    torchrun --nproc-per-node 8 examples/dpo.py

The script generates the pairs, in the format of TRL's DPOTrainer: prompt, chosen, rejected. For your own model,
replace `from_config` with `AutoLigerModel.from_pretrained(folder, shard=apply_fsdp)`, and use its tokenizer.
"""

import argparse
import copy
import os
import random

import torch
import torch.distributed as dist
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from torch import Tensor

from liger_models import LigerAdamW, LigerFusedLinearDPOLoss, LigerLlama, LlamaConfig, Tokenizer, preference_batch
from liger_models.parallel import apply_fsdp, clip_grad_norm_, mean_over_ranks, reshard

PAIRS, LEARNING_RATE = 8, 1e-3
"""PAIRS is the number of pairs per GPU in one step."""


def start() -> torch.device:
    """Return this process's device. Under torchrun, also initialize the process group."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if "RANK" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    return device


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are single bytes."""
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(backend, {"eos_token": "</s>"})


def make_pair(random: random.Random) -> dict[str, str]:
    """A sum with two correct answers in random words, one polite and one rude."""
    a, b = random.randrange(50), random.randrange(50)
    polite = random.choice(["Gladly: {}.", "Sure, it is {}.", "Of course, {}."])
    rude = random.choice(["{}, obviously.", "Why ask? {}.", "{}. Next."])
    return {"prompt": f"{a} + {b} = ? ", "chosen": polite.format(a + b), "rejected": rude.format(a + b)}


def main(steps: int) -> None:
    """Train, and compare the rewards of held-out pairs before and after."""
    device = start()
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )

    # The policy, and a frozen copy as the reference.
    torch.manual_seed(0)  # the same weights on all ranks
    policy = LigerLlama.from_config(config, device=device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    if dist.is_initialized():
        apply_fsdp(policy)
        apply_fsdp(reference)
    optimizer = LigerAdamW(policy.parameters(), lr=LEARNING_RATE)
    dpo = LigerFusedLinearDPOLoss(beta=0.1)

    def loss_and_metrics(pairs: list[dict[str, str]]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, reward accuracy and reward margin, each a mean over the pairs."""
        batch = {name: tensor.to(device) for name, tensor in preference_batch(pairs, tokenizer).items()}
        with torch.no_grad():
            ref_log_probs = reference(**batch, return_log_probs=True).log_probs

        # The loss runs inside the head, where FSDP has gathered its weight.
        loss, metrics = policy(
            **batch, loss_function=lambda x, weight, target: dpo(weight, x, target, ref_log_probs=ref_log_probs)
        ).loss
        return loss, metrics.accuracies.mean(), (metrics.chosen_rewards - metrics.rejected_rewards).mean()

    def evaluate() -> list[float]:
        with torch.no_grad():
            results = loss_and_metrics([make_pair(random.Random(number)) for number in range(1, 33)])
        reshard(policy)
        return [mean_over_ranks(value).item() for value in results]

    rank = dist.get_rank() if dist.is_initialized() else 0
    data = random.Random(1000 + rank)  # different pairs on each rank
    before = evaluate()
    for step in range(1, steps + 1):
        loss, *metrics = loss_and_metrics([make_pair(data) for _ in range(PAIRS)])
        loss.backward()
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            loss, accuracy, margin = (mean_over_ranks(value).item() for value in (loss, *metrics))
            if rank == 0:
                print(f"step {step}: loss {loss:.3f}, reward accuracy {accuracy:.2f}, reward margin {margin:.2f}")
    after = evaluate()
    if rank == 0:
        for name, old, new in zip(("loss", "reward accuracy", "reward margin"), before, after, strict=True):
            print(f"pairs not trained on, {name}: {old:.3f} -> {new:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DPO on generated pairs of answers.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    main(parser.parse_args().steps)
    if dist.is_initialized():
        dist.destroy_process_group()
