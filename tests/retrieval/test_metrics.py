"""Metrics of retrieval against their definitions."""

import math

import pytest
import torch

from liger_models.retrieval import metrics, ndcg, ranks_of_targets, recall


def test_recall(monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 2)
    documents = torch.eye(4)
    queries = torch.tensor([[0.9, 0.1, 0, 0], [0.5, 0.4, 0.3, 0], [0, 0.2, 0.3, 0.1]])
    ranks = ranks_of_targets(queries, documents, torch.tensor([0, 2, 3]))
    assert ranks.tolist() == [0, 2, 2]
    assert [recall(ranks, k).item() for k in (1, 2, 3)] == pytest.approx([1 / 3, 1 / 3, 1])


def test_ndcg():
    relevance = torch.tensor([0.0, 2.0, 1.0])
    assert ndcg(torch.tensor([0.1, 0.9, 0.5]), relevance) == 1
    found = ndcg(torch.tensor([0.9, 0.5, 0.1]), relevance)
    assert found == pytest.approx((3 / math.log2(3) + 1 / 2) / (3 + 1 / math.log2(3)))
    assert ndcg(torch.tensor([0.9, 0.5, 0.1]), relevance, k=1) == 0
    assert ndcg(torch.tensor([0.9, 0.5]), torch.zeros(2)) == 0


def test_ndcg_of_equal_scores():
    """Data has the relevant document first; a model that gives all documents one score must not profit from it."""
    first, last = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    mean = sum(1 / math.log2(2 + rank) for rank in range(3)) / 3
    assert ndcg(torch.zeros(3), first) == ndcg(torch.zeros(3), last) == pytest.approx(mean)
    assert ndcg(torch.tensor([0.5, 0.5, 0.9]), first, k=2) == pytest.approx(1 / math.log2(3) / 2)
