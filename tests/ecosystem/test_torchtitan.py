"""torchtitan's step as the benchmarks make it: the loss and the gradients are those of this package's model."""

import pytest
import torch

from benchmarks.training import build, titan
from benchmarks.training.modes import Mode
from liger_models import AutoLigerModel
from liger_models.convert import format_of

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan's

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


@torch.no_grad()
def ours() -> torch.nn.Module:
    model = AutoLigerModel.from_config(CONFIG)
    weights = format_of(type(model)).module_map(model.config)
    for name, parameter in model.named_parameters():
        expression = weights.entries[name]
        theirs = expression.unpack(torch.empty_like(parameter, device="meta"))
        parameter.copy_(
            expression.pack({n: build.weight(n, t.shape, parameter.device).float() for n, t in theirs.items()})
        )
    return model


@pytest.mark.parametrize("policy", ["", "+selective", "+full"])
def test_its_loss_and_gradients_are_ours(policy):
    theirs = titan.TitanLoss(CONFIG, Mode.parse("titan" + policy), False, 32, "cpu")
    theirs.float()
    model, ids = ours(), torch.randint(300, (2, 32))
    (found,), want = theirs(ids, ids), model(ids, labels=ids).loss
    torch.testing.assert_close(found, want)
    found.backward()
    want.backward()
    torch.testing.assert_close(theirs.model.output.weight.grad, model.lm_head.weight.grad)
    torch.testing.assert_close(theirs.model.tok_embeddings.weight.grad, model.embed_tokens.weight.grad)
    torch.testing.assert_close(theirs.model.norm.weight.grad, model.norm.weight.grad)


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="must be a Llama with untied weights and unscaled positions"):
        titan.build_model(CONFIG | {"tie_word_embeddings": True}, 32, "cpu")
