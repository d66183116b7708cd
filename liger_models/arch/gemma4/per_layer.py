"""The second embedding of Gemma 4 (E2B, E4B): each block has an input of its own besides the stream."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.distributed.collectives import Group
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ReplicatedLinear
from liger_models.layers.norm import LigerRMSNorm


class PerLayerInputs(Layer):
    """The inputs of the blocks besides the stream: of each token an embedding for each block, and of its embedding a
    projection, which is normed. Their sum is divided by sqrt(2).

    Args:
        config: sizes and constants.
        norm: returns a Gemma 4 norm for a width.
    """

    def __init__(self, config: Gemma4TextConfig, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        width = config.hidden_size_per_layer_input
        self.embed_tokens = LigerEmbedding(
            config.vocab_size_per_layer_input,
            config.num_hidden_layers * width,
            padding_idx=config.pad_token_id,
            scale=width**0.5,
        )
        self.projection = nn.Linear(config.hidden_size, config.num_hidden_layers * width, bias=False)
        self.norm = norm(width)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the projection; the embedding shards itself."""
        self.projection = ReplicatedLinear.of(self.projection, group)
        return {}

    def forward(self, embeds: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The embeddings [B, T, C], and those of `embed_tokens` [B, T, L · P] -> [B, T, P] for each of L blocks."""
        width = self.norm.hidden_size
        projected = self.norm((self.projection(embeds) * embeds.shape[-1] ** -0.5).unflatten(-1, (-1, width)))
        inputs: Tensor = (projected + tokens.view_as(projected)) * 2**-0.5
        return inputs.unbind(2)


class PerLayerBranch(Layer):
    """``norm(projection(gelu(gate(x)) · input))`` of the stream and a block's input of `PerLayerInputs`.

    Args:
        config: sizes and constants.
        norm: returns a Gemma 4 norm for a width.
    """

    def __init__(self, config: Gemma4TextConfig, norm: partial[LigerRMSNorm]) -> None:
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
        """x [B, T, C], per_layer [B, T, P] -> [B, T, C]."""
        y: Tensor = self.norm(self.projection(F.gelu(self.gate(x), approximate="tanh") * per_layer))
        return y
