"""Models whose images are tiles of one size, against transformers: logits, loss, gradients, packing, decoding."""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import save_file

from liger_models.layers.kv_cache import DecodeCache

from .families import (
    LIMIT,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    error,
    gradients_of,
    is_tower,
    load,
    make_folder,
)
from .image_checks import assert_kernels_match, assert_one_graph, assert_policies_and_frozen_parts

FAMILIES = ("internvl", "idefics3", "smolvlm")
CASES = [case for case in VISION_CASES if case[0] in FAMILIES]
FIRST = [next(case for case in CASES if case[0] == family) for family in FAMILIES]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case_each = pytest.mark.parametrize("pair", FIRST, indirect=True, ids="-".join)
TILE = -1


def make(model, rows, seed=0):
    """input_ids, mask, labels and pixels of rows of word counts and tiles, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    ids = [
        [
            token
            for part in row
            for token in (
                [config.image_token_id] * config.tokens_per_tile
                if part == TILE
                else torch.randint(3, 80, (part,), generator=generator).tolist()
            )
        ]
        for row in rows
    ]
    T = max(map(len, ids))
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in ids])
    ids = torch.tensor([[0] * (T - len(row)) + row for row in ids])
    count = sum(row.count(TILE) for row in rows)
    pixels = torch.randn(count, *model.image_shape, generator=generator)
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    labels = ids.masked_fill((ids == config.image_token_id) | (mask == 0) | first, -100)
    return ids, mask, labels, pixels


def for_rows(model, rows, pixels):
    """The images of these rows as transformers takes them: those of Idefics3 are padded to the row with the most."""
    if not len(pixels) or "pixel_attention_mask" not in model.prompt_inputs:
        return {"pixel_values": pixels} if len(pixels) else {}
    counts = [row.count(TILE) for row in rows]
    padded = pixels.new_zeros(len(rows), max(counts), *model.image_shape)
    mask = torch.zeros(len(rows), max(counts), *model.image_shape[1:], dtype=torch.int64)
    for index, tiles in enumerate(pixels.split(counts)):
        padded[index, : len(tiles)], mask[index, : len(tiles)] = tiles, 1
    return {"pixel_values": padded, "pixel_attention_mask": mask}


ROWS = [[3, TILE, TILE, 9, TILE, 4], [2, TILE, 12], [11]]


@every_case
def test_logits_loss_and_gradients(pair):
    """Rows with three tiles, one and none, padded on the left."""
    _, _, theirs, ours = pair
    ids, mask, labels, pixels = make(ours, ROWS)
    padded = for_rows(ours, ROWS, pixels)
    want = theirs(ids, attention_mask=mask, labels=labels, **padded)
    want.loss.backward()
    kept = mask.bool()
    options = {"pixel_values": pixels, "attention_mask": mask}
    assert error(ours(ids, **options).logits[kept], want.logits[kept]) <= LIMIT
    got = ours(ids, labels=labels, attention_mask=mask, **padded)
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)
    assert any(is_tower(name) and gradient.any() for name, gradient in gradients_of(ours).items())


@pytest.mark.cases(4)
@every_case
def test_names_of_transformers_modules(pair, root, tmp_path):
    """Some versions write these instead of the names on the hub; experts are in one tensor there."""
    arch, variant, theirs, ours = pair
    folder = shutil.copytree(make_folder(arch, variant, root), tmp_path / "modules")
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    if ours.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    again = load(arch, folder)
    for (name, parameter), other in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    again.save_pretrained(tmp_path / "again")
    written = load(arch, tmp_path / "again")
    assert all(torch.equal(*both) for both in zip(written.parameters(), ours.parameters(), strict=True))


@one_case_each
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [[3, TILE, 5], [9], [TILE, 4, TILE, TILE, 2]]
    alone = [make(ours, [row], seed) for seed, row in enumerate(rows)]
    bounds = torch.tensor([0, *(batch[0].shape[1] for batch in alone)]).cumsum(0)
    ids, labels, pixels = (torch.cat([batch[i] for batch in alone], dim) for i, dim in ((0, 1), (2, 1), (3, 0)))
    got = ours(ids, labels=labels, cu_seqlens=bounds, pixel_values=pixels, return_logits=True)
    got.loss.backward()
    assert_bounds_under_other_names(ours, bounds, got.logits, input_ids=ids, pixel_values=pixels)
    logits, losses, targets = [], [], 0
    for row, (own, _, own_labels, own_pixels) in zip(rows, alone, strict=True):
        logits.append(theirs(own, **for_rows(ours, [row], own_pixels)).logits)
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], own_labels[0, 1:], reduction="sum"))
        targets += int((own_labels[:, 1:] != -100).sum())
    (sum(losses) / targets).backward()
    assert error(got.logits, torch.cat(logits, 1)) <= LIMIT
    assert_same_gradients(ours, theirs)


@one_case_each
def test_generate(pair, use_cache):
    _, _, theirs, ours = pair
    ids, mask, _, pixels = make(ours, ROWS)
    theirs.generation_config.eos_token_id = None
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **for_rows(ours, ROWS, pixels)}
    want = theirs.generate(ids, use_cache=True, pad_token_id=0, **options)
    assert torch.equal(ours.generate(ids, use_cache=use_cache, pad_token_id=0, eos_token_id=[], **options), want)


@one_case_each
def test_pieces_with_a_cache_are_the_whole(pair):
    _, _, _, ours = pair
    ids, _, _, pixels = make(ours, [[3, TILE, 4, TILE, 5]])
    first = 3 + ours.config.tokens_per_tile + 2
    cache = DecodeCache(ids.shape[1])
    with torch.no_grad():
        got = [
            ours(ids[:, :first], pixel_values=pixels[:1], cache=cache).logits,
            ours(ids[:, first:-1], pixel_values=pixels[1:], cache=cache).logits,
            ours(ids[:, -1:], cache=cache).logits,
        ]
        assert error(torch.cat(got, 1), ours(ids, pixel_values=pixels).logits) <= LIMIT


@one_case_each
def test_tokens_see_only_what_is_before(pair):
    """An image's tokens, too: one that changes changes no token before it."""
    _, _, _, ours = pair
    ids, _, _, pixels = make(ours, [[3, TILE, 4, TILE, 5]])
    with torch.no_grad():
        before = ours(ids, pixel_values=pixels).logits[0]
        changed = pixels.clone()
        changed[1, :, 6, 6] += 9.0
        after = ours(ids, pixel_values=changed).logits[0]
    start = 3 + ours.config.tokens_per_tile + 4
    same = torch.isclose(after, before, atol=1e-6).all(1)
    assert same[:start].all()
    assert not same[start:].any()


