"""LFM2-VL, whose tiles are patches with padding, against transformers: logits, loss, gradients, packing, decoding."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import interpolate

from liger_models import AutoLigerModel, LigerLfm2Vl
from liger_models.arch.lfm2.tower import Lfm2VisionConfig
from liger_models.convert.config_map import read_config
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.patches import locate_patches, resample_positions

from .families import (
    LIMIT,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    error,
    gradients_of,
    hf_model,
    is_tower,
    make_folder,
)
from .image_checks import assert_kernels_match, assert_one_graph, assert_policies_and_frozen_parts

CASES = [case for case in VISION_CASES if case[0] == "lfm2_vl"]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", CASES[:1], indirect=True, ids="-".join)
BEGIN, END = 91, 92


def make(model, rows, seed=0):
    """input_ids, mask, labels and images of rows of word counts and of tiles, by their rows and columns of tokens."""
    generator = torch.Generator().manual_seed(seed)
    merge, ids, shapes = model.config.downsample_factor, [], []
    for row in rows:
        ids.append([])
        for part in row:
            if isinstance(part, int):
                ids[-1] += torch.randint(3, 80, (part,), generator=generator).tolist()
                continue
            shapes.append([length * merge for length in part])
            ids[-1] += [BEGIN, *[model.placeholder_id] * (part[0] * part[1]), END]
    T = max(map(len, ids))
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in ids])
    ids = torch.tensor([[0] * (T - len(row)) + row for row in ids])
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    labels = ids.masked_fill((ids == model.placeholder_id) | (mask == 0) | first, -100)
    images = {}
    if shapes:
        shapes = torch.tensor(shapes)
        counts = shapes.prod(1)
        most = int(counts.max()) + 3
        # What is in the padding must not matter, so it is not zeros.
        pixels = torch.randn(len(shapes), most, model.visual.patch_embed.in_features, generator=generator)
        real = (torch.arange(most) < counts[:, None]).int()
        images = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": real}
    return ids, mask, labels, images


ROWS = [[3, (2, 3), 9, (1, 1), 4], [2, (3, 1), 12], [11]]


@every_case
def test_logits_loss_and_gradients(pair):
    """Rows with two tiles, one and none, of different sizes, padded on the left."""
    _, _, theirs, ours = pair
    ids, mask, labels, images = make(ours, ROWS)
    want = theirs(ids, attention_mask=mask, labels=labels, **images)
    want.loss.backward()
    kept, options = mask.bool(), {"attention_mask": mask, **images}
    assert error(ours(ids, **options).logits[kept], want.logits[kept]) <= LIMIT
    got = ours(ids, labels=labels, **options)
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)
    assert any(is_tower(name) and gradient.any() for name, gradient in gradients_of(ours).items())
    unmasked = {name: tensor for name, tensor in options.items() if name != "pixel_attention_mask"}
    assert torch.equal(ours(ids, **unmasked).logits, ours(ids, **options).logits)


@one_case
def test_padding_on_the_right(pair):
    _, _, theirs, ours = pair
    ids, mask, _, images = make(ours, [[3, (2, 2), 4], [(2, 2), 1, (2, 2)]])
    ids, mask = ids.flip(1), mask.flip(1)
    want = theirs(ids, attention_mask=mask, **images).logits
    assert error(ours(ids, attention_mask=mask, **images).logits[mask.bool()], want[mask.bool()]) <= LIMIT


@one_case
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [[3, (2, 1), 5], [9], [(1, 2), 4, (2, 2), 2]]
    ids, _, labels, images = make(ours, [[part for row in rows for part in row]])
    lengths = [make(ours, [row])[0].shape[1] for row in rows]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    got = ours(ids, labels=labels, cu_seqlens=bounds, return_logits=True, **images)
    got.loss.backward()
    assert_bounds_under_other_names(ours, bounds, got.logits, input_ids=ids, **images)
    logits, losses, targets, first = [], [], 0, 0
    for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
        last = first + sum(isinstance(part, tuple) for part in row)
        own = {name: tensor[first:last] for name, tensor in images.items()} if last > first else {}
        logits.append(theirs(ids[:, start:end], **own).logits)
        targets_of_row = labels[:, start + 1 : end]
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], targets_of_row[0], reduction="sum"))
        targets += int((targets_of_row != -100).sum())
        first = last
    (sum(losses) / targets).backward()
    assert error(got.logits, torch.cat(logits, 1)) <= LIMIT
    assert_same_gradients(ours, theirs)


@one_case
def test_generate(pair, use_cache):
    _, _, theirs, ours = pair
    ids, mask, _, images = make(ours, ROWS, seed=1)
    theirs.generation_config.eos_token_id = None
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **images}
    want = theirs.generate(ids, use_cache=True, **options)
    assert torch.equal(ours.generate(ids, use_cache=use_cache, eos_token_id=[], **options), want)


@one_case
def test_several_continuations_of_prompts_with_images(pair):
    _, _, _, ours = pair
    ids, mask, _, images = make(ours, ROWS)
    options = {"max_new_tokens": 4, "do_sample": True, "eos_token_id": []}
    torch.manual_seed(1)
    got = ours.generate(ids, attention_mask=mask, num_return_sequences=2, **options, **images)
    repeated = ours.repeat_prompts(ids, images, 2)
    assert [len(tensor) for tensor in repeated.values()] == [6, 6, 6]
    ids, mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    torch.manual_seed(1)
    assert torch.equal(got, ours.generate(ids, attention_mask=mask, **options, **repeated))


@one_case
def test_pieces_with_a_cache_are_the_whole(pair):
    _, _, _, ours = pair
    ids, _, _, images = make(ours, [[3, (1, 2), 4, (2, 1), 5]])
    first, cache = 3 + 4 + 2, DecodeCache(ids.shape[1])
    parts = [{name: tensor[i : i + 1] for name, tensor in images.items()} for i in (0, 1)]
    with torch.no_grad():
        got = [
            ours(ids[:, :first], cache=cache, **parts[0]).logits,
            ours(ids[:, first:-1], cache=cache, **parts[1]).logits,
            ours(ids[:, -1:], cache=cache).logits,
        ]
        assert error(torch.cat(got, 1), ours(ids, **images).logits) <= LIMIT


@one_case
def test_frozen_parts_and_checkpointing(pair):
    _, _, _, ours = pair
    ids, mask, labels, images = make(ours, ROWS)
    assert_policies_and_frozen_parts(ours, ids, labels=labels, attention_mask=mask, **images)


@pytest.mark.matrix
@pytest.mark.compile
@one_case
def test_compiled_in_one_graph(pair, fresh_dynamo):
    _, _, _, ours = pair
    ids, mask, labels, images = make(ours, ROWS)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert_one_graph(ours, compiled, ids, labels=labels, attention_mask=mask, **images)


@one_case
def test_kernels_match_transformers(pair, kernel_device, root):
    _, _, theirs, ours = pair
    ids, _, labels, images = make(ours, [[2, (2, 1), 3]])
    want = theirs(ids, labels=labels, **images)
    want.loss.backward()
    assert_kernels_match(pair, want.loss, kernel_device, root, input_ids=ids, labels=labels, **images)


@one_case
def test_features_are_transformers(pair):
    _, _, theirs, ours = pair
    images = make(ours, ROWS)[3]
    want = theirs.get_image_features(**images).pooler_output
    assert all(error(a, b) <= LIMIT for a, b in zip(ours.image_features(**images), want, strict=True))


@one_case
def test_wrong_numbers_are_named(pair):
    _, _, _, ours = pair
    ids, _, _, images = make(ours, [[3, (2, 3), 2]])
    pixels, shapes = images["pixel_values"], images["spatial_shapes"]
    with pytest.raises(ValueError, match=r"each of the 6 image tokens \(1 images\), got 5"):
        ours(ids[:, torch.arange(ids.shape[1]) != 4], **images)
    with pytest.raises(ValueError, match="6 image placeholders in input_ids must have pixel_values, got none"):
        ours(ids)
    with pytest.raises(ValueError, match="spatial_shapes needs pixel_values, got 1 shapes"):
        ours(ids, spatial_shapes=shapes)
    with pytest.raises(ValueError, match="pixel_values needs spatial_shapes, got none"):
        ours(ids, pixel_values=pixels)
    torn = torch.cat([ids[:, :5], torch.tensor([[9]]), ids[:, 5:]], 1)
    with pytest.raises(ValueError, match=r"placeholders of each image must be contiguous .*, got 1 apart"):
        ours(torn, **images)
    with pytest.raises(ValueError, match=r"pixel_values must be \[tiles, patches, 48\], got \[1, 27, 47\]"):
        ours(ids, **images | {"pixel_values": pixels[..., :-1]})
    for wrong in ([4, 7], [0, 6], [6, 6]):
        with pytest.raises(ValueError, match="spatial_shapes must be positive multiples of 2 with at most 27 patches"):
            ours(ids, pixel_values=pixels, spatial_shapes=torch.tensor([wrong]))
    with pytest.raises(ValueError, match="as many as pixel_attention_mask has ones at the beginning"):
        ours(ids, **images | {"pixel_attention_mask": images["pixel_attention_mask"].flip(1)})
    with pytest.raises(ValueError, match=r"pixel_attention_mask must be \[1, 27\], got \[27\]"):
        ours(ids, **images | {"pixel_attention_mask": images["pixel_attention_mask"][0]})
    with pytest.raises(ValueError, match=r"spatial_shapes must be \[1, 2\], got \[2\]"):
        ours(ids, pixel_values=pixels, spatial_shapes=shapes[0])
    with pytest.raises(ValueError, match="pixels need input_ids"):
        ours(inputs_embeds=ours.embed_tokens(ids), **images)


@pytest.mark.parametrize("side", [4, 16])
def test_positions_are_resampled_as_by_interpolate(side):
    table = torch.randn(side**2, 8, dtype=torch.float64)
    grid = torch.tensor([[1, 2, 2], [1, 4, 6], [1, 16, 16], [1, 24, 18], [1, 2, 40]])
    patches = locate_patches(grid, int(grid.prod(1).sum()), 2)
    got = resample_positions(table, patches)
    square = table.view(1, side, side, 8).permute(0, 3, 1, 2)
    for index, (_, rows, columns) in enumerate(grid.tolist()):
        want = interpolate(square, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True)
        here = patches.item == index
        want = want[0, :, patches.row[here], patches.column[here]].T
        torch.testing.assert_close(got[here], want, rtol=1e-12, atol=1e-12)


def test_both_layouts_and_the_head_of_the_tower(root, tmp_path):
    """The names on the hub have one level more than those that transformers 5 writes; a head is kept."""
    folder = make_folder(*CASES[0], root)
    want = AutoLigerModel.from_pretrained(folder, progress=False, strict=True)
    tensors = load_file(folder / "model.safetensors")
    assert "model.vision_tower.post_layernorm.weight" in tensors
    tower, deeper = "model.vision_tower.", "model.vision_tower.vision_model."
    hub = {name.replace(tower, deeper): tensor for name, tensor in tensors.items()}
    hub[f"{deeper}head.probe"] = torch.randn(1, 1, 32)
    save_file(hub, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = (folder / "config.json").read_text().replace('"lfm2_vl"', '"lfm2-vl"')
    (tmp_path / "config.json").write_text(config)
    model = AutoLigerModel.from_pretrained(tmp_path, progress=False, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters(), strict=True))
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == hub.keys()
    assert all(torch.equal(tensor, hub[name]) for name, tensor in saved.items())
    theirs = hf_model(tmp_path / "saved").model.vision_tower
    assert torch.equal(theirs.post_layernorm.weight, want.visual.post_layernorm.weight)


def test_settings_that_are_not_supported():
    for changes, message in (
        ({"hidden_act": "relu"}, "hidden_act must be"),
        ({"num_attention_heads": 5}, "must be a multiple of num_attention_heads"),
        ({"num_patches": 24}, "num_patches must be the square of a number of rows, got 24"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(Lfm2VisionConfig(), **changes)
    with pytest.raises(ValueError, match=r"text_config.model_type must be 'lfm2', got 'lfm2_moe'"):
        AutoLigerModel.from_config({"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2_moe"}}, device="meta")


def test_the_size_of_lfm2_vl_450m():
    """Read from the keys of the released file, which are all known."""
    text = {
        "model_type": "lfm2", "hidden_size": 1024, "block_dim": 1024, "block_ff_dim": 6656, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "rope_theta": 1e6, "theta": 1e6, "block_norm_eps": 1e-5, "block_use_swiglu": True, "use_pos_enc": True,
    }  # fmt: skip
    vision = {"model_type": "siglip2_vision_model", "torch_dtype": "bfloat16", "vision_use_head": False}
    hf = {
        "model_type": "lfm2_vl", "text_config": text, "vision_config": vision, "do_image_splitting": True,
        "encoder_patch_size": 16, "max_image_tokens": 256, "max_num_patches": 1024, "max_pixels_tolerance": 2.0,
        "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "tile_size": 512, "use_image_special_tokens": True,
        "use_thumbnail": True, "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
        "image_token_index": 396, "torch_dtype": "bfloat16", "transformers_version": "4.55.0",
    }  # fmt: skip
    model = LigerLfm2Vl.from_config(read_config(LigerLfm2Vl.config_class, hf, strict=True), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 450_822_656
    for first in (True, False):  # if there are both names, transformers reads these
        both = {"image_token_id": 7, "tie_embedding": False}
        both = {**both, **hf, "tie_word_embeddings": True} if first else {"tie_word_embeddings": True, **hf, **both}
        read = read_config(LigerLfm2Vl.config_class, both)
        assert (read.image_token_id, read.tie_word_embeddings) == (7, False)
