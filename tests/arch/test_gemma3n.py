"""The layers that only Gemma 3n has, and the language model of its checkpoints with images and audio."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from liger_models import AutoLigerModel
from liger_models.convert.config_map import read_config
from liger_models.layers.layer import CHECKPOINTING_POLICIES

from .families import LIMIT, error, gradients_of, hf_model, load, make_folder, tiny, tokens

one_case = pytest.mark.parametrize("pair", [("gemma3n_text", "shared")], indirect=True, ids="-".join)


@one_case
def test_coefficients_are_clipped_in_training(pair):
    """As in transformers, whose weights of the prediction are clipped themselves."""
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 2, 12)
    unclipped = ours(ids).logits
    theirs.train().model.config.altup_coef_clip = 0.1
    for block in theirs.model.layers:
        block.altup.training = True
    for block in ours.train().layers:
        block.altup.clip = 0.1
    before = {name: parameter.clone() for name, parameter in ours.state_dict().items()}
    want = theirs(ids, labels=ids)
    got = ours(ids, labels=ids, return_logits=True)
    assert error(got.logits, want.logits) <= LIMIT
    assert error(got.logits, unclipped) > 1e-3
    got.loss.backward()
    weight = ours.layers[1].altup.prediction.weight
    assert not weight.grad[weight.abs() > 0.1].any()
    assert all(torch.equal(before[name], parameter) for name, parameter in ours.state_dict().items())


@one_case
def test_padding_without_an_embedding_has_finite_gradients(pair):
    """The magnitude of its streams is 0, where a root has no finite gradient."""
    arch, variant, _, ours = pair
    with torch.no_grad():
        ours.embed_tokens.weight[0] = 0
        ours.per_layer.embed_tokens.weight[0] = 0
    ids = tokens(arch, variant, 2, 12)
    ids[0, :5] = 0
    mask = (ids != 0).long()
    grads = []
    for policy in CHECKPOINTING_POLICIES:
        ours.zero_grad()
        ours.set_checkpointing(policy)
        ours(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        grads.append(gradients_of(ours))
        assert all(gradient.isfinite().all() for gradient in grads[-1].values())
    assert all(torch.equal(grads[0][name], other[name]) for other in grads for name in grads[0])


def gemma3n(root):
    """A checkpoint with towers, of random tensors, and its language model in transformers' format."""
    source, folder = make_folder("gemma3n_text", "shared", root), root / "gemma3n"
    folder.mkdir()
    text = json.loads((source / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1): x
        for name, x in load_file(source / "model.safetensors").items()
    }
    towers = {f"model.{part}.weight": torch.randn(3, 2) for part in ("vision_tower.a", "audio_tower.b", "embed_vision")}
    save_file(tensors | towers, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text,
        "vision_config": {"hidden_size": 2048}, "audio_config": {"hidden_size": 1536}, "image_token_id": 262145,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return source, folder, tensors | towers


def test_the_language_model_of_a_checkpoint_with_towers(tmp_path):
    source, folder, tensors = gemma3n(tmp_path)
    model = AutoLigerModel.from_pretrained(folder, progress=False, strict=True)
    ids = torch.arange(3, 20)[None]
    assert error(model(ids).logits, hf_model(source)(ids).logits) <= LIMIT
    for name in ("pixel_values", "input_features", "input_features_mask"):
        with pytest.raises(ValueError, match=f"{name} must be None, because LigerGemma3n has no towers"):
            model(ids, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="input_ids must be below 101, the first token of images and audio"):
        model(ids + 90)

    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved"))
    assert after["audio_config"] == before["audio_config"]
    again = AutoLigerModel.from_pretrained(tmp_path / "saved", progress=False, strict=True)
    assert again.config == model.config


def test_settings_that_do_not_fit_are_named(tmp_path):
    folder = make_folder("gemma3n_text", "shared", tmp_path)
    config_class = type(load("gemma3n_text", folder).config)
    for changes, message in (
        ({"altup_active_idx": 1}, "altup_active_idx must be 0"),
        ({"altup_num_inputs": 1}, "altup_num_inputs must be at least 2, got 1"),
        ({"intermediate_size": [8, 9]}, "intermediate_size must have a value for each of 4 layers, got 2"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must have a value for each of 4 layers"),
        ({"num_kv_shared_layers": 3}, r"num_kv_shared_layers \(3\) must leave a layer of each type"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config(config_class, {"model_type": "gemma3n_text", **tiny("gemma3n_text")["shared"], **changes})
