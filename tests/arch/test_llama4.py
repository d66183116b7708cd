"""Llama 4 against transformers: images; chunks, positions and layers of a configuration; whole sizes."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch import get_arch
from liger_models.convert.config_map import read_config
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.paged_cache import PagedCache

from ..late import Late, transformers
from .families import (
    DATA,
    LIMIT,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    error,
    gradients_of,
    hf_model,
    is_tower,
    load,
    make_folder,
    tiny,
    tokens,
)
from .image_checks import assert_kernels_match, assert_policies_and_frozen_parts

hf_auto = Late("liger_models.hf.auto")
CASES = [case for case in VISION_CASES if case[0] == "llama4"]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", CASES[:1], indirect=True, ids="-".join)
one_text_case = pytest.mark.parametrize("pair", [("llama4_text", "interleaved")], indirect=True, ids="-".join)
BETWEEN = 93
"""What separates the tiles of an image."""


def make(model, rows, seed=0):
    """input_ids, mask, labels and pixels of rows of word counts and images, which are tuples of a number of tiles."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    tile = [config.image_token_index] * config.vision_config.tokens_per_tile
    texts: list[list[int]] = []
    for row in rows:
        texts.append([])
        for part in row:
            if isinstance(part, int):
                texts[-1] += torch.randint(3, 80, (part,), generator=generator).tolist()
            else:
                texts[-1] += [config.boi_token_index, *([*tile, BETWEEN] * part[0])[:-1], config.eoi_token_index]
    T = max(map(len, texts))
    mask = torch.tensor([[0] * (T - len(text)) + [1] * len(text) for text in texts])
    ids = torch.tensor([[0] * (T - len(text)) + text for text in texts])
    size = config.vision_config.image_size
    tiles = sum(part[0] for row in rows for part in row if isinstance(part, tuple))
    pixels = torch.randn(tiles, 3, size, size, generator=generator)
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    labels = ids.masked_fill((ids == config.image_token_index) | (mask == 0) | first, -100)
    return ids, mask, labels, pixels


ROWS: list[list[Any]] = [[3, (3,), 9, (1,), 4], [2, (2,), 12], [11]]


# Images


@every_case
def test_logits_loss_and_gradients(pair):
    """Rows with two images, one and none, of one tile and several, padded on the left, and longer than a chunk."""
    _, _, theirs, ours = pair
    ids, mask, labels, pixels = make(ours, ROWS)
    want = theirs(ids, attention_mask=mask, pixel_values=pixels, labels=labels)
    want.loss.backward()
    kept, options = mask.bool(), {"pixel_values": pixels, "attention_mask": mask}
    assert error(ours(ids, **options).logits[kept], want.logits[kept]) <= LIMIT
    got = ours(ids, labels=labels, **options)
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)
    assert any(is_tower(name) and gradient.any() for name, gradient in gradients_of(ours).items())
    assert torch.equal(ours.image_features(pixels).flatten(0, 1), ours.visual(pixels))


@one_case
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [[3, (2,), 5], [9], [(1,), 4, (3,), 2]]
    alone = [make(ours, [row], seed) for seed, row in enumerate(rows)]
    bounds = torch.tensor([0, *(each[0].shape[1] for each in alone)]).cumsum(0)
    ids, labels, pixels = (torch.cat([each[i] for each in alone], dim) for i, dim in ((0, 1), (2, 1), (3, 0)))
    got = ours(ids, labels=labels, cu_seqlens=bounds, pixel_values=pixels, return_logits=True)
    got.loss.backward()
    assert_bounds_under_other_names(ours, bounds, got.logits, input_ids=ids, pixel_values=pixels)
    logits, losses, targets = [], [], 0
    for own, _, own_labels, own_pixels in alone:
        logits.append(theirs(own, **({"pixel_values": own_pixels} if len(own_pixels) else {})).logits)
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], own_labels[0, 1:], reduction="sum"))
        targets += int((own_labels[:, 1:] != -100).sum())
    (sum(losses) / targets).backward()
    assert error(got.logits, torch.cat(logits, 1)) <= LIMIT
    assert_same_gradients(ours, theirs)


@pytest.mark.cases(5)
@every_case
def test_generate(pair, use_cache):
    _, _, theirs, ours = pair
    ids, mask, _, pixels = make(ours, ROWS)
    theirs.generation_config.eos_token_id = None
    options = {"attention_mask": mask, "pixel_values": pixels, "max_new_tokens": 9, "do_sample": False}
    want = theirs.generate(ids, use_cache=True, pad_token_id=0, **options)
    got = ours.generate(ids, use_cache=use_cache, pad_token_id=0, eos_token_id=[], **options)
    assert torch.equal(got, want)


