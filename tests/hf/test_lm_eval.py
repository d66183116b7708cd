"""What lm-evaluation-harness asks of a model; tests/ecosystem/test_lm_eval.py runs the harness itself."""

import pytest
import torch

from ..arch.families import FIRST_CASES, error, hf_model, make_folder, tokens
from ..late import Late, transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
hf_auto = Late("liger_models.hf.auto")
LIMIT = 1e-4
OPTIONS = {
    "revision": "main", "dtype": "float32", "trust_remote_code": False, "gguf_file": None, "quantization_config": None,
    "subfolder": "", "max_memory": None, "device_map": {"": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize("case", [("llama", "gqa"), ("gemma2", "gqa"), FIRST_CASES[-1]], ids="-".join)
def test_loading_log_likelihoods_and_generation(case, root, reasons):
    """Rows padded on the right without a mask, and prompts padded on the left with one."""
    folder = make_folder(*case, root)
    theirs, ours = hf_model(folder), hf_auto.model_class(case[0]).from_pretrained(folder, **OPTIONS)
    ours.eval()
    ours.tie_weights()
    ids = tokens(*case, 3, 12)
    ids[1, 7:] = ids[2, 3:] = 0
    kept = ids != 0
    with torch.no_grad():
        want, got = (model(ids).logits.log_softmax(-1)[kept] for model in (theirs, ours))
    assert (got - want).abs().max() <= LIMIT
    assert error(got, want) <= LIMIT

    prompts = ids.flip(1)
    stop = transformers.StoppingCriteriaList([lambda tokens, _: (tokens[:, -1] == 5).any()])
    options = {"attention_mask": (prompts != 0).long(), "stopping_criteria": stop, "pad_token_id": 0}
    options |= {"max_length": 20, "use_cache": True, "do_sample": False}
    assert torch.equal(ours.generate(input_ids=prompts, **options), theirs.generate(input_ids=prompts, **options))
    assert reasons == [None]
