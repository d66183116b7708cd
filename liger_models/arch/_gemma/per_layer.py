"""The per-layer embeddings of Gemma 3n and of Gemma 4 E2B and E4B.

A second token embedding gives each block a second input. `PerLayerInputs` computes the second inputs of all blocks
before the first block runs, and `PerLayerBranch` is the part of a block that reads the block's second input. The second
embedding needs token ids. If a caller passes embeddings instead of ids, `find_ids` finds the ids.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.distributed.collectives import Group
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ReplicatedLinear
from liger_models.layers.norm import LigerRMSNorm, call_linear


class PerLayerInputs(Layer):
    """Computes the second inputs of all blocks.

    For each token, the second input of a block is ``(e2 + norm(projection(e1))) / sqrt(2)``, where e1 is the token's
    embedding, and e2 is the token's second embedding for this block.

    Args:
        config: sizes and constants of the model.
        norm: function that returns a norm of a given width.
    """

    def __init__(self, config: Any, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        width = config.hidden_size_per_layer_input
        # The second inputs of all blocks come from one wide embedding and one wide projection.
        self.embed_tokens = LigerEmbedding(
            config.vocab_size_per_layer_input,
            config.num_hidden_layers * width,
            padding_idx=config.pad_token_id,
            scale=width**0.5,
        )
        self.projection = nn.Linear(config.hidden_size, config.num_hidden_layers * width, bias=False)
        self.norm = norm(width)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the projection. The embedding shards itself."""
        self.projection = ReplicatedLinear.of(self.projection, group)
        return {}

    def forward(self, embeds: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Combine embeddings [B, T, C] and second embeddings [B, T, L · P] into the second inputs of the L blocks, each
        [B, T, P]."""
        width = self.norm.hidden_size
        # [B, T, L, P], normalized over P for each block separately.
        projected = call_linear(self.projection, embeds) * embeds.shape[-1] ** -0.5
        projected = self.norm(projected.unflatten(-1, (-1, width)))
        # The factor gives the sum the same variance as each of its two terms.
        inputs: Tensor = (projected + tokens.view_as(projected)) * 2**-0.5
        return inputs.unbind(2)


class PerLayerBranch(Layer):
    """Computes ``norm(projection(gelu(gate(x)) · input))`` from the hidden states ``x`` and the block's second
    ``input``.

    Args:
        config: sizes and constants of the model.
        norm: function that returns a norm of a given width.
    """

    def __init__(self, config: Any, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        C, width = config.hidden_size, config.hidden_size_per_layer_input
        self.gate = nn.Linear(C, width, bias=False)
        self.projection = nn.Linear(width, C, bias=False)
        self.norm = norm(C)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate both projections."""
        self.gate = ReplicatedLinear.of(self.gate, group)
        self.projection = ReplicatedLinear.of(self.projection, group)
        return {}

    def forward(self, x: Tensor, per_layer: Tensor) -> Tensor:
        """Map x [B, T, C] and per_layer [B, T, P] to [B, T, C]."""
        gated = F.gelu(call_linear(self.gate, x), approximate="tanh") * per_layer
        y: Tensor = self.norm(call_linear(self.projection, gated))
        return y


@torch.no_grad()
def find_ids(embeds: Tensor, embedding: LigerEmbedding) -> Tensor:
    """Find the token ids [B, T] to which the embeddings [B, T, C] belong. Each embedding must be bitwise identical to
    the result of ``embedding`` for one of the tokens.

    Raises:
        ValueError: an embedding does not belong to any token.
    """
    rows, table = embeds.flatten(0, 1), embedding.weight  # [B · T, C] and [V, C]
    scale = 1.0 if embedding.scale is None else torch.tensor(embedding.scale, dtype=table.dtype, device="cpu")
    # Sort the table by a random projection. Equal rows have equal projections.
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(table.shape[1], dtype=torch.float64, generator=generator, device="cpu")
    direction = direction.to(table.device)
    values, order = torch.cat([(part * scale).double() @ direction for part in table.split(4096)]).sort()
    # Projections that are summed in another order may differ in the last bits, so the search starts slightly lower.
    targets = rows.double() @ direction
    nearest = torch.searchsorted(values, targets - 1e-9 * targets.abs()).clamp_max(len(values) - 1)
    ids = order[nearest]
    if not torch.equal(table[ids] * scale, rows.to(table.dtype)):
        raise ValueError(
            "forward: inputs_embeds must be embeddings of tokens as embed_tokens returns them, because this model "
            "embeds the ids a second time, got others. Pass input_ids."
        )
    return ids.view(embeds.shape[:2])
