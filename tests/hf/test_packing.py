"""Packed documents as transformers packs them, beside transformers run on each document alone."""

import pytest
import torch
from torch import Tensor

from ..arch.families import FIRST_CASES, LIMIT, VISION_CASES, assert_same_gradients, error, of_each_kind, tokens
from ..late import transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
one_text_family_of_each_kind = pytest.mark.parametrize(
    "hf", of_each_kind(case for case in FIRST_CASES if case not in VISION_CASES), indirect=True, ids="-".join
)
llama = pytest.mark.parametrize("hf", [("llama", "gqa")], indirect=True, ids="-".join)
LENGTHS = (7, 1, 12, 4)


def packed(ids: Tensor) -> Tensor:
    """The positions of documents of `LENGTHS`."""
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def alone(theirs, ids: Tensor) -> Tensor:
    """The mean loss over the targets of documents that transformers runs one by one."""
    targets = sum(length - 1 for length in LENGTHS)
    rows = [row for row in ids.split(LENGTHS, 1) if row.shape[1] > 1]
    return sum(theirs(row, labels=row, num_items_in_batch=targets).loss for row in rows)


@pytest.mark.cases(7)
@one_text_family_of_each_kind
def test_positions_that_start_anew_are_documents(hf):
    arch, variant, theirs, ours = hf
    theirs.__dict__.pop("forward", None)
    for model in (theirs, ours):  # each document has an auxiliary loss of its own
        model.config.output_router_logits = False
    ids = tokens(arch, variant, 1, sum(LENGTHS))
    want = alone(theirs, ids)
    want.backward()
    positions = packed(ids)
    got = ours.train()(ids, position_ids=positions, labels=ids).loss
    got.backward()
    assert error(got, want) <= LIMIT
    assert_same_gradients(ours.model.decoder, theirs)
    with torch.no_grad():
        parts = [theirs(row).logits for row in ids.split(LENGTHS, 1)]
        assert error(ours.eval()(ids, position_ids=positions).logits, torch.cat(parts, 1)) <= LIMIT


@llama
def test_what_the_collators_return(hf):
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 1, sum(LENGTHS))
    rows = [{"input_ids": row[0].tolist()} for row in ids.split(LENGTHS, 1)]
    want = alone(theirs, ids)
    for options in (
        {},
        {"return_flash_attn_kwargs": True},
        {"return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
    ):
        batch = transformers.DataCollatorWithFlattening(**options)(rows)
        assert error(ours(**batch).loss, want) <= LIMIT
        assert ours(**batch).past_key_values is None


@llama
def test_rows_and_broadcast_positions(hf):
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, 10)
    whole = theirs(ids).logits
    assert error(ours(ids, position_ids=torch.arange(10)[None]).logits, whole) <= LIMIT
    positions = torch.tensor([[*range(10)], [*range(4), *range(6)]])
    got = ours(ids, position_ids=positions).logits
    assert error(got[0], whole[0]) <= LIMIT
    assert error(got[1, 4:], theirs(ids[1:, 4:]).logits[0]) <= LIMIT


@llama
def test_positions_that_do_not_say_where_a_document_ends(hf):
    *_, ours = hf
    ids = torch.arange(6)[None]
    with pytest.raises(ValueError, match=r"position_ids of packed documents must start at 0.*as cu_seqlens"):
        ours(ids, position_ids=torch.tensor([[0, 1, 2, 1, 2, 3]]))
    with pytest.raises(ValueError, match=r"seq_idx needs position_ids or cu_seq_lens_q"):
        ours(ids, seq_idx=torch.zeros_like(ids))
    with pytest.raises(ValueError, match=r"position_ids must rise along each row.*as cu_seqlens"):
        ours(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match=r"attention_mask must be 1 for tokens.*as cu_seqlens"):
        ours(ids, attention_mask=torch.tensor([[1, 1, 1, 2, 2, 2]]))


@pytest.mark.parametrize("hf", [("qwen2_vl", "gqa")], indirect=True, ids="-".join)
def test_positions_of_a_text_above_those_in_time_height_and_width(hf):
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 1, sum(LENGTHS))
    positions = packed(ids).expand(4, 1, -1)
    want = torch.cat([theirs(row).logits for row in ids.split(LENGTHS, 1)], 1)
    assert error(ours(ids, position_ids=positions).logits, want) <= LIMIT
    with pytest.raises(ValueError, match=r"in time, height and width must be 0 in all three at the first token alone"):
        ours(ids, position_ids=positions[1:])
