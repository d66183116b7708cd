"""Shapes that do not fit a model: an error, or drawn anew, in every way of loading."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import liger_models.hf

from ..arch.families import FIRST_CASES, LIMIT, error, make_folder, of_each_kind, tokens
from ..late import Late, transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
hf_auto = Late("liger_models.hf.auto")
one_family_of_each_kind = pytest.mark.parametrize("hf", of_each_kind(FIRST_CASES), indirect=True, ids="-".join)
llama = pytest.mark.parametrize("hf", [("llama", "gqa")], indirect=True, ids="-".join)


@pytest.mark.cases(5)
@one_family_of_each_kind
def test_a_tensor_of_one_element_is_not_repeated(hf, tmp_path):
    """Nor is one of one row or one column."""
    ours = hf[-1]
    ours.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    for name, tensor in state.items():
        for dim in range(tensor.dim()):
            if tensor.shape[dim] == 1:
                continue
            with pytest.raises(ValueError, match=rf"load_state_dict: tensors must have the shapes.* got {name} \["):
                ours.load_state_dict(state | {name: tensor.narrow(dim, 0, 1)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


@llama
def test_sizes_that_do_not_match(hf, tmp_path):
    """An error; with ignore_mismatched_sizes=True new weights, all others as they are in the file."""
    ours = hf[-1]
    ours.save_pretrained(tmp_path)
    made, ids = type(ours), tokens("llama", "gqa", 2, 9)
    with pytest.raises(ValueError, match="must have shape"):
        made.from_pretrained(tmp_path, vocab_size=50)
    loaded, info = made.from_pretrained(
        tmp_path, vocab_size=50, ignore_mismatched_sizes=True, output_loading_info=True, dtype="bf16"
    )
    theirs, want = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, vocab_size=50, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert info["mismatched_keys"] == {(name, tuple(one), tuple(other)) for name, one, other in want["mismatched_keys"]}
    assert loaded(ids.clamp(max=49)).logits.shape[-1] == theirs.vocab_size == 50
    assert loaded.dtype == torch.bfloat16
    assert 0.01 < loaded.lm_head.weight.std() < 0.03
    for name, parameter in ours.model.decoder.named_parameters():
        if name not in ("embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(loaded.model.decoder.get_parameter(name), parameter.bfloat16()), name
    same = made.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert torch.equal(same(ids).logits, ours(ids).logits)


@llama
def test_the_device_is_the_default_one_or_the_given_one(hf):
    folder, ours = hf[2].name_or_path, hf[-1]
    with torch.device("meta"):
        assert type(ours).from_pretrained(folder).device.type == "meta"
        on_cpu = type(ours).from_pretrained(folder, device_map="cpu")
    assert all(map(torch.equal, on_cpu.parameters(), ours.parameters()))


@pytest.mark.parametrize("stored", [1, 5])
def test_scores_of_another_number_of_labels(root, tmp_path, stored):
    folder, made = make_folder("llama", "gqa", root), liger_models.hf.LlamaForSequenceClassification
    made.from_pretrained(folder, num_labels=stored).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"got score.weight \[{stored}, 64\], not \[3, 64\]\..*ignore_mismatched_siz"):
        made.from_pretrained(tmp_path, num_labels=3)
    model, info = made.from_pretrained(
        tmp_path, num_labels=3, ignore_mismatched_sizes=True, output_loading_info=True, dtype="bfloat16"
    )
    assert info["mismatched_keys"] == {("score.weight", (stored, 64), (3, 64))}
    assert info["missing_keys"] == set()
    assert model.dtype == model.score.weight.dtype == torch.bfloat16
    assert model.score.weight.unique(dim=0).shape == (3, 64)
    with pytest.raises(ValueError, match=r"load_state_dict: .* got score.weight"):
        model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    _, info = made.from_pretrained(folder, num_labels=3, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"}


def test_a_body_of_other_sizes_under_scores(root, tmp_path):
    folder, made = make_folder("llama", "gqa", root), liger_models.hf.LlamaForSequenceClassification
    made.from_pretrained(folder, num_labels=3).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"][:1].clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"got model.norm.weight \[1\], not \[64\]"):
        made.from_pretrained(tmp_path)
    model = made.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert model.model.decoder.norm.weight.eq(1).all()


@pytest.mark.parametrize("hf", [("llama", "gqa"), ("gemma2", "gqa"), ("mixtral", "aux")], indirect=True, ids="-".join)
def test_a_body(hf, tmp_path):
    """Of a checkpoint with a head, and of one that transformers saved without; the head is not there, or drawn."""
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, 9)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.model.save_pretrained(tmp_path / "body")
    assert "norm.weight" in load_file(tmp_path / "body" / "model.safetensors")
    want = theirs.model(ids).last_hidden_state
    for folder in ("whole", "body"):
        body = liger_models.hf.LigerModel.from_pretrained(tmp_path / folder, dtype=torch.float32)
        assert error(body(ids).last_hidden_state, want) <= LIMIT
        body.save_pretrained(tmp_path / "again")
        again = transformers.AutoModel.from_pretrained(tmp_path / "again", dtype=torch.float32)
        assert error(again(ids).last_hidden_state, want) <= LIMIT

    if arch == "gemma2":  # tied: the head is the embedding
        assert error(type(ours).from_pretrained(tmp_path / "body")(ids).logits, theirs(ids).logits) <= LIMIT
        return
    with pytest.raises(ValueError, match=r"saved without its head, load it with liger_models.hf.LigerModel"):
        type(ours).from_pretrained(tmp_path / "body")
    model, info = type(ours).from_pretrained(
        tmp_path / "body", ignore_mismatched_sizes=True, output_loading_info=True, dtype=torch.float32
    )
    assert info["missing_keys"] == {"lm_head.weight"}
    assert error(model.base_model(ids).last_hidden_state, want) <= LIMIT
    assert model.lm_head.weight.std() > 0


def test_scores_of_a_body(root, tmp_path):
    folder = make_folder("llama", "gqa", root)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.model.save_pretrained(tmp_path)
    ours, info = liger_models.hf.LlamaForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, output_loading_info=True, dtype=torch.float32
    )
    assert info["missing_keys"] == {"score.weight"}
    ids = tokens("llama", "gqa", 1, 9)
    assert error(ours.base_model(ids).last_hidden_state, theirs.model(ids).last_hidden_state) <= LIMIT


@pytest.mark.parametrize("hf", [("llama", "gqa"), ("gemma2", "gqa")], indirect=True, ids="-".join)
def test_a_state_dict_in_place_of_a_folder(hf, tmp_path):
    ours = hf[-1]
    ours.save_pretrained(tmp_path)
    ids = tokens(*hf[:2], 2, 9)
    for state in (ours.state_dict(), load_file(tmp_path / "model.safetensors")):
        for folder in (None, tmp_path):
            model = type(ours).from_pretrained(folder, config=ours.config, state_dict=state)
            assert torch.equal(model(ids).logits, ours(ids).logits)
            assert not model.training
    with pytest.raises(ValueError, match="there must be config and state_dict, got NoneType and dict"):
        type(ours).from_pretrained(None, state_dict=state)


@llama
def test_a_state_dict_is_saved_in_place_of_empty_parameters(hf, tmp_path):
    """FSDP1 gathers the state dict, and leaves each rank a part of the parameters, which may be empty."""
    ours = hf[-1]
    ours.save_pretrained(tmp_path / "whole")
    state = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    for parameter in ours.parameters():
        parameter.data = torch.empty(0)
    ours.save_pretrained(tmp_path / "state", state_dict=state)
    want, got = (load_file(tmp_path / each / "model.safetensors") for each in ("whole", "state"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@llama
def test_parameters_without_values_are_assigned(hf, tmp_path):
    ours = hf[-1]
    ours.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(ours)(ours.config)
    state = load_file(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"load_state_dict: the model must have weights to copy into.* assign=True"):
        empty.load_state_dict(state)
    empty.load_state_dict(state, assign=True)
    ids = tokens("llama", "gqa", 2, 9)
    assert torch.equal(empty.eval()(ids).logits, ours(ids).logits)


@pytest.mark.slow
@llama
def test_accelerate_cannot_place_the_tensors_of_a_checkpoint(hf, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    ours = hf[-1]
    ours.save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        empty = type(ours)(ours.config)
    with pytest.raises(
        NotImplementedError, match=r"load_checkpoint_and_dispatch.* from_pretrained\(folder, device_map="
    ):
        accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"})
