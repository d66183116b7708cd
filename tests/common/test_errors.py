"""Checks of arguments in compiled graphs."""

import pytest
import torch

from liger_models.common.errors import check_documents

from ..late import dynamo_testing


@pytest.mark.compile
def test_one_graph_checks_documents_of_all_lengths():
    """The first length has a graph of its own."""

    def count(x, cu_seqlens):
        return x * check_documents("op", cu_seqlens, *x.shape)

    torch._dynamo.reset()
    counter = dynamo_testing.CompileCounter()
    compiled = torch.compile(count, fullgraph=True, backend=counter)
    for lengths in ([3, 4], [2, 5, 6], [7, 2], [1, 3, 5, 6]):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        assert torch.equal(compiled(torch.ones(1, sum(lengths)), bounds), torch.full((1, sum(lengths)), len(lengths)))
    assert counter.frame_count == 2
