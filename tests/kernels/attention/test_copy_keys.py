import itertools

import pytest
import torch

from liger_models.kernels.attention.copy_keys import copy_keys
from liger_models.layers.masks import Copies

from ..oracle import assert_close_to_truth, opcheck

LENGTHS = {
    "prompts": ([5, 3, 4, 9, 2, 1, 6, 7], [-1, 0, 0, -1, -1, 4, 4, -1]),
    "long": ([130, 70, 600, 1, 33], [-1, 0, 0, 0, -1]),
    "none": ([4, 9], [-1, -1]),
}


def make(kind, shape, dtype, device):
    """The keys [N, G, D], the upstream gradient, and the other arguments of `copy_keys`."""
    lengths, parents = LENGTHS[kind]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    copies = Copies.of(bounds.tolist(), parents, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    x, dy = (
        torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for n in (int(bounds[-1]), len(copies.tokens))
    )
    options = {"tokens": copies.tokens, "cu_seqlens": bounds.to(device, torch.int32), "max_seqlen": max(lengths)}
    return x, dy, options | {"copy_bounds": copies.segments.cu_seqlens, "copies": copies.counts}


def check(kind, shape, dtype, device):
    x, dy, options = make(kind, shape, dtype, device)
    tokens = options["tokens"].cpu()
    assert torch.equal(copy_keys(x, **options), x[options["tokens"]])

    def reference(x):
        return x.cpu()[tokens].to(x.device)

    assert_close_to_truth(lambda x: copy_keys(x, **options), reference, [x], [dy])


def test_each_document_has_the_tokens_of_its_parent_first():
    _, _, options = make("prompts", (1, 1), torch.float32, "cpu")
    bounds, tokens = options["copy_bounds"].tolist(), options["tokens"].tolist()
    documents = [tokens[start:end] for start, end in itertools.pairwise(bounds)]
    assert documents == [
        [*range(5)], [*range(8)], [*range(5), *range(8, 12)], [*range(12, 21)], [21, 22], [21, 22, 23],
        [21, 22, *range(24, 30)], [*range(30, 37)],
    ]  # fmt: skip
    assert options["copies"].tolist() == [2, 0, 0, 0, 2, 0, 0, 0]


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("shape", [(2, 16), (1, 20), (3, 200)], ids=str)
def test_adds_the_gradients_of_all_copies(kind, shape, backend):
    check(kind, shape, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 128), (1, 576), (3, 20)], ids=str)
def test_adds_the_gradients_of_all_copies_on_gpu(shape, dtype):
    for kind in LENGTHS:
        check(kind, shape, dtype, "cuda")


def test_opcheck(kernel_device):
    x, _, options = make("prompts", (2, 16), torch.float32, kernel_device)
    names = ("tokens", "cu_seqlens", "copy_bounds", "copies", "max_seqlen")
    opcheck(torch.ops.liger_models.copy_keys, (x.requires_grad_(), *(options[name] for name in names)))


def test_one_graph_for_all_lengths():
    """A compiled block gets batches of many lengths."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(copy_keys, backend=backend, fullgraph=True)
    for length in range(3, 9):
        bounds = [0, length, 2 * length + 1, 3 * length]
        copies = Copies.of(bounds, [-1, 0, 0], torch.device("cpu"))
        x = torch.randn(bounds[-1], 2, 4)
        options = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "copies": copies.counts}
        options |= {"tokens": copies.tokens, "copy_bounds": copies.segments.cu_seqlens, "max_seqlen": length + 1}
        assert torch.equal(compiled(x, **options), x[copies.tokens])
    assert len(graphs) == 2  # the first length is a constant


def test_integers_are_refused():
    _, _, options = make("none", (1, 1), torch.float32, "cpu")
    with pytest.raises(TypeError, match="copy_keys: x must be a floating-point tensor"):
        copy_keys(torch.zeros(13, 1, 1, dtype=torch.int64), **options)
