"""Losses for text embeddings: contrastive (InfoNCE) with in-batch and hard negatives, and CoSENT for scored pairs.

Let q_i be the queries and d_j the documents. Let s_ij = cos(q_i, d_j) / τ be their similarities, where τ is the
temperature, and let p(i) be the index of the positive document of query i. The losses are::

    contrastive   mean_i [ −s_i,p(i) + log Σ_j exp(s_ij) ]
    symmetric     ½ · contrastive + ½ · mean_i [ −s_i,p(i) + log Σ_k exp(s_k,p(i)) ], where k runs over queries
    CoSENT        log(1 + Σ exp((c_i − c_j) / τ)), over all pairs of examples i and j where i has the lower score

In CoSENT, c_i is the cosine similarity of the two texts of example i. With Matryoshka dimensions, the loss is a sum
over the numbers n in ``dimensions``. Each term of the sum is the loss for the first n dimensions of the embeddings.

The N x M matrix of similarities is never stored. The contrastive loss is computed by `linear_cross_entropy`, with the
documents as the weight of a head. This op computes the matrix for one chunk of queries at a time. CoSENT needs no
matrix at all: the examples are sorted by their scores, so that each example precedes all examples with a higher score,
and running sums suffice.

Source: https://arxiv.org/abs/1807.03748 (InfoNCE), https://arxiv.org/abs/2205.13147 (Matryoshka),
https://penghao-bdsc.github.io/papers/CoSENT_TASLP2024.pdf (CoSENT).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy

WORKSPACE_MIB = 512
"""Maximum size in MiB of a chunk of the similarity matrix. A chunk has at least 128 queries, even if it is then
larger."""


class _EmbeddingLoss(nn.Module):
    """Options that the losses for embeddings share.

    Args:
        temperature: τ, by which cosine similarities are divided.
        dimensions: numbers of leading dimensions for which the loss is computed (Matryoshka). If empty, the loss is
            computed for the whole embeddings.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, temperature: float = 0.05, dimensions: Sequence[int] = ()) -> None:
        super().__init__()
        name = type(self).__name__
        if not temperature > 0:
            raise ValueError(f"{name}: temperature must be positive, got {temperature}.")
        if any(dimension < 1 for dimension in dimensions):
            raise ValueError(f"{name}: dimensions must be positive, got {[*dimensions]}.")
        self.temperature, self.dimensions = temperature, tuple(dimensions)

    def _sizes(self, embeddings: Tensor) -> Sequence[int]:
        """Return the numbers of leading dimensions for which the loss is computed, given embeddings [..., C]."""
        C = embeddings.shape[-1]
        if any(dimension > C for dimension in self.dimensions):
            raise ValueError(
                f"{type(self).__name__}: dimensions must be at most those of the embeddings ({C}), got "
                f"{[*self.dimensions]}."
            )
        return self.dimensions or (C,)


def _leading(embeddings: Tensor, dimension: int) -> Tensor:
    """Return the first ``dimension`` elements of each embedding, normalized, in fp32 (fp64 for fp64 embeddings)."""
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    return F.normalize(embeddings[..., :dimension].to(wide), dim=-1)


