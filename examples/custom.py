"""A new architecture built from the fused layers. It learns to sort, is saved, and is loaded again by its name.

    python examples/custom.py [--steps N] [--output FOLDER]

Attention and MLP run side by side after one norm, queries and keys are normed, three layers of four attend only to a
window, and every second MLP is a mixture of experts. The script generates its data: each row is a list of numbers,
followed by the same numbers sorted. Only the sorted numbers have a loss. Needs no GPU.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from liger_models import AutoLigerModel, KernelOptions, LigerAdamW, LigerRMSNorm, LigerSwiGLUMLP, register
from liger_models.base import CausalLM
from liger_models.kernels.moe import Routing, load_balancing_loss
from liger_models.layers import BatchLayout, LigerMoE, LigerQKNormAttention, RMSNormDecoderConfig


@dataclass(frozen=True, kw_only=True)
class SideBySideConfig(RMSNormDecoderConfig):
    """The fields of every decoder, and the fields of this architecture."""

    sliding_window: int = 4096
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 1408
    router_aux_loss_coef: float = 0.01


class SideBySideBlock(nn.Module):
    """``h += attention(norm(h)) + mlp(norm(h))``."""

    def __init__(self, config: SideBySideConfig, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
        C = config.hidden_size
        norm = partial(LigerRMSNorm, eps=config.rms_norm_eps, kernel=kernels.rms_norm)
        window = None if layer % 4 == 3 else config.sliding_window
        self.input_layernorm = norm(C)
        self.self_attn = LigerQKNormAttention.from_config(config, layer, kernels, norm=norm, window=window)
        if layer % 2 == 0:
            self.mlp: nn.Module = LigerSwiGLUMLP(config, kernel=kernels.swiglu)
        else:
            routing = Routing(config.num_experts_per_tok, normalize=True)
            self.mlp = LigerMoE(C, config.moe_intermediate_size, config.num_experts, routing, kernel=kernels.swiglu)

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, ...]:
        """Take and return x [B, T, C], which is not yet added to residual [B, T, C]; also return router logits."""
        attended, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        if isinstance(self.mlp, LigerMoE):
            y, router_logits = self.mlp(self.input_layernorm(residual), *layout.experts)
            return attended + y, residual, router_logits
        y, residual = self.mlp.add_norm(self.input_layernorm, None, residual)
        return attended + y, residual


class SideBySide(CausalLM):
    """The blocks between an embedding and a language-model head."""

    config_class = SideBySideConfig
    block_class = SideBySideBlock
    replays_routing = True

    def auxiliary_loss(self, router_logits: list[Tensor], attention_mask: Tensor | None) -> Tensor:
        """The loss that balances the load of the experts."""
        top_k, coefficient = self.config.num_experts_per_tok, self.config.router_aux_loss_coef
        return coefficient * load_balancing_loss(router_logits, top_k, attention_mask, self.groups.balance)


register("side_by_side", SideBySide)

NUMBERS, LENGTH = 16, 6
END = NUMBERS


def make_rows(rows: int) -> tuple[Tensor, Tensor]:
    """Token ids [rows, 2 · LENGTH + 1] and labels: numbers, the end of the list, and the same numbers sorted."""
    numbers = torch.randint(NUMBERS, (rows, LENGTH))
    ids = torch.cat([numbers, torch.full((rows, 1), END), numbers.sort().values], 1)
    labels = ids.clone()
    labels[:, : LENGTH + 1] = -100  # no loss on the list
    return ids, labels


def sorted_right(model: CausalLM) -> float:
    """The fraction of new lists that the model sorts correctly."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ids, _ = make_rows(128)
    rows = model.generate(ids[:, : LENGTH + 1], max_new_tokens=LENGTH, eos_token_id=[])
    return (rows == ids).all(1).double().mean().item()


def main(steps: int, output: Path) -> None:
    """Train, save, load by name, and compare the weights."""
    # A small model with random weights.
    torch.manual_seed(0)
    config = SideBySideConfig(
        vocab_size=NUMBERS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=LENGTH + 1, num_experts=4, moe_intermediate_size=64,
    )  # fmt: skip
    model = SideBySide.from_config(config)
    print(f"{model.num_parameters():,} parameters; sorted right before training: {sorted_right(model):.0%}")

    # Train on new rows in every step.
    optimizer = LigerAdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        ids, labels = make_rows(64)
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"sorted right: {sorted_right(model):.0%}")

    # Save, and load by name.
    model.save_pretrained(output)
    again = AutoLigerModel.from_pretrained(output, progress=False)  # config.json names "side_by_side"
    same = all(map(torch.equal, model.parameters(), again.parameters()))
    print(f"{output}: saved and loaded as {type(again).__name__}, {'the same' if same else 'NOT THE SAME'} weights")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a custom architecture to sort lists of numbers.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--output", type=Path, default=Path("custom_output"), help="folder of the checkpoint")
    main(**vars(parser.parse_args()))
