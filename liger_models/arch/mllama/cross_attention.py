"""Cross-attention from text tokens to images."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import Group, copy_to_region, to_heads, to_tokens
from liger_models.distributed.groups import ParallelGroups
from liger_models.layers.attention import check_heads
from liger_models.layers.attention_backends import attention
from liger_models.layers.batch import BatchLayout, number_documents
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ColumnParallelLinear, RowParallelLinear
from liger_models.layers.masks import parts_mask, takes_segments
from liger_models.layers.norm import LigerRMSNorm, add_norm_linear
from liger_models.layers.recompute import draws, recomputes, run_twice

IMAGES_SEEN = "images_seen"
"""Key in the decode cache.

The value [B, 2, tiles] bool has two masks: the tiles that the last token attends to, and all tiles of its document.
"""


@dataclass(frozen=True, eq=False)
class ImageStates:
    """The image tokens for cross-attention, and the mask that determines which text token attends to which tile.

    If the text tokens are divided among ranks, ``reached`` and ``sees`` cover only the tokens of this rank.

    Attributes:
        tokens: [B, S, C], the concatenated image tokens of each row; None if their keys and values are already cached.
        layout: layout whose mask says which text token attends to which image token.
        reached: [B, T, 1] bool, whether the token's document has any images.
        sees: [B, T, 1] bool, whether the caller's or the default mask lets the token attend to any tile.
    """

    tokens: Tensor | None
    layout: BatchLayout
    reached: Tensor
    sees: Tensor

    @classmethod
    def build(
        cls,
        tokens: Tensor | None,
        seen: Tensor,
        in_document: Tensor,
        per_tile: int,
        cache: DecodeCache | None,
        groups: ParallelGroups,
    ) -> "ImageStates":
        """Build the states from two masks that relate tokens to tiles.

        If a token is masked from every tile but its document has images, the token attends to all tiles of the
        document, as in transformers.

        Args:
            tokens: [B, S, C], the image tokens, where S = tiles · ``per_tile``; None if their keys and values are
                cached.
            seen: [B, T, tiles] bool, whether each token attends to each tile.
            in_document: [B, 1 or T, tiles] bool, whether each tile belongs to an image in the token's document.
            per_tile: number of tokens of a tile.
            cache: the decode cache, if any.
            groups: the process groups of the model.
        """
        sees, reached = seen.any(-1, keepdim=True), in_document.any(-1, keepdim=True).expand(-1, seen.shape[1], -1)
        # Tokens of documents without images attend to all tiles, because softmax needs a key. Their result is dropped.
        visible = torch.where(sees, seen, in_document | ~reached)
        part = torch.arange(seen.shape[2], device=seen.device).repeat_interleave(per_tile)
        # A decoding step uses a dense mask. Otherwise, the mask consists of segments if the kernels support segments.
        single = cache is not None and seen.shape[1] == 1
        segments = tokens is not None and takes_segments(seen.device, tokens.dtype)
        mask = parts_mask(visible, part, dense=single, segments=segments)
        places = torch.arange(seen.shape[1], device=seen.device)[None]
        if groups.tensor is not None and tokens is not None:
            # Enter one tensor-parallel region for all layers, so that the gradients of the image tokens are all-reduced
            # only once.
            tokens = copy_to_region(tokens, replace(groups.tensor, sequence_parallel=False))
        layout = BatchLayout(places, {}, cache=cache, masks={None: mask}, causal=False)
        return cls(tokens, layout, groups.local_tokens(reached), groups.local_tokens(sees))


@dataclass(frozen=True, eq=False)
class CrossLayout(BatchLayout):
    """The layout of a batch. For text without images, ``images`` is None and cross-attention is skipped."""

    images: ImageStates | None = None


def tiles_seen(here: Tensor, images: Tensor, tiles: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Find the tiles that each token attends to.

    A token attends to the last image before it, without the image's empty tiles. If further images directly precede
    this last image, the token attends to their non-empty tiles as well. An image's placeholder also attends to the
    image.

    Args:
        here: [B, T] bool, whether each token is a placeholder; each image has one placeholder.
        images: [B, M] bool, whether each of the M entries of a row holds an image.
        tiles: [B, M, tiles] bool, whether each tile of an image is in use.
        cu_seqlens: [n + 1], boundaries of packed documents; None if each row is one document.

    Returns:
        Two masks: [B, T, M · tiles] bool, whether each token attends to each tile; and [B, 1 or T, M · tiles] bool,
        whether each tile, used or unused, belongs to an image in the token's document.
    """
    B, T = here.shape
    document = torch.zeros_like(here, dtype=torch.int64)
    if cu_seqlens is not None:
        document = number_documents(cu_seqlens, B, T, here.device)[0]
    # Adjacent images form a run. The run number rises by one where a run or a document begins.
    before = torch.nn.functional.pad(here[:, :-1], (1, 0))
    begins = torch.nn.functional.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    run = ((here & ~before) | begins).cumsum(1)
    # ``count`` is the number of images up to each token, and ``order`` is the running number of each image.
    count = here.cumsum(1)
    order = images.cumsum(1)
    placeholder = torch.searchsorted(count, order).clamp(max=T - 1)  # [B, M], index of each image's placeholder
    seen = (
        (run[:, :, None] == run.gather(1, placeholder)[:, None])
        & (count[:, :, None] >= order[:, None])
        & images[:, None]
    )
    in_document = images[:, None]
    if cu_seqlens is not None:
        in_document = in_document & (document[:, :, None] == document.gather(1, placeholder)[:, None])
    return (seen[..., None] & tiles[:, None]).flatten(2), in_document[..., None].expand(
        -1, -1, -1, tiles.shape[2]
    ).flatten(2)