@one_case_each
def test_frozen_parts_and_checkpointing(pair):
    _, _, _, ours = pair
    ids, mask, labels, pixels = make(ours, ROWS)
    assert_policies_and_frozen_parts(ours, ids, labels=labels, attention_mask=mask, pixel_values=pixels)


@pytest.mark.matrix
@pytest.mark.compile
@one_case_each
def test_compiled_in_one_graph(pair, fresh_dynamo):
    _, _, _, ours = pair
    ids, mask, labels, pixels = make(ours, ROWS)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert_one_graph(ours, compiled, ids, labels=labels, attention_mask=mask, pixel_values=pixels)


@pytest.mark.parametrize("pair", CASES[:2], indirect=True, ids="-".join)
def test_kernels_match_transformers(pair, kernel_device, root):
    """Also norms of q and k in the tower."""
    _, _, theirs, ours = pair
    ids, _, labels, pixels = make(ours, [[2, TILE, 3]])
    want = theirs(ids, labels=labels, **for_rows(ours, [[2, TILE, 3]], pixels))
    want.loss.backward()
    assert_kernels_match(pair, want.loss, kernel_device, root, input_ids=ids, labels=labels, pixel_values=pixels)


@one_case_each
def test_wrong_numbers_are_named(pair):
    _, _, _, ours = pair
    ids, _, _, pixels = make(ours, [[3, TILE, 2]])
    per, side = ours.config.tokens_per_tile, ours.image_shape[1]
    with pytest.raises(ValueError, match=rf"each of the {per} image tokens \(1 images\), got {per - 1}"):
        ours(ids[:, torch.arange(ids.shape[1]) != 5], pixel_values=pixels)
    with pytest.raises(ValueError, match=f"{per} image placeholders in input_ids must have pixel_values, got none"):
        ours(ids)
    with pytest.raises(ValueError, match="pixel_values must be a tensor, got ndarray"):
        ours(ids, pixel_values=pixels.numpy())
    torn = torch.cat([ids[:, :5], torch.tensor([[9]]), ids[:, 5:]], 1)
    with pytest.raises(ValueError, match=rf"the {per} placeholders of each image must be contiguous .*, got 1 apart"):
        ours(torn, pixel_values=pixels)
    with pytest.raises(ValueError, match=r"in one document, got 1 apart"):
        ours(ids, pixel_values=pixels, cu_seqlens=torch.tensor([0, 5, ids.shape[1]]))
    with pytest.raises(ValueError, match=r"pixel_values must be \[tiles, 3, .*, got \[1, 3, "):
        ours(ids, pixel_values=pixels[:, :, : side // 2])
    with pytest.raises(ValueError, match="pixels need input_ids"):
        ours(inputs_embeds=ours.embed_tokens(ids), pixel_values=pixels)


def test_settings_of_internvl():
    from liger_models.arch.internvl.config import InternVLConfig, InternVLVisionConfig

    config = InternVLConfig()
    for changes, message in (
        ({"hidden_act": "relu"}, "hidden_act must be"),
        ({"image_size": [448, 224]}, r"image_size must be a number, or height and width that are equal, got \[448"),
        ({"image_size": 450}, r"image_size \(450\) must be a multiple of patch_size \(14\)"),
        ({"num_attention_heads": 5}, "must be a multiple of num_attention_heads"),
        ({"use_absolute_position_embeddings": False}, "use_absolute_position_embeddings must be True"),
        ({"hidden_dropout_prob": 0.1}, "hidden_dropout_prob must be 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            InternVLVisionConfig(**changes)
    for changes, message in (
        ({"text_type": "gpt_oss"}, "text_config.model_type must be qwen2, qwen3, qwen3_moe, got 'gpt_oss'"),
        ({"downsample_ratio": 0.2}, r"downsample_ratio \(0.2\) must be 1 over a number that divides the rows .*\(32\)"),
        ({"vision_feature_layer": -2}, "vision_feature_layer must be -1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **changes)
    assert config.tokens_per_tile == 256


def test_the_size_of_internvl_3_1b():
    from liger_models import AutoLigerModel

    text = {"model_type": "qwen2", "vocab_size": 151674, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}  # fmt: skip
    config = {"model_type": "internvl", "text_config": text, "vision_config": {"attention_bias": True}}
    for tied, millions in ((False, 938), (True, 802)):
        model = AutoLigerModel.from_config({**config, "tie_word_embeddings": tied}, device="meta")
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize("pair", [("idefics3", "untied")], indirect=True, ids="-".join)
def test_which_tiles_are_padding(pair):
    """A mask says so; without it, as in transformers, tiles whose pixels are all 0, which is an error then."""
    _, _, theirs, ours = pair
    rows = [[3, TILE, TILE, 5], [TILE, 12]]
    ids, mask, _, pixels = make(ours, rows)
    padded = for_rows(ours, rows, pixels)
    with torch.no_grad():
        want = theirs(ids, attention_mask=mask, pixel_values=padded["pixel_values"]).logits
        got = ours(ids, attention_mask=mask, pixel_values=padded["pixel_values"]).logits
        assert error(got[mask.bool()], want[mask.bool()]) <= LIMIT
        # An image of one color that the settings map to 0.
        pixels[1] = 0
        dark = for_rows(ours, rows, pixels)
        alone = ours(ids, attention_mask=mask, pixel_values=pixels).logits
        assert torch.equal(ours(ids, attention_mask=mask, **dark).logits, alone)
        with pytest.raises(ValueError, match="do not match"):
            theirs(ids, attention_mask=mask, **dark)
        with pytest.raises(ValueError, match=r"each of the 8 image tokens \(2 images\), got 12"):
            ours(ids, attention_mask=mask, pixel_values=dark["pixel_values"])
    part = dark["pixel_attention_mask"].clone()
    part[0, 0, 5:] = 0
    with pytest.raises(ValueError, match="must be 1 or 0 on the whole of each tile, got tiles that are padded in part"):
        ours(ids, pixel_values=dark["pixel_values"], pixel_attention_mask=part)
    with pytest.raises(ValueError, match="pixel_attention_mask must have the shape of pixel_values without channels"):
        ours(ids, pixel_values=dark["pixel_values"], pixel_attention_mask=part[0])


@pytest.mark.parametrize("pair", [("idefics3", "untied")], indirect=True, ids="-".join)
@pytest.mark.parametrize("side", [8, 24, 32])
def test_tiles_of_another_size(pair, side):
    """Fewer or more patches than learned positions."""
    _, _, theirs, ours = pair
    tokens = (side // 4 // 2) ** 2
    ids = torch.tensor([[5, *[90] * tokens, 7, 8]])
    pixels = torch.randn(1, 1, 3, side, side, generator=torch.Generator().manual_seed(side))
    with torch.no_grad():
        assert error(ours(ids, pixel_values=pixels).logits, theirs(ids, pixel_values=pixels).logits) <= LIMIT


def test_the_size_of_smolvlm2():
    from liger_models import AutoLigerModel

    text = {"model_type": "llama", "vocab_size": 49280, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32}  # fmt: skip
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
              "image_size": 384, "patch_size": 14}  # fmt: skip
    config = {"model_type": "smolvlm", "text_config": text, "vision_config": vision, "scale_factor": 3}
    model = AutoLigerModel.from_config(config, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_246_784_880
    assert model.config.tokens_per_tile == 81
