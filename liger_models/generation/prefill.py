"""The forward of short prompts, which is captured as a CUDA graph and replayed for prompts of similar length.

For a short prompt, the host needs more time to launch the kernels one by one than the GPU needs to run them. A graph
needs only one launch. Prompts are padded on the right to one of a few lengths, so that a graph serves several lengths.
Since padding comes after all tokens, no token attends to it. The cache does not store padding. Recurrent layers treat
the padding of a row as a separate document, so they return the states after the row's last token. Even for long
prompts, left padding is moved to the right, so that prompts of different lengths need no attention mask. If there were
a mask, the host would wait for the GPU, and flex_attention would be compiled again for some lengths.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.decoder import Decoder
from liger_models.layers.derived import Key
from liger_models.layers.frozen import own_parameters
from liger_models.layers.layer import layers_of, modules_of
from liger_models.layers.paged_cache import PagedCache

MOST_OPERATIONS = 1e13
"""Maximum number of floating-point operations of a forward that is captured.

An H100 takes about 20 ms for this number of operations, and the host takes about as long to launch a forward."""

MOST_GRAPHS = 8
"""Maximum number of prompt graphs that a step keeps."""

SHORTEST = 16
"""Short prompts are padded to a multiple of this number of tokens, long prompts to a multiple of a larger number."""


class PromptBatch:
    """The tensors that a forward of prompts reads. All prompts are padded to the same length.

    Args:
        ids: [B, T] int64.
        positions: [..., 1 or B, T] int64.
        length: number of tokens per row after padding on the right.
        attention_mask: [B, T], which is 0 for padding on the left; None for no padding.
    """

    def __init__(self, ids: Tensor, positions: Tensor, length: int, attention_mask: Tensor | None = None) -> None:
        B, T = ids.shape
        self.is_whole = attention_mask is None and length == T
        """Whether no row has padding."""
        if self.is_whole:  # clone, because a captured graph gets later prompts through these tensors
            self.ids, self.positions, self.last = ids.clone(), positions.clone(), ids.new_full((B,), T - 1)
            return
        column = torch.arange(length, device=ids.device)
        lengths = ids.new_full((B,), T) if attention_mask is None else (attention_mask != 0).sum(1)
        self.last = lengths - 1  # the column of each row's last token, [B] int64
        # The column that each token had before its row's padding was moved to the right. For padding, this is the
        # column of the row's last token.
        before = (column + T - lengths[:, None]).clamp_max(T - 1)  # [B, length]
        self.ids = ids.gather(1, before).masked_fill(column > self.last[:, None], 0)

        # In the padding, positions continue from the last token. Rows share their positions only if they have no
        # padding.
        R = positions.shape[-2] if attention_mask is None else B
        shape = *positions.shape[:-2], R
        after = (column - self.last[:R, None]).clamp_min(0)  # [R, length]
        self.positions = positions.expand(*shape, T).gather(-1, before[:R].expand(*shape, length)) + after

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the forward reads."""
        return [self.ids, self.positions, self.last]

    @property
    def key(self) -> tuple[Any, ...]:
        """The shapes that identify a captured graph of the forward."""
        return self.ids.shape, self.positions.shape

    @property
    def mask(self) -> Tensor | None:
        """[B, length] int64, which is 0 for padding and nonzero for tokens; None if there is no padding."""
        if self.is_whole:
            return None
        return (torch.arange(self.ids.shape[1], device=self.ids.device) <= self.last[:, None]).long()

    @property
    def bounds(self) -> Tensor:
        """[2B + 1] int32, the bounds of each row's tokens and of each row's padding in the flattened tokens."""
        B, length = self.ids.shape
        starts = torch.arange(0, B * length, length, device=self.ids.device)
        bounds = torch.stack([starts, starts + self.last + 1], 1).flatten()
        return torch.cat([bounds, bounds.new_full((1,), B * length)]).int()

    def logits(self, model: Decoder, cache: PagedCache) -> Tensor:
        """Run the forward, and return the logits [B, V] of each row's last token."""
        # The mask is not passed, because causal attention does not see the padding.
        with cache.documents(self.bounds) if model.needs_bounds else nullcontext():
            out = model(self.ids, position_ids=self.positions, cache=cache, return_logits=False)
        hidden: Tensor = out.hidden_states[-1]
        hidden = hidden.gather(1, self.last[:, None, None].expand(-1, 1, hidden.shape[2]))  # [B, 1, C]
        logits: Tensor = model.lm_head(hidden)
        return logits[:, 0]


class PromptGraph:
    """A captured forward of prompts.

    Args:
        graph: the graph.
        batch: the prompts whose tensors the graph reads. Later prompts are copied into these tensors.
        slots: [B · length] int64, where the cache stores each token. The graph reads this tensor, too.
        logits: [B, V], the result of the last replay.
        derived: the keys of the `DerivedTensors` that the graph computes.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, batch: PromptBatch, slots: Tensor, logits: Tensor, derived: frozenset[Key]
    ) -> None:
        self.graph, self.batch, self.slots, self.logits, self.derived = graph, batch, slots, logits, derived

    def replay(self, batch: PromptBatch, slots: Tensor) -> Tensor:
        """Replay the graph for other prompts of the same shapes. Returns the logits [B, V] of their last tokens."""
        for ours, theirs in zip((*self.batch.tensors, self.slots), (*batch.tensors, slots), strict=True):
            ours.copy_(theirs)
        self.graph.replay()
        return self.logits.clone()  # the next replay overwrites them


def can_move_padding(model: Decoder) -> bool:
    """Return whether prompts may be padded on the right: False if rotary frequencies depend on the sequence length."""
    return not any(getattr(layer, "needs_lengths", False) for layer in layers_of(model))


def most_tokens(model: Decoder) -> int:
    """Return the maximum number of tokens in a captured forward of prompts; 0 if right padding is not allowed."""
    if not can_move_padding(model):
        return 0
    # A token passes through only a fraction of the experts.
    share: dict[nn.Module, float] = {layer: layer.active_share for layer in layers_of(model)}
    active = sum(
        share.get(module, 1.0) * size for module in modules_of(model) for size in own_parameters(module).values()
    )
    return int(MOST_OPERATIONS / (2 * active))


def padded_length(T: int) -> int:
    """Return the length to which prompts of ``T`` tokens are padded, at most about an eighth more than ``T``."""
    unit = max(1 << max(T.bit_length() - 4, 0), SHORTEST)
    return -(-T // unit) * unit
