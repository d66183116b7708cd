"""PEFT on the models of `liger_models.hf`, which the user has not unpacked, beside PEFT on those of transformers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_models.hf
from liger_models.adapters.unpacked_linear import UnpackedLinear

from ..adapters.test_lora import IDS, stir, with_image
from ..arch.families import LIMIT, error, hf_model, make_folder, tiny
from ..arch.families import load as load_native
from ..late import Late

peft = Late("peft", needs="PEFT is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder("llama", "gqa", tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def theirs(folder) -> Any:
    """An adapted model of transformers, whose adapter is in the folder "adapter"."""
    config = peft.LoraConfig(r=4, target_modules=SEVEN, task_type="CAUSAL_LM")
    model = stir(peft.get_peft_model(hf_model(folder), config))
    model.save_pretrained(folder / "adapter")
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    return model.eval()


def load(folder: Path) -> Any:
    return liger_models.hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_step_and_merging(folder, theirs, tmp_path):
    """The model is adapted in place, and is the packed one again after merging."""
    plain = load(folder)
    names, before = [*plain.state_dict()], plain(IDS).logits
    ours = peft.PeftModel.from_pretrained(plain, folder / "adapter", is_trainable=True)
    assert ours.base_model.model is plain
    layers = [layer for layer in plain.model.decoder.modules() if isinstance(layer, UnpackedLinear)]
    assert len(layers) == 8
    assert all(layer.is_low_rank and layer.low_rank(torch.float32) is not None for layer in layers)

    want = {name: each.grad for name, each in theirs.named_parameters() if each.requires_grad}
    for recomputes in (False, True):
        if recomputes:
            ours.enable_input_require_grads()
            ours.gradient_checkpointing_enable()
        ours.zero_grad()
        ours.train()(input_ids=IDS, labels=IDS).loss.backward()
        got = {name: each.grad for name, each in ours.named_parameters() if each.requires_grad}
        assert got.keys() == want.keys()
        assert all(error(got[name], want[name]) <= 2 * LIMIT for name in want)

    logits = theirs(input_ids=IDS).logits
    ours.eval()
    assert not plain.model.decoder.training
    with ours.disable_adapter():
        assert error(ours(input_ids=IDS).logits, before) <= LIMIT
    assert error(copy.deepcopy(ours)(input_ids=IDS).logits, logits) <= LIMIT
    ours.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(hf_model(folder), tmp_path / "adapter")
    assert error(again(input_ids=IDS).logits, logits) <= LIMIT
    with pytest.raises(ValueError, match="must have no adapters to be packed or saved"):
        plain.save_pretrained(tmp_path / "model")

    assert ours.merge_and_unload() is plain
    assert [*plain.state_dict()] == names
    assert error(plain(IDS).logits, logits) <= LIMIT
    plain.save_pretrained(tmp_path / "merged")
    assert error(hf_model(tmp_path / "merged")(IDS).logits, logits) <= LIMIT


def test_adapters_of_the_model_itself(folder, theirs, tmp_path):
    """`load_adapter`, `add_adapter` and the other methods of transformers."""
    model = load(folder)
    before = model(IDS).logits
    model.load_adapter(str(folder / "adapter"))
    logits = theirs(input_ids=IDS).logits
    assert error(model(IDS).logits, logits) <= LIMIT
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not [*tmp_path.glob("model*.safetensors")]

    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]), "other")
    assert model.active_adapters() == ["other"]
    stir(model)
    assert error(model(IDS).logits, logits) > 1e-3
    model.set_adapter("default")
    assert error(model(IDS).logits, logits) <= LIMIT
    model.disable_adapters()
    assert error(model(IDS).logits, before) <= LIMIT
    model.enable_adapters()
    model.delete_adapter(["default", "other"])
    assert error(model(IDS).logits, before) <= LIMIT


def test_the_head_as_a_module_to_save(folder, tmp_path):
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"], "task_type": "CAUSAL_LM"}
    theirs = stir(peft.get_peft_model(hf_model(folder), peft.LoraConfig(**options)))
    theirs.save_pretrained(tmp_path)
    models = theirs, peft.PeftModel.from_pretrained(load(folder), tmp_path, is_trainable=True)
    losses = []
    for model in models:
        losses.append(model.train()(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
    assert error(losses[1], losses[0]) <= LIMIT
    want, got = ({name: each.grad for name, each in model.named_parameters() if each.requires_grad} for model in models)
    assert got.keys() == want.keys()
    assert all(error(got[name], want[name]) <= 2 * LIMIT for name in want)


def test_rows_of_the_embedding(folder, tmp_path):
    """``trainable_token_indices`` wraps the embedding; ``generate`` reads it, too."""
    options = {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 7]}}
    theirs = stir(peft.get_peft_model(hf_model(folder), peft.LoraConfig(**options, task_type="CAUSAL_LM")))
    theirs.save_pretrained(tmp_path)
    got = peft.PeftModel.from_pretrained(load(folder), tmp_path)
    assert error(got(IDS).logits, theirs(IDS).logits) <= LIMIT
    assert error(got(IDS).logits, hf_model(folder)(IDS).logits) > 100 * LIMIT
    new = {"input_ids": IDS, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(got.eval().generate(**new), theirs.eval().generate(**new))


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["embed_tokens"]}, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}],
    ids=["adapter", "copy"],
)
def test_generating_with_another_embedding(folder, tmp_path, options):
    """The engine, rollouts and draft models count its rows, although PEFT has wrapped it."""
    theirs = stir(peft.get_peft_model(hf_model(folder), peft.LoraConfig(**options, task_type="CAUSAL_LM"))).eval()
    theirs.save_pretrained(tmp_path)
    got = peft.PeftModel.from_pretrained(load(folder), tmp_path).eval()
    ids, new = IDS[1:, :8], {"max_new_tokens": 5, "do_sample": False}
    want = theirs.generate(input_ids=ids, **new)
    assert torch.equal(got.generate(input_ids=ids, **new), want)
    native = got.base_model.model.model.decoder
    assert torch.equal(native.generate(ids, **new, draft_model=native), want)
    assert native.rollout(ids, **new)[0].tokens.tolist() == want[0, 8:].tolist()


FAILURES = {
    "names": ({"target_modules": ["nothing"]}, "not found in the base model"),
    # PEFT has replaced modules when it, or this package, finds the mistake.
    "module": ({"target_modules": ["q_proj", "mlp"]}, r"Target module Node\((.|\n)* is not supported"),
    "setting": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "target_parameters": ["o_proj.weight"]},
        "target_parameters must be empty",
    ),
}


@pytest.mark.parametrize("way", ["get_peft_model", "add_adapter"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_leaves_the_model_as_it_was(folder, tmp_path, failure, way):
    options, message = FAILURES[failure]
    model = load(folder)
    model.model.embed_tokens.weight.requires_grad_(False)
    before = model(IDS).logits
    state, trained = model.state_dict(), {name: each.requires_grad for name, each in model.named_parameters()}
    config = peft.LoraConfig(**options)
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(model, config) if way == "get_peft_model" else model.add_adapter(config)
    assert {name: each.requires_grad for name, each in model.named_parameters()} == trained
    after = model.state_dict()
    assert [*after] == [*state]
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert not any(isinstance(module, UnpackedLinear) for module in model.modules())
    assert torch.equal(model(IDS).logits, before)
    model.save_pretrained(tmp_path)
    assert error(hf_model(tmp_path)(IDS).logits, before) <= LIMIT

    # The next attempt succeeds.
    config = peft.LoraConfig(target_modules=["q_proj"])
    adapted = peft.get_peft_model(model, config) if way == "get_peft_model" else model
    if adapted is model:
        model.add_adapter(config)
    assert not [name for name, each in adapted.named_parameters() if each.requires_grad and "lora" not in name]
    assert "inject_adapter" not in vars(getattr(adapted, "base_model", adapted))
    assert error(copy.deepcopy(adapted)(input_ids=IDS).logits, before) <= LIMIT


def test_a_second_adapter_that_fails_leaves_the_first(folder, theirs):
    ours = peft.PeftModel.from_pretrained(load(folder), folder / "adapter", is_trainable=True)
    with pytest.raises(ValueError, match="not found in the base model"):
        ours.add_adapter("other", peft.LoraConfig(target_modules=["nothing"]))
    assert error(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits) <= LIMIT


@pytest.mark.filterwarnings("ignore:.* all linear layers have adapters except:UserWarning")
@pytest.mark.parametrize(
    ("arch", "name", "targets"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", r".*language_model.*_proj"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("phi3", "Phi3ForCausalLM", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    ],
    ids=["images", "experts", "fused"],
)
def test_other_families(arch, name, targets, tmp_path):
    """A step is that of PEFT on transformers' class."""
    folder = make_folder(arch, next(iter(tiny(arch))), tmp_path)
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=targets)
    theirs = stir(peft.get_peft_model(hf_model(folder), config)).train()
    theirs.save_pretrained(tmp_path / "adapter")
    ids, _, inputs = with_image(arch, load_native(arch, folder))
    inputs = {"input_ids": ids, "labels": ids} | {key: each for key, each in inputs.items() if key != "labels"}
    model = getattr(liger_models.hf, name).from_pretrained(folder, dtype=torch.float32)
    ours = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True).train()
    losses = [adapted(**inputs).loss for adapted in (theirs, ours)]
    for loss in losses:
        loss.backward()
    assert error(losses[1], losses[0]) <= LIMIT
    want = {key: each.grad for key, each in theirs.named_parameters() if each.requires_grad}
    got = {key: each.grad for key, each in ours.named_parameters() if each.requires_grad}
    assert got.keys() == want.keys()
    assert all(error(got[key], want[key]) <= 2 * LIMIT for key in want)


def test_base_weights_by_the_names_of_transformers(folder, theirs):
    """PEFT reads and sets them; names of packed projections are an error, and a key that is missing otherwise."""
    want = peft.get_base_model_state_dict(theirs)
    packed = load(folder).state_dict()
    ours = peft.get_peft_model(load(folder), peft.LoraConfig(target_modules=SEVEN, task_type="CAUSAL_LM"))
    for changed in (False, True):
        if changed:
            with torch.no_grad():
                for parameter in ours.get_base_model().parameters():
                    parameter.add_(1.0)
            peft.set_base_model_state_dict(ours, want)
        got = peft.get_base_model_state_dict(ours)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    with torch.no_grad(), ours.disable_adapter(), theirs.disable_adapter():
        assert error(ours(IDS).logits, theirs(IDS).logits) <= LIMIT
    with pytest.raises(RuntimeError, match="Unexpected key"):
        peft.set_base_model_state_dict(ours, packed)
    assert peft.set_base_model_state_dict(ours, packed, strict=False).missing_keys
