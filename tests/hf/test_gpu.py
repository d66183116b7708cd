"""What only a GPU can show: nothing waits for the device, and half precision runs."""

import pytest
import torch

import liger_models.hf

from ..arch.families import error, make_folder
from ..late import transformers

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def models(root):
    """The model in transformers, and ours."""
    folder = make_folder("llama", "gqa", root)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", attn_implementation="eager")
    return theirs, liger_models.hf.LlamaForCausalLM.from_pretrained(folder, device_map="auto")


def test_packed_batches_cost_no_wait(models):
    _, model = models
    assert model.device.type == "cuda"
    model.train().bfloat16()
    ids, bounds = torch.randint(3, 100, (1, 256), device="cuda"), torch.tensor([0, 30, 100, 256], device="cuda").int()
    batch = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 156, "max_length_k": 156}
    batch |= {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(253, device="cuda")}
    model(**batch).loss.backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    positions = torch.cat([torch.arange(n, device="cuda") for n in (30, 70, 156)])[None]
    alone = model(ids, labels=ids, position_ids=positions, num_items_in_batch=253).loss
    torch.testing.assert_close(alone, model(**batch).loss, rtol=1e-3, atol=1e-3)


def test_generation(models):
    theirs, ours = models
    ids = torch.randint(3, 100, (3, 40), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    assert (
        error(ours(ids, attention_mask=mask).logits[mask == 1], theirs(ids, attention_mask=mask).logits[mask == 1])
        < 1e-4
    )
    for options in ({"do_sample": False}, {"num_beams": 3}):
        options |= {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0}
        assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