@one_case
def test_pieces_with_a_cache_are_the_whole(pair):
    _, _, _, ours = pair
    ids, _, _, pixels = make(ours, [[3, (2,), 4, (1,), 5]])
    first, cache = 3 + 11 + 2, DecodeCache(ids.shape[1])
    with torch.no_grad():
        got = [
            ours(ids[:, :first], pixel_values=pixels[:2], cache=cache).logits,
            ours(ids[:, first:-2], pixel_values=pixels[2:], cache=cache).logits,
            *(ours(piece, cache=cache).logits for piece in ids[:, -2:].split(1, 1)),
        ]
        assert error(torch.cat(got, 1), ours(ids, pixel_values=pixels).logits) <= LIMIT


@one_case
def test_frozen_parts_and_checkpointing(pair):
    _, _, _, ours = pair
    ids, mask, labels, pixels = make(ours, ROWS)
    assert_policies_and_frozen_parts(ours, ids, labels=labels, attention_mask=mask, pixel_values=pixels)


@one_case
def test_kernels_match_transformers(pair, kernel_device, root):
    _, _, theirs, ours = pair
    ids, _, labels, pixels = make(ours, [[2, (1,), 3]])
    want = theirs(ids, pixel_values=pixels, labels=labels)
    want.loss.backward()
    assert_kernels_match(pair, want.loss, kernel_device, root, input_ids=ids, labels=labels, pixel_values=pixels)


@one_case
def test_wrong_numbers_are_named(pair):
    _, _, _, ours = pair
    ids, _, _, pixels = make(ours, [[3, (2,), 2]])
    with pytest.raises(ValueError, match=r"each of the 8 image tokens \(2 images\), got 7"):
        ours(ids[:, torch.arange(ids.shape[1]) != 5], pixel_values=pixels)
    with pytest.raises(ValueError, match="8 image placeholders in input_ids must have pixel_values, got none"):
        ours(ids)
    torn = torch.cat([ids[:, :5], torch.tensor([[9]]), ids[:, 5:]], 1)
    with pytest.raises(ValueError, match=r"the 4 placeholders of each image must be contiguous .*, got 1 apart"):
        ours(torn, pixel_values=pixels)
    with pytest.raises(ValueError, match=r"must be \[tiles, 3, 16, 16\], got \[2, 3, 8, 16\]"):
        ours(ids, pixel_values=pixels[:, :, :8])
    for changes, message in (
        ({"image_size": 17}, r"image_size \(17\) must be a multiple"),
        ({"num_attention_heads": 16}, "must be a multiple of 4 per head"),
        ({"pixel_shuffle_ratio": 0.3}, r"pixel_shuffle_ratio must be 1 / n, .* \(4\), got 0.3"),
        ({"pixel_shuffle_ratio": 0.0}, "pixel_shuffle_ratio must be 1 / n"),
        ({"intermediate_size": 100}, r"intermediate_size \(100\) must be hidden_size \(32\) times the 4 patches"),
        ({"vision_output_dim": 40}, "must be equal, got 48, 48 and 40"),
        ({"projector_dropout": 0.1}, "projector_dropout must be 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(ours.config.vision_config, **changes)
    rope = {"vision_config": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}}
    with pytest.raises(ValueError, match=r"vision_config\.rope_parameters must be of type 'default' with a rope_theta"):
        read_config(type(ours.config), rope)


# Text


@one_text_case
def test_padding_on_the_left_changes_nothing(pair):
    """Chunks and the scales of queries are counted from the first token."""
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 1, 10)
    mask = torch.tensor([[0] * 5 + [1] * 10])
    padded = torch.nn.functional.pad(ids, (5, 0))
    options = {"max_new_tokens": 12, "eos_token_id": [], "do_sample": False}
    got = ours.generate(padded, attention_mask=mask, **options)
    assert torch.equal(got[:, 5:], ours.generate(ids, **options))


