"""What is particular to GPT-OSS."""

import torch

from liger_models import LigerGptOss

from ..late import transformers
from .families import error, tiny


def test_the_limit_of_the_experts_is_that_of_the_configuration(tmp_path):
    """One that many numbers exceed; the released one, 7, is far above those of tiny models."""
    torch.manual_seed(0)
    theirs = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**{**tiny("gpt_oss")["yarn"], "swiglu_limit": 0.5, "initializer_range": 0.5})
    )
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 0.5  # which versions of transformers do not all read from the configuration
    theirs.save_pretrained(tmp_path)
    ids = torch.arange(3, 40)[None]
    want = theirs.eval()(ids).logits
    ours = LigerGptOss.from_pretrained(tmp_path, dtype=torch.float32, progress=False)
    assert error(ours(ids).logits, want) <= 1e-5
    for layer in ours.layers:
        layer.mlp.limit = 7.0
    assert error(ours(ids).logits, want) > 1e-2
