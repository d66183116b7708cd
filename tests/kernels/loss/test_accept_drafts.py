import itertools

import pytest
import torch

from liger_models.kernels.loss.accept_drafts import accept_drafts, accept_drafts_reference

from ..oracle import opcheck


def cases(k, device, stops=2):
    """Rows with all choices of few tokens for few drafts, with few remaining tokens and with stop tokens."""
    chosen = torch.tensor([*itertools.product(range(3), repeat=k + 1)], device=device)
    rows = len(chosen)
    generator = torch.Generator().manual_seed(k)
    draw = lambda high, *size: torch.randint(high, size, generator=generator).to(device)
    lengths, remaining = draw(50, rows).int(), draw(k + 3, rows)
    stop_tokens = draw(9, rows, stops) - 1  # most rows have no stop token among their choices
    return chosen, draw(3, rows, k + 1), stop_tokens, lengths, remaining, draw(20, rows)


def accepted(function, chosen, tokens, agree, *state):
    state = [x.clone() for x in (tokens, *state)]
    tokens, stops, *state = state
    return [*function(chosen, tokens, agree, stops, *state), tokens, *state]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_matches_plain_torch(kernel_device, k, poisoned_empty):
    chosen, tokens, *state = cases(k, kernel_device, stops=k % 3)
    agree = (chosen[:, 1:] + chosen[:, :-1]) % 2 == 0
    for decided in (None, agree):
        found, want = (
            accepted(function, chosen, tokens, decided, *state) for function in (accept_drafts, accept_drafts_reference)
        )
        for x, y in zip(found, want, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def test_rows_end_and_accept(backend):
    """An accepted draft, a rejected one, a stop token, too few remaining tokens, and an idle row."""
    chosen = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 9, 6], [4, 5, 6], [4, 5, 6]], device=backend)
    tokens = torch.tensor([[0, 4, 5], [0, 4, 7], [0, 4, 9], [0, 4, 5], [0, 4, 5]], device=backend)
    stops = torch.full((5, 1), 9, device=backend)
    lengths, counts = torch.full((5,), 10, dtype=torch.int32, device=backend), torch.zeros_like(tokens[:, 0])
    remaining = torch.tensor([8, 8, 8, 2, 0], device=backend)
    new, last = accept_drafts(chosen, tokens, None, stops, lengths, remaining, counts)
    assert new.tolist() == counts.tolist() == [3, 2, 2, 2, 0]
    assert last.tolist() == [2, 4, 7, 10, 12]
    assert tokens[:, 0].tolist() == [6, 5, 9, 5, 4]
    assert lengths.tolist() == [13, 12, 12, 12, 10]
    assert remaining.tolist() == [5, 6, 0, 0, 0]


def test_opcheck(kernel_device):
    chosen, tokens, stops, *state = cases(1, kernel_device)
    opcheck(torch.ops.liger_models.accept_drafts, (chosen, tokens, None, stops, *state))


def test_bad_arguments():
    chosen, tokens, stops, *state = cases(1, "cpu")
    with pytest.raises(ValueError, match=r"tokens must be \[9, 2\], agree \[9, 1\] or None, .* got \[9, 1\], none"):
        accept_drafts(chosen, tokens[:, :1], None, stops, *state)
    with pytest.raises(ValueError, match="tokens, lengths, remaining and counts must be contiguous"):
        accept_drafts(chosen, tokens.t().contiguous().t(), None, stops, *state)
