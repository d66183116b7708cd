"""Retrieval metrics: recall@k and nDCG@k for the documents that a model finds for queries."""

import torch
from torch import Tensor

CHUNK = 1024
"""Number of queries whose similarities to all documents are computed at a time."""


def ranks_of_targets(queries: Tensor, documents: Tensor, target: Tensor) -> Tensor:
    """Return the rank of each query's positive document, [N] int64.

    The documents are ranked by their dot products with the query. The best document has rank 0. If another document has
    the same dot product as the positive document, the positive document ranks higher.

    Args:
        queries: [N, C].
        documents: [M, C].
        target: [N] int64, the index of each query's positive document.
    """
    ranks = []
    for rows, positive in zip(queries.split(CHUNK), target.split(CHUNK), strict=True):
        similarities = rows @ documents.T  # [n, M]
        ranks.append((similarities > similarities.gather(1, positive[:, None])).sum(1))
    return torch.cat(ranks)


def recall(ranks: Tensor, k: int) -> Tensor:
    """Return the fraction of queries whose positive document is among the k best documents, [] fp32.

    Args:
        ranks: [N], the rank of each query's positive document, starting from 0.
        k: number of documents.
    """
    return (ranks < k).float().mean()


def ndcg(scores: Tensor, relevance: Tensor, k: int | None = None) -> Tensor:
    """Compute the normalized discounted cumulative gain of a ranking, [] fp32.

    Each of the k best documents contributes its gain 2^relevance − 1, divided by log2(2 + rank). The sum is divided by
    the sum for the ideal ranking. The result is 0 if no document is relevant. If several documents have equal scores,
    each gets the mean of their gains, so the order of these documents has no effect.

    Args:
        scores: [n], the scores by which the documents are ranked.
        relevance: [n], the relevance of each document, at least 0.
        k: number of documents to count; None for all.
    """
    gains = torch.exp2(relevance.float()) - 1
    discounts = 1 / torch.arange(2, len(gains) + 2, dtype=torch.float32, device=gains.device).log2()
    _, ties, counts = scores.unique(return_inverse=True, return_counts=True)
    shared = gains.new_zeros(len(counts)).index_add(0, ties, gains) / counts
    ranked, ideal = shared[ties[scores.argsort(descending=True)]], gains.sort(descending=True).values
    best = (ideal * discounts)[:k].sum()
    return torch.where(best > 0, (ranked * discounts)[:k].sum() / best.clamp_min(1e-12), torch.zeros_like(best))
