"""Functions that change only the gradient, in compiled graphs."""

import pytest
import torch

from liger_models.distributed.collectives import divide_gradient


@pytest.mark.compile
def test_the_gradient_of_a_result_that_leaves_a_compiled_graph():
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = 2 * x
        return y, divide_gradient(y, 4.0)

    def gradient(function) -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        function(x)[1].sum().backward()
        return x.grad

    torch.testing.assert_close(gradient(torch.compile(both, backend="aot_eager", fullgraph=True)), gradient(both))
