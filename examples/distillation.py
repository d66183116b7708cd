"""Distillation: a small model learns to predict the token distributions of a larger one.

    python examples/distillation.py [--steps N]
    torchrun --nproc-per-node 8 examples/distillation.py

The script first trains the teacher on walks through a random graph. For your own models, replace `from_config` with
`AutoLigerModel.from_pretrained(folder, shard=apply_fsdp)`. Teacher and student must share a vocabulary.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models import LigerAdamW, LigerFusedLinearJSD, LigerFusedLinearJSDLoss, LigerLlama, LlamaConfig
from liger_models.parallel import apply_fsdp, clip_grad_norm_, mean_over_ranks, reshard

VOCAB, ROWS, LENGTH, LEARNING_RATE = 64, 8, 32, 3e-3
"""ROWS is the number of rows per GPU in one step."""


def start() -> torch.device:
    """Return this process's device. Under torchrun, also initialize the process group."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if "RANK" in os.environ:
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    return device


class Walks:
    """Batches of walks through a random graph. Each token has four successors with different probabilities."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device
        self.successors = torch.randint(VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(0))

    def next(self) -> dict[str, Tensor]:
        tokens = [torch.randint(VOCAB, (ROWS,), generator=self.generator)]
        while len(tokens) < LENGTH:
            choice = torch.multinomial(torch.tensor([8.0, 4.0, 2.0, 1.0]), ROWS, True, generator=self.generator)
            tokens.append(self.successors[tokens[-1], choice])
        ids = torch.stack(tokens, 1).to(self.device)
        return {"input_ids": ids, "labels": ids}


def make_model(width: int, layers: int, device: torch.device) -> LigerLlama:
    """A model with random weights, equal on all ranks. With several ranks it is sharded."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LigerLlama.from_config(config, device=device)
    return apply_fsdp(model) if dist.is_initialized() else model


def update(model: LigerLlama, optimizer: LigerAdamW, loss: Tensor) -> None:
    """Backward, gradient clipping and one optimizer step."""
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main(steps: int) -> None:
    """Train the teacher, distill it, and compare both models on new walks."""
    device = start()
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = Walks(1 + rank, device)
    teacher = make_model(96, 3, device)
    optimizer = LigerAdamW(teacher.parameters(), lr=LEARNING_RATE)
    for _ in range(60):
        update(teacher, optimizer, teacher(**data.next()).loss)
    teacher.requires_grad_(False)

    # Distill it into the student.
    student = make_model(32, 2, device)
    optimizer = LigerAdamW(student.parameters(), lr=LEARNING_RATE)
    distil = LigerFusedLinearJSDLoss(weight_hard_loss=0.2, weight_soft_loss=0.8, beta=0.5, temperature=1.5)
    divergence = LigerFusedLinearJSD(jsd_beta=0.0)  # KL divergence of the teacher from the student

    def compare(loss: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """A loss of the hidden states and heads of both models."""
        with torch.no_grad():
            hidden, head, _ = teacher(**batch, loss_function=lambda *inputs: inputs).loss

        # Loss functions run inside the head, where FSDP has gathered its weight. Without a backward the teacher's
        # weight stays gathered, so the student's loss can use it.
        return student(**batch, loss_function=lambda x, weight, target: loss(x, weight, hidden, head, target)).loss

    def evaluate() -> float:
        with torch.no_grad():
            kl = compare(divergence, Walks(0, device).next())
        reshard(student)
        return mean_over_ranks(kl).item()

    before = evaluate()
    for step in range(1, steps + 1):
        loss = compare(distil, data.next())
        update(student, optimizer, loss)
        if step % 20 == 0:
            loss = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    after = evaluate()
    if rank == 0:
        print(f"{teacher.num_parameters():,} parameters teach {student.num_parameters():,}")
        print(f"KL divergence of the teacher from the student: {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a teacher and distil it into a smaller model.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of the student")
    main(parser.parse_args().steps)
    if dist.is_initialized():
        dist.destroy_process_group()
