"""Unsloth's adapters on a checkpoint with random weights, with the same calls as in Unsloth's notebooks."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from .build import LORA, build_ours
from .job import Job
from .models import read_config
from .modes import Mode
from .tokenizer import words_tokenizer

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save(job: Job) -> dict:
    """Save the model and a tokenizer for its vocabulary in $SAVE, because Unsloth only loads files."""
    config, folder = read_config(job.model), Path(os.environ["SAVE"])
    build_ours(config, Mode("ours", {})).save_pretrained(folder)
    words_tokenizer(config["vocab_size"]).save_pretrained(folder)
    return {}


class UnslothLoss(nn.Module):
    """The loss of a batch, computed by the model in $CHECKPOINT with adapters.

    Args:
        mode: a mode with ``nf4`` for 4-bit frozen weights, or ``ac`` for Unsloth's own activation checkpointing.
        tokens: number of tokens in a sequence.
    """

    def __init__(self, mode: Mode, tokens: int) -> None:
        from unsloth import FastLanguageModel

        super().__init__()
        # The calls are the same as in a notebook, but the adapters are the same as in the other modes.
        checkpointing = "ac" in mode
        model, _ = FastLanguageModel.from_pretrained(
            os.environ["CHECKPOINT"], max_seq_length=tokens, dtype=torch.bfloat16, load_in_4bit="nf4" in mode,
            local_files_only=True, fix_tokenizer=False,
        )  # fmt: skip
        self.model: nn.Module = FastLanguageModel.get_peft_model(
            model, r=LORA["r"], lora_alpha=LORA["lora_alpha"], lora_dropout=0, bias="none", target_modules=PROJECTIONS,
            use_gradient_checkpointing="unsloth" if checkpointing else False, random_state=0, max_seq_length=tokens,
        )  # fmt: skip
        FastLanguageModel.for_training(self.model, use_gradient_checkpointing=checkpointing)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            return (self.model(input_ids=input_ids, labels=labels).loss,)
