"""Losses of embeddings against plain PyTorch in fp64."""

import pytest
import torch
from torch.nn import functional as F

from liger_models.kernels.dispatch import reference_backend
from liger_models.kernels.loss import row_chunks
from liger_models.losses import LigerContrastiveLoss, LigerCoSENTLoss, contrastive


def plain_contrastive(queries, documents, target, temperature, symmetric, dimensions):
    """The formula with the whole matrix of similarities."""
    total = 0
    for size in dimensions or (queries.shape[1],):
        q, d = (F.normalize(x[:, :size], dim=-1) for x in (queries, documents))
        similarities = q @ d.T / temperature
        loss = F.cross_entropy(similarities, target)
        if symmetric:
            reverse = (q @ d[target].T / temperature).T
            loss = (loss + F.cross_entropy(reverse, torch.arange(len(q)))) / 2
        total = total + loss
    return total


def plain_cosent(first, second, scores, temperature, dimensions):
    total = 0
    for size in dimensions or (first.shape[1],):
        c = F.cosine_similarity(first[:, :size], second[:, :size]) / temperature
        differences = (c[:, None] - c)[scores[:, None] < scores]
        total = total + torch.cat([differences.new_zeros(1), differences]).logsumexp(0)
    return total


def embeddings(*rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(count, 24, dtype=torch.float64, requires_grad=True) for count in rows]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dimensions", [(), (24, 8, 3)], ids=["whole", "matryoshka"])
@pytest.mark.parametrize("chunk", [None, 4], ids=["one chunk", "chunks"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_contrastive(symmetric, dimensions, chunk, dtype, tolerance, monkeypatch):
    if chunk:  # several chunks of queries, none of which sees all similarities
        monkeypatch.setattr(row_chunks, "ROW_MULTIPLE", chunk)
        monkeypatch.setattr(contrastive, "WORKSPACE_MIB", 1e-9)
    inputs = embeddings(10, 26)
    target = torch.tensor([9, 1, 2, 3, 25, 5, 6, 7, 8, 0])  # in any order, two of them hard negatives of others
    expected = plain_contrastive(*inputs, target, 0.1, symmetric, dimensions)
    gradients = torch.autograd.grad(3 * expected, inputs)

    loss = LigerContrastiveLoss(0.1, symmetric=symmetric, dimensions=dimensions)
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    with reference_backend() if dtype == torch.float64 else torch.enable_grad():
        found = loss(*leaves, target)
        found_gradients = torch.autograd.grad(3 * found, leaves)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0)
    for gradient, plain in zip(found_gradients, gradients, strict=True):
        assert (gradient - plain).abs().max() <= 5 * tolerance * plain.abs().max()


@pytest.mark.parametrize("dimensions", [(), (24, 8)], ids=["whole", "matryoshka"])
@pytest.mark.parametrize("scores", [[0.1, 0.9, 0.5, 0.5, 0.0, 1.0, 0.5], [0, 1, 0, 1, 1, 1, 0], [2] * 7])
def test_cosent(dimensions, scores):
    inputs, scores = embeddings(7, 7), torch.tensor(scores)
    expected = plain_cosent(*inputs, scores, 0.05, dimensions)
    found = LigerCoSENTLoss(0.05, dimensions=dimensions)(*inputs, scores)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if len(scores.unique()) == 1:  # nothing is compared
        assert found == 0
    both = [torch.autograd.grad(loss, inputs, allow_unused=True) for loss in (found, expected)]
    for gradient, plain in zip(*both, strict=True):
        plain = torch.zeros_like(gradient) if plain is None else plain
        torch.testing.assert_close(gradient, plain, rtol=1e-10, atol=1e-12)


def test_the_matrix_of_similarities_is_never_stored(monkeypatch):
    """With more similarities than the workspace holds, they are computed in chunks, in the same memory."""
    shapes, buffer = [], row_chunks.logits_buffer

    def logits_buffer(*args):
        result = buffer(*args)
        shapes.append(tuple(result.shape))
        return result

    monkeypatch.setattr(row_chunks, "logits_buffer", logits_buffer)
    monkeypatch.setattr(contrastive, "WORKSPACE_MIB", 0.3)
    queries, documents = embeddings(400, 500)
    with reference_backend():
        found = LigerContrastiveLoss()(queries, documents)
    assert shapes == [(128, 500)]
    torch.testing.assert_close(found, plain_contrastive(queries, documents, torch.arange(400), 0.05, False, ()))


def test_autocast_does_not_round_similarities():
    queries, documents = (x.float() for x in embeddings(6, 9))
    loss = LigerContrastiveLoss()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss(queries, documents)
    assert rounded == loss(queries, documents)


def test_positive_documents_come_first_by_default():
    queries, documents = embeddings(3, 5)
    loss = LigerContrastiveLoss(0.2)
    with reference_backend():
        assert loss(queries, documents) == loss(queries, documents, torch.arange(3))


def test_bad_arguments_have_clear_errors():
    queries, documents = embeddings(4, 3)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        LigerContrastiveLoss(0)
    with pytest.raises(ValueError, match=r"dimensions must be positive, got \[8, 0\]"):
        LigerCoSENTLoss(dimensions=[8, 0])
    with pytest.raises(ValueError, match=r"dimensions must be at most those of the embeddings \(24\), got \[32\]"):
        LigerContrastiveLoss(dimensions=[32])(documents, queries)
    with pytest.raises(ValueError, match="a positive one for each of 4 queries, got 3"):
        LigerContrastiveLoss()(queries, documents)
    with pytest.raises(ValueError, match=r"queries and documents must be \[N, C\] and \[M, C\], got"):
        LigerContrastiveLoss()(queries, documents[:, :3])
    with pytest.raises(ValueError, match=r"scores \[N\], got \[4, 24\], \[3, 24\] and \[4\]"):
        LigerCoSENTLoss()(queries, documents, torch.arange(4))