class LigerContrastiveLoss(_EmbeddingLoss):
    """The contrastive loss: each query must be more similar to its positive document than to all other documents.

    Args:
        symmetric: whether each positive document must also be more similar to its query than to all other queries.
        temperature: τ, by which cosine similarities are divided.
        dimensions: numbers of leading dimensions of the embeddings for which the loss is computed and summed
            (Matryoshka). If empty, the loss is computed for the whole embeddings.
    """

    def __init__(self, temperature: float = 0.05, *, symmetric: bool = False, dimensions: Sequence[int] = ()) -> None:
        super().__init__(temperature, dimensions)
        self.symmetric = symmetric

    def forward(
        self,
        queries: Tensor,
        documents: Tensor,
        target: Tensor | None = None,
        *,
        all_queries: Tensor | None = None,
        query_target: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss [].

        Args:
            queries: [N, C].
            documents: [M, C], the positive and negative documents of all queries.
            target: [N] int64, the index of each query's positive document. By default, document i is the positive
                document of query i, so hard negatives must follow the positive documents.
            all_queries: [K, C], the queries with which positive documents are compared if the loss is symmetric. By
                default, these are ``queries``. With several ranks, pass the queries of all ranks.
            query_target: [N] int64, the index of each query in ``all_queries``. By default, query i has index i.

        Raises:
            ValueError: shapes do not match.
        """
        if queries.dim() != 2 or documents.dim() != 2 or queries.shape[1] != documents.shape[1]:
            raise ValueError(
                "LigerContrastiveLoss: queries and documents must be [N, C] and [M, C], got "
                f"{list(queries.shape)} and {list(documents.shape)}."
            )
        if target is None:
            if len(documents) < len(queries):
                raise ValueError(
                    f"LigerContrastiveLoss: documents must begin with a positive one for each of {len(queries)} "
                    f"queries, got {len(documents)}. Pass target."
                )
            target = torch.arange(len(queries), device=queries.device)
        if all_queries is None:
            all_queries = queries
        if query_target is None:
            query_target = torch.arange(len(queries), device=queries.device)

        total = torch.zeros((), dtype=torch.promote_types(queries.dtype, torch.float32), device=queries.device)
        for size in self._sizes(queries):
            ours, theirs = _leading(queries, size), _leading(documents, size)
            loss = self._cross_entropy(ours, theirs, target)
            if self.symmetric:
                reverse = self._cross_entropy(theirs[target], _leading(all_queries, size), query_target)
                loss = (loss + reverse) / 2
            total = total + loss
        return total

    def _cross_entropy(self, rows: Tensor, columns: Tensor, target: Tensor) -> Tensor:
        """Compute the mean cross entropy of the similarities between ``rows`` [N, C] and ``columns`` [M, C]."""
        # Similarities are divided by a small temperature, so autocast must not round them.
        with torch.autocast(rows.device.type, enabled=False):
            loss: Tensor = linear_cross_entropy(
                rows, columns, target, logit_scale=1 / self.temperature, workspace_mib=WORKSPACE_MIB
            ).loss
        return loss


class LigerCoSENTLoss(_EmbeddingLoss):
    """CoSENT: of two examples, the one with the higher score must have the larger cosine similarity."""

    def forward(self, first: Tensor, second: Tensor, scores: Tensor) -> Tensor:
        """Compute the loss [].

        Args:
            first, second: [N, C], the embeddings of the two texts of each example.
            scores: [N], the score of each example. Only the order of the scores matters.

        Raises:
            ValueError: shapes do not match.
        """
        if first.dim() != 2 or first.shape != second.shape or scores.shape != first.shape[:1]:
            raise ValueError(
                "LigerCoSENTLoss: first and second must be [N, C], and scores [N], got "
                f"{list(first.shape)}, {list(second.shape)} and {list(scores.shape)}."
            )
        # After sorting by score, the examples with a higher score than example i begin at higher[i].
        ordered, order = scores.sort()
        higher = torch.searchsorted(ordered, ordered, right=True)
        total = torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
        for size in self._sizes(first):
            cosines = (_leading(first, size) * _leading(second, size)).sum(-1)
            scaled = cosines[order] / self.temperature
            # Compute log Σ exp(−c_j / τ) over all examples from each position to the end. The entry after the last
            # position is −inf.
            following = (-scaled).flip(0).logcumsumexp(0).flip(0)
            following = F.pad(following, (0, 1), value=float("-inf"))
            terms = (scaled + following[higher]).masked_fill(higher == len(scores), float("-inf"))
            total = total + F.pad(terms, (1, 0)).logsumexp(0)  # the padding, exp(0), is the 1 in the logarithm
        return total
