"""Steps on a paged cache: every architecture beside its other cache and transformers."""

from contextlib import nullcontext

import pytest
import torch

from liger_models.generation import logits as module
from liger_models.generation.graphs import DecodeStep
from liger_models.generation.logits import next_logits, paged_state
from liger_models.generation.options import resolve
from liger_models.generation.prefill import can_move_padding
from liger_models.generation.rows import Rows
from liger_models.layers.paged_cache import PagedCache

from .families import FIRST_CASES, LIMIT, error, of_each_kind, one_case_each, take_longest_row, tokens

T, NEW = 12, 12
"""Past a page, all windows, and the original length of scaled frequencies."""

MORE_CASES = [
    ("llama", "dynamic"),
    ("phi3", "window"),
    ("phi3", "longrope-partial"),
    ("phimoe", "longrope"),
    ("gemma2", "tight"),
    ("gemma4_text", "pattern"),
    ("gemma4_text", "experts"),
    ("gemma4_text", "keys-are-values"),
    ("gpt_oss", "full-first"),
    ("olmo3", "two-bases"),
    ("qwen3_next", "mixed"),
]
"""Variants in which other keys are seen or cached than in the first of the family."""


pytestmark = pytest.mark.usefixtures("small_pages")


@pytest.fixture
def step(monkeypatch):
    """The step that models borrow: with a row and pages more than the prompts need."""
    shared = DecodeStep(PagedCache(3, T + NEW + 20, torch.device("cpu")), captured=False)

    def borrow_step(model, state, B, count):
        shared.moves_padding = can_move_padding(model)
        return nullcontext(shared)

    monkeypatch.setattr(module, "borrow_step", borrow_step)
    return shared


def batch(arch, variant, seed=0, padding=5):
    """Two rows of prompts and what follows them, the second padded on the left."""
    ids = tokens(arch, variant, 2, T + NEW, seed)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return ids, mask


@torch.no_grad()
def logits_of_steps(model, ids, mask):
    """Logits [NEW, B, V] for the tokens of ``ids`` after the prompts."""
    settings, prompts = resolve(model, NEW, {}), ids[:, :T]
    positions = model.prompt_positions(prompts, None if mask is None else mask[:, :T], NEW, {})
    rows = Rows(prompts, None, settings, model.config.vocab_size)
    rows.ids[:, T:] = ids[:, T:]
    with next_logits(model, rows, mask, positions, {}, settings) as logits_of:
        return torch.stack([logits_of(end) for end in range(T, T + NEW)])


@pytest.mark.cases(8)
@pytest.mark.parametrize("pair", of_each_kind(FIRST_CASES) + MORE_CASES, indirect=True, ids="-".join)
def test_pages_give_the_logits_of_the_other_cache(pair, step, monkeypatch):
    """Also for other prompts after them, of which nothing may be left."""
    arch, variant, _, ours = pair
    ours.eval()
    assert paged_state(ours)
    batches = [batch(arch, variant), batch(arch, variant, 1, 3), (batch(arch, variant, 2)[0][:1], None)]
    got = [logits_of_steps(ours, *each) for each in batches]
    assert step.cache.length > T  # it was used
    monkeypatch.setattr(module, "paged_state", lambda model: None)
    for logits, each in zip(got, batches, strict=True):
        assert error(logits, logits_of_steps(ours, *each)) <= LIMIT


@one_case_each
def test_greedy_tokens_are_those_of_transformers(pair):
    arch, variant, theirs, ours = pair
    ids, mask = (x[:, :T] for x in batch(arch, variant))
    theirs.__dict__.pop("forward", None)  # with router logits transformers cannot use its cache
    theirs.config.get_text_config().output_router_logits = False
    theirs.generation_config.eos_token_id = None
    take_longest_row(ours)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = theirs.generate(ids, **options)
    assert torch.equal(ours.generate(ids, eos_token_id=[], **options), want)
