"""Attention of a text's tokens to images that are no part of the text."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_models.kernels.collectives import Ranks, enter, own_tokens, to_heads, to_tokens
from liger_models.kernels.dispatch import check

from .attention import attention, check_heads
from .norm import LigerRMSNorm, add_norm_linear
from .recompute import draws, recomputes
from .sequence import DecodeCache, Sequence, number_documents, parts_mask, takes_segments
from .tensor_parallel import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True, eq=False)
class ImageStates:
    """What layers of cross-attention attend to, and which token to which tile.

    Attributes:
        tokens: [B, S, C], the tokens of each row's images, end to end; None once their keys and values are cached.
        sequence: has the mask.
        reached: [B, T, 1] bool, whether a token's document has images at all; of the rank's own tokens where each rank
            has its own between the layers.
        sees: [B, T, 1] bool, whether an image stands at a token's place or before it; of the same tokens.
    """

    tokens: Tensor | None
    sequence: Sequence
    reached: Tensor
    sees: Tensor

    @classmethod
    def build(
        cls,
        tokens: Tensor | None,
        seen: Tensor,
        own: Tensor,
        per_tile: int,
        cache: DecodeCache | None,
        ranks: Ranks | None = None,
        context: Ranks | None = None,
    ) -> "ImageStates":
        """States of tokens that see tiles.

        A token that sees none, though its document has images, attends to all of those, as in transformers.

        Args:
            tokens: [B, S, C], S = tiles · ``per_tile``; None if their keys and values are cached.
            seen: [B, T, tiles] bool, which tiles each token sees.
            own: [B, 1 or T, tiles] bool, which are of its document's images.
            per_tile: number of tokens of a tile.
            cache: keeps what the last token sees for those that follow.
            ranks: over which the layers are cut, None for none.
            context: those that have a part of the tokens each, None for none.
        """
        sees, reached = seen.any(-1, keepdim=True), own.any(-1, keepdim=True).expand(-1, seen.shape[1], -1)
        # Where nothing is to be seen the result is dropped; softmax needs something all the same.
        visible = torch.where(sees, seen, own | ~reached)
        part = torch.arange(seen.shape[2], device=seen.device).repeat_interleave(per_tile)
        single = cache is not None and seen.shape[1] == 1
        segments = tokens is not None and takes_segments(seen.device, tokens.dtype)
        mask = parts_mask(visible, part, dense=single, segments=segments)
        places = torch.arange(seen.shape[1], device=seen.device)[None]
        if ranks is not None and tokens is not None:
            tokens = enter(tokens, replace(ranks, sequence=False))  # here, so that all layers' gradients are one sum
        if ranks is not None and ranks.sequence:
            reached, sees = own_tokens(reached, ranks), own_tokens(sees, ranks)
        if context is not None:
            reached, sees = (each[:, context.own(each.shape[1])] for each in (reached, sees))
        return cls(tokens, Sequence(places, {}, cache=cache, masks={None: mask}, causal=False), reached, sees)


def tiles_seen(here: Tensor, images: Tensor, tiles: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which tiles the tokens of a text see: those of the last image before them, and of images directly before that.

    Args:
        here: [B, T] bool, the placeholders, one for each image.
        images: [B, M] bool, which of a row's M places have an image.
        tiles: [B, M, tiles] bool, which tiles of an image are in use.
        cu_seqlens: [n + 1], boundaries of packed documents; None for none.

    Returns:
        [B, T, M · tiles] bool, the tiles that a token sees; [B, 1 or T, M · tiles] bool, all, also those not in use, of
        its document's images.
    """
    B, T = here.shape
    document = torch.zeros_like(here, dtype=torch.int64)
    if cu_seqlens is not None:
        document = number_documents(cu_seqlens, B, T, here.device)[0]
    before = torch.nn.functional.pad(here[:, :-1], (1, 0))
    begins = torch.nn.functional.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    run = ((here & ~before) | begins).cumsum(1)
    count = here.cumsum(1)
    order = images.cumsum(1)
    place = torch.searchsorted(count, order).clamp(max=T - 1)  # [B, M], of each image's placeholder
    seen = (run[:, :, None] == run.gather(1, place)[:, None]) & (count[:, :, None] >= order[:, None]) & images[:, None]
    own = images[:, None]
    if cu_seqlens is not None:
        own = own & (document[:, :, None] == document.gather(1, place)[:, None])
    return (seen[..., None] & tiles[:, None]).flatten(2), own[..., None].expand(-1, -1, -1, tiles.shape[2]).flatten(2)


