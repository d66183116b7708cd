"""Odds-ratio preference optimization: a model learns answers and preferences at once, without a reference model.

    python examples/orpo.py [--steps N]
    torchrun --nproc-per-node 8 examples/orpo.py

The script generates the data: the chosen answer counts upwards from the last token of the prompt, and the rejected
answer counts downwards. For your own model, replace `from_config` with `AutoLigerModel.from_pretrained(folder,
shard=apply_fsdp)`, and the token ids with texts or messages.
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models import LigerAdamW, LigerFusedLinearORPOLoss, LigerLlama, LlamaConfig, preference_batch
from liger_models.parallel import apply_fsdp, clip_grad_norm_, mean_over_ranks, reshard

VOCAB, PAIRS, LEARNING_RATE = 32, 8, 2e-3
"""PAIRS is the number of pairs per GPU in one step."""


def start() -> torch.device:
    """Return this process's device. Under torchrun, also initialize the process group."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if "RANK" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    return device


def make_pair(random: random.Random) -> dict[str, list[int]]:
    """A prompt and two answers of random lengths."""
    prompt = [random.randrange(VOCAB) for _ in range(random.randint(2, 5))]
    count = lambda step: [(prompt[-1] + step * i) % VOCAB for i in range(1, random.randint(6, 9))]
    return {"prompt_input_ids": prompt, "chosen_input_ids": count(1), "rejected_input_ids": count(-1)}


def main(steps: int) -> None:
    """Train, and compare the metrics on held-out pairs before and after."""
    device = start()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)  # the same weights on all ranks
    model = LigerLlama.from_config(config, device=device)
    if dist.is_initialized():
        apply_fsdp(model)
    optimizer = LigerAdamW(model.parameters(), lr=LEARNING_RATE)
    orpo = LigerFusedLinearORPOLoss(beta=0.2)

    def loss_and_metrics(pairs: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, negative log-likelihood of chosen answers, and the share of pairs in which they are more likely."""
        batch = {name: tensor.to(device) for name, tensor in preference_batch(pairs).items()}
        # The loss runs inside the head, where FSDP has gathered its weight.
        loss, metrics = model(**batch, loss_function=lambda x, weight, target: orpo(weight, x, target)).loss
        return loss, metrics.nll_loss, metrics.accuracies.mean()

    def evaluate() -> list[float]:
        with torch.no_grad():
            results = loss_and_metrics([make_pair(random.Random(number)) for number in range(32)])
        reshard(model)
        return [mean_over_ranks(value).item() for value in results]

    rank = dist.get_rank() if dist.is_initialized() else 0
    data = random.Random(1000 + rank)  # different pairs on each rank
    before = evaluate()
    for step in range(1, steps + 1):
        loss, *metrics = loss_and_metrics([make_pair(data) for _ in range(PAIRS)])
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            loss, nll, accuracy = (mean_over_ranks(value).item() for value in (loss, *metrics))
            if rank == 0:
                print(f"step {step}: loss {loss:.3f}, chosen answers' NLL {nll:.3f}, accuracy {accuracy:.2f}")
    after = evaluate()
    if rank == 0:
        for name, old, new in zip(("loss", "NLL", "accuracy"), before, after, strict=True):
            print(f"pairs not trained on, {name}: {old:.3f} -> {new:.3f}")

    # All ranks must generate, because FSDP gathers parameters in each forward.
    answer = model.generate([3, 17, 8], max_new_tokens=5)[0, 3:].tolist()
    if rank == 0:
        print(f"the answer to [3, 17, 8]: {answer}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="ORPO on generated pairs of answers.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    main(parser.parse_args().steps)
    if dist.is_initialized():
        dist.destroy_process_group()
