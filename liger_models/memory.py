"""The memory that a training step needs, by counting; the formulas stand in docs/cli.md."""

from typing import NamedTuple

import torch

from .kernels.linear_cross_entropy import chunk_rows
from .layers.attention import LigerAttention
from .layers.causal_lm import CHECKPOINTING_POLICIES, CausalLM, keeps_input_alone
from .layers.mlp import GatedMLP
from .layers.moe import LigerMoE
from .layers.norm import LigerRMSNorm


class TrainingMemory(NamedTuple):
    """Bytes that a step needs.

    Attributes:
        weights: the parameters.
        gradients: of all parameters.
        optimizer: AdamW's two moments.
        activations: policy of `CausalLM.set_checkpointing` -> what the blocks keep for the backward.
        head: the head's gradient and the logits of one chunk, which are there before the blocks' backward.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: dict[str, int]
    head: int

    def peak(self, policy: str) -> int:
        """Bytes at the highest point: activations go while gradients come, so the larger of the two counts."""
        return self.weights + self.optimizer + max(self.activations[policy] + self.head, self.gradients)


def training_memory(model: CausalLM, tokens: int, dtype: torch.dtype = torch.bfloat16) -> TrainingMemory:
    """Estimate of a full fine-tuning step on one GPU: AdamW, weights, gradients and moments in one dtype, no sharding.

    Activations of vision towers, and of attention to images, are not counted.

    Args:
        model: may be on the meta device, where it needs no memory.
        tokens: B · T.
        dtype: of weights, gradients, moments and activations.
    """
    size = dtype.itemsize
    weights = model.num_parameters() * size
    V, C = model.lm_head.weight.shape
    head = model.lm_head.weight.numel() * size + chunk_rows(tokens, V, size, None) * V * size
    kept = {policy: sum(_kept(block, C, policy, size) for block in model.layers) for policy in CHECKPOINTING_POLICIES}
    return TrainingMemory(weights, weights, 2 * weights, {policy: tokens * each for policy, each in kept.items()}, head)


def _kept(block: torch.nn.Module, C: int, policy: str, size: int) -> int:
    """Bytes for each token."""
    if keeps_input_alone(block, policy):
        return C * size
    norms = sum(isinstance(layer, LigerRMSNorm) for layer in block.children())
    # Norms of what attention and MLP return keep that; the others read the streams.
    returned = max(norms - 2 * hasattr(block, "input_layernorm"), 0)
    elements, numbers = (2 + returned) * C, 1 if policy == "full" else norms  # each norm's scale in fp32
    for layer in block.modules():
        if isinstance(layer, LigerAttention) and policy != "full":
            elements += 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
            if hasattr(layer, "q_norm"):  # the projection, which their backward reads
                elements += (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
            numbers += layer.num_heads
        elif isinstance(layer, GatedMLP) and policy == "none":
            elements += layer.gate_up_proj.out_features
        elif isinstance(layer, LigerMoE):
            X, F, K = len(layer.down_weight), layer.down_weight.shape[2], layer.top_k
            elements += C + X + (2 * F * K if policy == "none" else 0)  # the normed input, the router's logits
            numbers += 5 * K  # routing weights, and places of the rows as int64
    return elements * size + numbers * 4