@one_text_case
def test_pages_are_the_whole(pair):
    """The steps that an engine captures, beyond the ends of chunks, with rows that are in different ones."""
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 2, 24)
    mask = torch.tensor([[0, 0, 0, *[1] * 6], [1] * 9])
    cache = PagedCache(2, 40, torch.device("cpu"))
    cache.start(2, 9, mask)
    with torch.no_grad():
        ours(ids[:, :9], attention_mask=mask, cache=cache, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
        cache.settle()
        got = []
        for token in ids[:, 9:].split(1, 1):
            cache.step()
            got.append(ours(token, cache=cache, position_ids=cache.lengths[:, None].long() - 1).logits)
        for row, start in enumerate((3, 0)):
            want = ours(ids[row : row + 1, start:]).logits[0, 9 - start :]
            assert error(torch.cat(got, 1)[row], want) <= LIMIT


def test_without_a_chunk_size_all_layers_see_everything(root, tmp_path):
    """As in Llama Guard 4, whose file transformers can't run: the same as chunks that are longer than the text."""
    folder = make_folder("llama4_text", "interleaved", root)
    config = json.loads((folder / "config.json").read_text())
    for name, size in (("null", None), ("long", 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "attention_chunk_size": size}))
        (tmp_path / name / "model.safetensors").symlink_to(folder / "model.safetensors")
    ids = tokens("llama4_text", "interleaved", 2, 20)
    ours = load("llama4_text", tmp_path / "null")
    assert error(ours(ids).logits, hf_model(tmp_path / "long")(ids).logits) <= LIMIT
    ours.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["attention_chunk_size"] is None


@pytest.mark.parametrize(
    "changes", [{"no_rope_layers": []}, {"no_rope_layers": [0] * 4}, {"no_rope_layers": [0, 1, 1, 0]}], ids=str
)
def test_layers_without_rotation(changes, tmp_path):
    sizes = tiny("llama4_text")["interleaved"] | changes
    config = transformers.AutoConfig.for_model("llama4_text", **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    read = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**read, **changes, "layer_types": None}))
    theirs, ours = hf_model(tmp_path), load("llama4_text", tmp_path)
    ids = tokens("llama4_text", "interleaved", 2, 20)
    assert error(ours(ids).logits, theirs(ids).logits) <= LIMIT
    chunks = [layer.self_attn.attention.chunk for layer in ours.layers]
    assert chunks == [7 if rotates else None for rotates in theirs.config.no_rope_layers]


def test_older_files_have_a_number_for_temperature_tuning():
    config_class = get_arch("llama4_text").config_class
    assert read_config(config_class, {"attn_temperature_tuning": 4}, strict=True).attn_temperature_tuning is True
    assert read_config(config_class, {"attn_temperature_tuning": 0}, strict=True).attn_temperature_tuning is False


def test_a_dense_model_may_have_no_experts():
    config_class = get_arch("llama4_text").config_class
    none = {"num_local_experts": 0, "num_experts_per_tok": 0, "interleave_moe_layer_step": 0}
    config = read_config(config_class, {"moe_layers": [], **none}, strict=True)
    assert not any(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    with pytest.raises(ValueError, match="num_experts_per_tok must be 1, got 2"):
        read_config(config_class, {"num_experts_per_tok": 2})


def test_wrong_layers_are_named():
    config_class = get_arch("llama4_text").config_class
    with pytest.raises(ValueError, match=r"no_rope_layers must hold num_hidden_layers \(48\) entries, got 2"):
        config_class(no_rope_layers=[1, 0])
    with pytest.raises(ValueError, match="layer_types must hold 2 of chunked_attention, full_attention, got"):
        config_class(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])


SCOUT = json.loads((DATA / "llama4" / "Llama-4-Scout-17B-16E.json").read_text())
MAVERICK = {
    "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_scaling": None,
    "max_position_embeddings": 1048576,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (SCOUT, 108.64),
        (SCOUT["text_config"], 107.77),
        ({**SCOUT, "text_config": {**SCOUT["text_config"], **MAVERICK}}, 401.58),
    ],
    ids=["scout", "text", "maverick"],
)
def test_whole_models_have_the_published_number_of_parameters(config, billions):
    model = AutoLigerModel.from_config(config, device="meta", strict=True)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_the_text_model_of_a_checkpoint_with_images(root, tmp_path):
    """Through this package and through transformers' auto class; saved as a text model."""
    folder = make_folder("llama4", "chunks", root)
    ids = tokens("llama4", "chunks", 2, 20)
    whole, ours = load("llama4", folder), load("llama4_text", folder)
    assert torch.equal(ours(ids).logits, whole(ids).logits)
    ours.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama4_text", ["Llama4ForCausalLM"])
    assert "vision_config" not in config
    assert error(ours(ids).logits, hf_model(tmp_path)(ids).logits) <= LIMIT
    with hf_auto.registered():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__module__ == "liger_models.hf"
    assert torch.equal(theirs(ids).logits, whole(ids).logits)
    with pytest.raises(ValueError, match=r"model_type in config\.json must be 'llama4', got 'llama4_text'"):
        load("llama4", tmp_path)