class LigerCrossAttention(Layer):
    """Grouped-query cross-attention from text to images, with norms of queries and keys but without RoPE.

    Args:
        hidden_size: C.
        num_heads, num_kv_heads: H and G; H is a multiple of G.
        head_dim: D.
        layer: index of the layer, and of its slot in the decode cache.
        norm: function that returns a `LigerRMSNorm` of a given width.
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
        if num_heads % num_kv_heads != 0:
            raise ValueError(
                f"LigerCrossAttention: num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})."
            )
        self.head_dim, self.layer, self.dropout = head_dim, layer, dropout
        self.recompute = False
        """Whether to save only the inputs and recompute the rest in the backward (checkpointing policy "full")."""
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = norm(head_dim), norm(head_dim)

    def set_attention_dropout(self, probability: float) -> None:
        """Set the probability of dropping an attention weight in training."""
        self.dropout = probability

    def set_policy(self, policy: str) -> None:
        """Recompute the layer in the backward if the policy is "full"."""
        self.recompute = policy == "full"

    def recomputed_share(self, policy: str) -> float:
        """The share of the layer that is recomputed in the backward: 1 if the policy is "full", and otherwise 0."""
        return float(policy == "full")

    def shard(self, group: Group) -> dict[str, int]:
        """On each of R ranks, keep 1 / R of the KV heads and their query heads; see `liger_models.parallel.apply_tp`.

        Raises:
            ValueError: the number of KV heads is not a multiple of the number of ranks.
        """
        check_heads("LigerCrossAttention", self.k_proj.out_features // self.head_dim, group)
        self.q_norm.group = self.k_norm.group = group
        self.q_proj = ColumnParallelLinear.of(self.q_proj, group)
        self.k_proj, self.v_proj = (ColumnParallelLinear.of(linear, None) for linear in (self.k_proj, self.v_proj))
        self.o_proj = RowParallelLinear.of(self.o_proj, group)
        return {"q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "o_proj.weight": 1}

    def shard_tokens(self, group: Group) -> None:
        """Divide the tokens among R ranks. Outside attention, each rank has T / R tokens. Inside attention, each rank
        has all T tokens and 1 / R of the heads.

        Raises:
            ValueError: the number of KV heads is not a multiple of the number of ranks.
        """
        check_heads("LigerCrossAttention", self.k_proj.out_features // self.head_dim, group)
        self.groups = replace(self.groups, context=group)

    def add_norm(
        self, norm: LigerRMSNorm, x: Tensor | None, residual: Tensor, images: ImageStates
    ) -> tuple[Tensor, Tensor]:
        """Add ``x`` to ``residual``, and apply attention to the normalized sum. Return the output and the sum, both
        [B, T, C]."""
        if recomputes(self):
            y, residual = run_twice(
                self._add_norm, norm, x, residual, images,
                preserve_rng_state=draws(self, self.dropout),
            )  # fmt: skip
            return y, residual
        return self._add_norm(norm, x, residual, images)

    def _add_norm(
        self, norm: LigerRMSNorm, x: Tensor | None, residual: Tensor, images: ImageStates
    ) -> tuple[Tensor, Tensor]:
        # Queries come from the text [B, T, H · D], keys and values from the image tokens [B, S, G, D].
        q, residual = add_norm_linear(norm, self.q_proj, x, residual)
        k, v = self._keys_values(images)
        group = self.groups.context
        if group is not None:
            # This rank gets its query heads for all tokens, and selects its KV heads, because every rank has all KV
            # heads.
            q, k, v = to_heads(q, group), *(heads[:, :, group.local_slice(heads.shape[2])] for heads in (k, v))
        out = attention(
            self.q_norm(self._heads(q)), k, v, images.layout, scale=self.head_dim**-0.5,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        out = out.flatten(2)  # [B, T, H · D]
        y: Tensor = self.o_proj(out if group is None else to_tokens(out, group))
        return y, residual

    def _keys_values(self, images: ImageStates) -> tuple[Tensor, Tensor]:
        cache = images.layout.cache
        if images.tokens is None:
            assert cache is not None
            return cache.extra["image_keys", self.layer], cache.extra["image_values", self.layer]
        # Keys and values are computed once per image, and a cache keeps them for the following tokens.
        k = self.k_norm(self._heads(self.k_proj(images.tokens)))
        v = self._heads(self.v_proj(images.tokens))
        if cache is not None:
            cache.extra["image_keys", self.layer], cache.extra["image_values", self.layer] = k, v
        return k, v

    def _heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, -1, self.head_dim)