class LigerCrossAttention(nn.Module):
    """Grouped-query attention of a text to images, with norms of queries and keys, without rotation.

    Args:
        hidden_size: C.
        num_heads, num_kv_heads: H and G; H is a multiple of G.
        head_dim: D.
        layer: index of the layer, its place in the decode cache.
        norm: width -> a `LigerRMSNorm`.
        dropout: probability of dropping an attention weight in training.

    Raises:
        ValueError: H is not a multiple of G.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer: int,
        norm: Callable[[int], LigerRMSNorm],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check(
            num_heads % num_kv_heads == 0,
            f"LigerCrossAttention: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads}).",
        )
        self.head_dim, self.layer, self.dropout = head_dim, layer, dropout
        self.recompute = False
        """True keeps only the inputs and makes everything again in the backward (checkpointing policy "full")."""
        self.context_ranks: Ranks | None = None
        """As `LigerAttention.context_ranks`."""
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = norm(head_dim), norm(head_dim)

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """Keep 1 / R of the KV heads, and the query heads that share them: see `layers.tensor_parallel`.

        Raises:
            ValueError: there is no equal part of them.
        """
        check_heads("LigerCrossAttention", self.k_proj.out_features // self.head_dim, ranks)
        self.q_norm.ranks = self.k_norm.ranks = ranks
        self.q_proj = ColumnParallelLinear.of(self.q_proj, ranks)
        self.k_proj, self.v_proj = (ColumnParallelLinear.of(each, None) for each in (self.k_proj, self.v_proj))
        self.o_proj = RowParallelLinear.of(self.o_proj, ranks)
        return {"q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "o_proj.weight": 1}

    def spread(self, ranks: Ranks) -> None:
        """Take T / R tokens of a rank, and attend from all T with 1 / R of the heads.

        Raises:
            ValueError: there is no equal part of them.
        """
        check_heads("LigerCrossAttention", self.k_proj.out_features // self.head_dim, ranks)
        self.context_ranks = ranks

    def add_norm(
        self, norm: LigerRMSNorm, x: Tensor | None, residual: Tensor, images: ImageStates
    ) -> tuple[Tensor, Tensor]:
        """``residual = residual + x; attention(norm(residual), images)``: ``(y, residual)``, each [B, T, C]."""
        if recomputes(self):
            y, residual = checkpoint(
                self._add_norm, norm, x, residual, images,
                use_reentrant=False, preserve_rng_state=draws(self, self.dropout),
            )  # fmt: skip
            return y, residual
        return self._add_norm(norm, x, residual, images)

    def _add_norm(
        self, norm: LigerRMSNorm, x: Tensor | None, residual: Tensor, images: ImageStates
    ) -> tuple[Tensor, Tensor]:
        q, residual = add_norm_linear(norm, self.q_proj, x, residual)
        k, v = self._keys_values(images)
        ranks = self.context_ranks
        if ranks is not None:
            q, k, v = to_heads(q, ranks), *(heads[:, :, ranks.own(heads.shape[2])] for heads in (k, v))
        out = attention(
            self.q_norm(self._heads(q)), k, v, images.sequence, scale=self.head_dim**-0.5,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        out = out.flatten(2)  # [B, T, H · D]
        y: Tensor = self.o_proj(out if ranks is None else to_tokens(out, ranks))
        return y, residual

    def _keys_values(self, images: ImageStates) -> tuple[Tensor, Tensor]:
        cache = images.sequence.cache
        if images.tokens is None:
            assert cache is not None
            return cache.images[self.layer]
        k = self.k_norm(self._heads(self.k_proj(images.tokens)))
        v = self._heads(self.v_proj(images.tokens))
        if cache is not None:
            cache.images[self.layer] = k, v
        return k, v

    def _heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, -1, self.head_dim)
