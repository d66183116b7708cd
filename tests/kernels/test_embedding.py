from functools import partial

import pytest
import torch

from liger_models.kernels import embedding as module
from liger_models.kernels.embedding import embedding, embedding_reference

from .oracle import assert_close_to_truth, opcheck, run
from .rope.test_rope import draw, dtypes

IDS = {
    "some": lambda V, shape: torch.randint(V, shape, generator=torch.Generator().manual_seed(0)),
    "equal": lambda V, shape: torch.full(shape, V - 1),
    "runs": lambda V, shape: torch.arange(torch.Size(shape).numel()).div(9, rounding_mode="floor").view(shape) % V,
}
SHAPES = [(5, 6, (2, 17)), (40, 6, (33,)), (9, 3, (1,)), (30, 8, (2, 3, 6))]
"""V, C and the shape of the ids."""


@pytest.fixture
def small_chunks(monkeypatch):
    """Rows within a chunk, across chunks, and across more chunks than a program of the second kernel reads at once."""
    for name, size in (("CHUNK", 4), ("CHUNKS", 2), ("COLUMNS", 4)):
        monkeypatch.setattr(module, name, size)


@pytest.mark.cases(22)
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(backend, shape, kind, padding_idx, poisoned_empty, small_chunks):
    V, C, places = shape
    ids = IDS[kind](V, places).to(backend)
    for dtype in dtypes(backend):
        weight, dy = draw(V, C, dtype=dtype, device=backend), draw(*places, C, dtype=dtype, device=backend, seed=1)
        functions = [lambda w, f=f: f(w, ids.to(w.device), padding_idx) for f in (embedding, embedding_reference)]
        assert_close_to_truth(*functions, [weight], [dy])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", IDS)
def test_real_sizes(kind, poisoned_empty):
    ids = IDS[kind](32000, (2, 4000)).cuda()
    for dtype in (torch.bfloat16, torch.float32):
        weight, dy = draw(32000, 2688, dtype=dtype, device="cuda"), draw(2, 4000, 2688, dtype=dtype, device="cuda")
        functions = [lambda w, f=f: f(w, ids.to(w.device), 7) for f in (embedding, embedding_reference)]
        assert_close_to_truth(*functions, [weight], [dy])
        got, again = (run(functions[0], [weight], [dy])[1] for _ in range(2))
        assert torch.equal(got, again)


def test_no_ids(backend):
    ids = torch.zeros(2, 0, dtype=torch.int64, device=backend)
    upstream = torch.zeros(2, 0, 4, device=backend)
    _, dw = run(partial(embedding, ids=ids), [draw(3, 4, device=backend)], [upstream])
    assert torch.equal(dw, torch.zeros_like(dw))


def test_op(kernel_device):
    weight, ids = draw(5, 6, device=kernel_device).requires_grad_(), torch.tensor([[1, 3, 1]], device=kernel_device)
    opcheck(torch.ops.liger_models.embedding, (weight, ids, 3))


def test_errors():
    weight, ids = draw(5, 6), torch.tensor([1])
    with pytest.raises(ValueError, match=r"embedding: weight must be \[V, C\], got \[5\]"):
        embedding(weight[:, 0], ids)
    with pytest.raises(TypeError, match=r"embedding: ids must be int64 or int32, got torch.float32"):
        embedding(weight, ids.float())
    with pytest.raises(TypeError, match="weight must be a floating-point tensor"):
        embedding(weight.int(), ids)
