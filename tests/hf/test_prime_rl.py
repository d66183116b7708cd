"""The file for prime-rl that the page shows, with a stand-in for prime-rl's registry and its class of models."""

import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from ..arch.families import LIMIT, error, hf_model, make_folder, tokens
from ..late import transformers

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"


@pytest.fixture
def models(monkeypatch):
    """The part of ``trainer/models`` in prime-rl 0.8.0 that its trainer calls."""
    from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    class PreTrainedModelPrimeRL(transformers.PreTrainedModel):
        @classmethod
        def from_config(cls, config, **kwargs):
            return cls._from_config(config, **kwargs)

        def get_correct_experts_implementation(self, requested_experts):
            return "eager"

    names = ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.models", "prime_rl.trainer.models.base")
    prime, trainer, models, base = map(ModuleType, names)
    trainer.models, base.PreTrainedModelPrimeRL = models, PreTrainedModelPrimeRL
    models._CUSTOM_CAUSAL_LM_MAPPING = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())
    members = {"_model_mapping": models._CUSTOM_CAUSAL_LM_MAPPING}
    models.AutoModelForCausalLMPrimeRL = type("AutoModelForCausalLMPrimeRL", (_BaseAutoModelClass,), members)
    for name, module in zip(names, (prime, trainer, models, base), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    return models


@pytest.mark.parametrize("case", [("llama", "gqa"), ("qwen3_moe", "aux")], ids="-".join)
def test_page(case, models, root):
    """Built on the meta device and loaded as prime-rl loads it, it computes packed rows, and its weights come back."""
    arch, variant = case
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if arch == "qwen3_moe":
        code = code.replace("LlamaForCausalLM", "Qwen3MoeForCausalLM").replace("LlamaConfig", "Qwen3MoeConfig")
    exec(code, {"__name__": "liger_prime"})
    folder = make_folder(arch, variant, root)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = models.AutoModelForCausalLMPrimeRL.from_config(config, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    assert model.is_hf_state_dict(stored)
    assert not model.is_prime_state_dict(stored)
    packed = model.convert_to_prime(dict(stored))
    assert packed.keys() == model.state_dict().keys()
    assert model.is_prime_state_dict(packed)
    model.load_state_dict(packed, assign=True)
    model.init_buffers_post_meta()

    # The trainer calls the body, and its own head.
    ids = tokens(arch, variant, 1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "seq_lens": torch.tensor([5, 7])}
    hidden = model.model(**inputs, seq_lens_are_pre_shard=False).last_hidden_state
    theirs = hf_model(folder)
    want = torch.cat([theirs.model(part).last_hidden_state for part in ids.split([5, 7], 1)], 1)
    assert error(hidden, want) <= LIMIT
    with pytest.raises(ValueError, match="seq_lens_are_pre_shard must be False"):
        model.model(**inputs, seq_lens_are_pre_shard=True)

    back = model.convert_to_hf(dict(model.state_dict()))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())
