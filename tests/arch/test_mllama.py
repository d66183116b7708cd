"""Llama 3.2 Vision against transformers: logits, loss, gradients, decoding; which token sees which image.

In transformers a token that sees no image attends to all image places of its row, also to those that are there only
because another row has more images: rows are compared with what transformers gives each alone.
"""

import dataclasses

import pytest
import torch

from liger_models.arch import get_arch
from liger_models.arch.mllama import cross_attention
from liger_models.arch.mllama.cross_attention import tiles_seen
from liger_models.convert.config_map import read_config
from liger_models.layers.kv_cache import DecodeCache

from ..late import Late
from .families import (
    LIMIT,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    error,
    gradients_of,
)
from .image_checks import assert_kernels_match, assert_one_graph, assert_policies_and_frozen_parts

modeling = Late("transformers.models.mllama.modeling_mllama")
processing = Late("transformers.models.mllama.processing_mllama")
CASES = [case for case in VISION_CASES if case[0] == "mllama"]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", CASES[:1], indirect=True, ids="-".join)
IMAGE = -1
ROWS = [[3, IMAGE, 9, IMAGE, IMAGE, 4], [IMAGE, 12], [11], [2, IMAGE, 1, IMAGE, 5]]


def make(model, row, seed=0):
    """One row of word counts and images, as transformers' processor would give it."""
    generator = torch.Generator().manual_seed(seed)
    vision = model.config.vision_config
    ids = [
        token
        for part in row
        for token in (
            [model.config.image_token_index]
            if part == IMAGE
            else torch.randint(3, 80, (part,), generator=generator).tolist()
        )
    ]
    count, tiles, size = row.count(IMAGE), vision.max_num_tiles, vision.image_size
    ratios = torch.randint(1, len(vision.supported_aspect_ratios) + 1, (1, count), generator=generator)
    lengths = [rows * columns for rows, columns in (vision.supported_aspect_ratios[i - 1] for i in ratios[0])]
    pixels = torch.randn(1, count, tiles, 3, size, size, generator=generator)
    used = torch.arange(tiles) < torch.tensor(lengths)[:, None] if count else torch.zeros(0, tiles)
    pixels = pixels * used[None, :, :, None, None, None]
    ids = torch.tensor([ids])
    inputs = {}
    if count:
        spans = processing.get_cross_attention_token_mask(ids[0].tolist(), model.config.image_token_index)
        mask = processing.convert_sparse_cross_attention_mask_to_dense([spans], [lengths], tiles, ids.shape[1])
        inputs = {
            "pixel_values": pixels,
            "aspect_ratio_ids": ratios,
            "aspect_ratio_mask": used[None].long(),
            "cross_attention_mask": torch.tensor(mask),
        }
    return ids, ids.masked_fill(ids == model.config.image_token_index, -100), inputs


def joined(rows):
    """Rows of `make` padded on the left to a batch, without a mask for images: input_ids, mask, labels, inputs."""
    T = max(ids.shape[1] for ids, _, _ in rows)
    M = max(inputs["pixel_values"].shape[1] for _, _, inputs in rows if inputs)
    first = next(inputs["pixel_values"] for _, _, inputs in rows if inputs)
    batch = [torch.zeros(len(rows), T, dtype=torch.int64) for _ in range(3)]
    # What stands in the places without an image must not matter.
    pixels, ratios = torch.full((len(rows), M, *first.shape[2:]), 9.0), torch.zeros(len(rows), M, dtype=torch.int64)
    batch[2].fill_(-100)
    for i, (ids, labels, inputs) in enumerate(rows):
        for whole, part in zip(batch, (ids, torch.ones_like(ids), labels), strict=True):
            whole[i, T - ids.shape[1] :] = part[0]
        batch[2][i, T - ids.shape[1]] = -100  # a padding token has nothing to predict the first one from
        if inputs:
            count = inputs["pixel_values"].shape[1]
            pixels[i, :count], ratios[i, :count] = inputs["pixel_values"][0], inputs["aspect_ratio_ids"][0]
    return *batch, {"pixel_values": pixels, "aspect_ratio_ids": ratios}


def alone(model, rows):
    """transformers' logits of each row, and the mean loss of all with its gradients."""
    logits, losses, targets = [], [], 0
    for ids, labels, inputs in rows:
        logits.append(model(ids, **inputs).logits)
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], labels[0, 1:], reduction="sum"))
        targets += int((labels[:, 1:] != -100).sum())
    loss = sum(losses) / targets
    loss.backward()
    return logits, loss


@every_case
def test_logits_loss_and_gradients(pair):
    """Text before the first image, two images in a row, tiles that are not used; the mask given or not."""
    _, _, theirs, ours = pair
    ids, labels, inputs = make(ours, ROWS[0])
    (want,), loss = alone(theirs, [(ids, labels, inputs)])
    own = {name: inputs[name] for name in ("pixel_values", "aspect_ratio_ids")}
    assert error(ours(ids, **inputs).logits, want) <= LIMIT
    assert error(ours(ids, **own).logits, want) <= LIMIT
    got = ours(ids, labels=labels, **own)
    assert error(got.loss, loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)
    assert all(gradient.any() for gradient in gradients_of(ours).values())


@every_case
def test_rows_with_different_images_and_with_none(pair):
    _, _, theirs, ours = pair
    rows = [make(ours, row, seed) for seed, row in enumerate(ROWS)]
    want, loss = alone(theirs, rows)
    ids, mask, labels, inputs = joined(rows)
    logits = ours(ids, attention_mask=mask, **inputs).logits
    for i, each in enumerate(want):
        assert error(logits[i, -each.shape[1] :], each[0]) <= LIMIT
    got = ours(ids, labels=labels, attention_mask=mask, **inputs)
    assert error(got.loss, loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)


@every_case
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [make(ours, row, seed) for seed, row in enumerate(([3, IMAGE], *ROWS))]
    want, _ = alone(theirs, rows)
    lengths = [0, *(ids.shape[1] for ids, _, _ in rows)]
    ids, labels = (torch.cat([row[i] for row in rows], 1) for i in (0, 1))
    inputs = {
        name: torch.cat([row[2][name] for row in rows if row[2]], 1) for name in ("pixel_values", "aspect_ratio_ids")
    }
    bounds = torch.tensor(lengths).cumsum(0)
    got = ours(ids, labels=labels, cu_seqlens=bounds, return_logits=True, **inputs)
    got.loss.backward()
    assert_bounds_under_other_names(ours, bounds, got.logits, input_ids=ids, **inputs)
    assert error(got.logits, torch.cat(want, 1)) <= LIMIT
    assert_same_gradients(ours, theirs)


@every_case
def test_tokens_see_the_tiles_that_transformers_masks_say(pair):
    _, _, _, ours = pair
    tiles = ours.config.vision_config.max_num_tiles
    for seed, row in enumerate(([IMAGE], [IMAGE, IMAGE, 3, IMAGE], [2, IMAGE, IMAGE, IMAGE, 1, IMAGE], *ROWS)):
        ids, _, inputs = make(ours, row, seed)
        if inputs:
            here = ids == ours.config.image_token_index
            used = inputs["aspect_ratio_mask"].bool()
            seen, own = tiles_seen(here, used.any(-1), used, None)
            assert torch.equal(seen, inputs["cross_attention_mask"].bool().flatten(2))
            assert own.all()
            assert own.shape == (1, 1, row.count(IMAGE) * tiles)


@pytest.mark.cases(5)
@every_case
def test_generate(pair, use_cache):
    _, _, theirs, ours = pair
    theirs.generation_config.eos_token_id = None
    rows = [make(ours, row, seed) for seed, row in enumerate(ROWS)]
    ids, mask, _, inputs = joined(rows)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    got = ours.generate(ids, attention_mask=mask, use_cache=use_cache, eos_token_id=[], **inputs, **options)
    for i, (own, _, images) in enumerate(rows):
        want = theirs.generate(own, attention_mask=torch.ones_like(own), **images, **options)
        assert got[i, -want.shape[1] :].tolist() == want[0].tolist()
    ids, _, inputs = rows[0]
    again = ours.generate(ids, use_cache=use_cache, eos_token_id=[], **inputs, **options)
    assert torch.equal(again[0], got[0, -again.shape[1] :])
    penalized = ours.generate(ids, eos_token_id=[], repetition_penalty=1e9, **inputs, **options)[0, ids.shape[1] :]
    assert not torch.isin(penalized, ids).any()
    assert len(penalized.unique()) == len(penalized)


@one_case
def test_pieces_with_a_cache_are_the_whole(pair):
    _, _, _, ours = pair
    ids, _, inputs = make(ours, [3, IMAGE, 2, IMAGE, 9])
    cache = DecodeCache(ids.shape[1])
    with torch.no_grad():
        want = ours(ids, **inputs).logits
        got = [ours(ids[:, :9], cache=cache, **inputs).logits, ours(ids[:, 9:12], cache=cache).logits]
        cache.select(torch.tensor([0, 0]))
        got = [*(each.expand(2, -1, -1) for each in got), ours(ids[:, 12:13].expand(2, -1), cache=cache).logits]
        embeds = ours.embed_tokens(ids[:, 13:14]).expand(2, -1, -1)
        got += [ours(inputs_embeds=embeds, cache=cache).logits, ours(ids[:, 14:].expand(2, -1), cache=cache).logits]
        assert error(torch.cat(got, 1), want.expand(2, -1, -1)) <= LIMIT
        with pytest.raises(ValueError, match="images must come with the first tokens"):
            ours(ids[:, :3], cache=cache, **inputs)


@one_case
def test_places_without_any_image(pair):
    """A row of a batch whose other rows have images, taken alone: a text."""
    _, _, _, ours = pair
    ids, mask, _, inputs = joined([make(ours, row, seed) for seed, row in enumerate(ROWS)])
    row, own = slice(2, 3), mask[2].bool()
    alone = {name: tensor[row] for name, tensor in inputs.items()}
    got = ours(ids[row], attention_mask=mask[row], **alone).logits
    assert torch.equal(got, ours(ids[row], attention_mask=mask[row]).logits)
    assert error(got[0, own], ours(ids, attention_mask=mask, **inputs).logits[2, own]) <= LIMIT
    nowhere = {name: tensor[:, :0] for name, tensor in alone.items()}
    want = ours.generate(ids[row], attention_mask=mask[row], max_new_tokens=2)
    assert torch.equal(ours.generate(ids[row], attention_mask=mask[row], max_new_tokens=2, **nowhere), want)


@one_case
def test_states_that_enter_the_layers(pair, monkeypatch):
    """What the weights of the releases were trained on; early versions of transformers took it."""
    _, _, theirs, ours = pair
    forward = modeling.MllamaVisionEncoder.forward

    def entering(self, hidden_states, attention_mask=None):
        out = forward(self, hidden_states, attention_mask)
        out.hidden_states = (hidden_states, *out.hidden_states[:-1])
        return out

    ids, _, inputs = make(ours, [3, IMAGE, 2])
    outputs = ours(ids, **inputs).logits
    ours.visual.intermediate = "inputs"
    monkeypatch.setattr(modeling.MllamaVisionEncoder, "forward", entering)
    assert error(ours(ids, **inputs).logits, theirs(ids, **inputs).logits) <= LIMIT
    assert error(ours(ids, **inputs).logits, outputs) > 1e-3


@one_case
def test_frozen_parts_and_checkpointing(pair):
    _, _, _, ours = pair
    ids, mask, labels, inputs = joined([make(ours, row, seed) for seed, row in enumerate(ROWS)])
    assert_policies_and_frozen_parts(ours, ids, labels=labels, attention_mask=mask, **inputs)


@one_case
def test_cross_attention_within_segments(pair, monkeypatch):
    """As on a GPU in half precision."""
    taken = []
    monkeypatch.setattr(cross_attention, "takes_segments", lambda *_: taken.append(1) or True)
    for check in (test_rows_with_different_images_and_with_none, test_packed_documents_are_separate_documents):
        for model in pair[2:]:
            model.zero_grad()
        check(pair)
    assert taken


@pytest.mark.compile
@pytest.mark.matrix  # tests/arch/test_vision.py compiles another family with images
@one_case
def test_compiled_in_one_graph(pair, fresh_dynamo):
    _, _, _, ours = pair
    ids, mask, labels, inputs = joined([make(ours, row, seed) for seed, row in enumerate(ROWS)])
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert_one_graph(ours, compiled, ids, labels=labels, attention_mask=mask, **inputs)


@one_case
def test_kernels_match_transformers(pair, kernel_device, root):
    _, _, theirs, ours = pair
    ids, labels, inputs = make(ours, [2, IMAGE, 4])
    _, loss = alone(theirs, [(ids, labels, inputs)])
    assert_kernels_match(pair, loss, kernel_device, root, input_ids=ids, labels=labels, **inputs)


@pytest.mark.gpu
@every_case
def test_on_gpu(pair):
    """flex_attention over more than one block there. Of ten samples, that whose gradients rounding moves least."""
    _, _, theirs, ours = pair
    every = [100, IMAGE, 190, IMAGE, IMAGE, 4], [IMAGE, 140], [50]
    rows = [make(ours, row, seed) for seed, row in enumerate(every, 50)]
    _, loss = alone(theirs, rows)
    ours.cuda()
    ids, mask, labels, inputs = joined(rows)
    moved = {name: each.cuda() for name, each in inputs.items()}
    got = ours(ids.cuda(), labels=labels.cuda(), attention_mask=mask.cuda(), **moved)
    got.loss.backward()
    assert error(got.loss, loss) <= LIMIT
    assert_same_gradients(ours, theirs)
    theirs.generation_config.eos_token_id = None
    got = ours.generate(ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=4, eos_token_id=[], **moved)
    for i, (own, _, images) in enumerate(rows):
        want = theirs.generate(own, attention_mask=torch.ones_like(own), **images, max_new_tokens=4, do_sample=False)
        assert got[i, -want.shape[1] :].tolist() == want[0].tolist()


@one_case
def test_what_does_not_fit_is_named(pair):
    _, _, _, ours = pair
    ids, _, inputs = make(ours, [3, IMAGE, 2])
    with pytest.raises(ValueError, match=r"one placeholder for each image of a row \(\[1\]\), got \[0\]"):
        ours(ids[:, :3], **inputs)
    with pytest.raises(ValueError, match="1 image placeholders in input_ids must have pixel_values, got none"):
        ours(ids)
    with pytest.raises(ValueError, match="must be given together"):
        ours(ids, pixel_values=inputs["pixel_values"])
    with pytest.raises(ValueError, match="must be given together"):
        ours(ids, cross_attention_mask=inputs["cross_attention_mask"])
    with pytest.raises(ValueError, match=r"must be \[1, images, 4, 3, 16, 16\], got \[1, 1, 4, 3, 8, 16\]"):
        ours(ids, **inputs | {"pixel_values": inputs["pixel_values"][..., :8, :]})
    with pytest.raises(ValueError, match="aspect_ratio_ids must be a tensor, got list"):
        ours(ids, **inputs | {"aspect_ratio_ids": inputs["aspect_ratio_ids"].tolist()})
    with pytest.raises(TypeError, match=r"aspect_ratio_ids must be int64 or int32, got torch.float32"):
        ours(ids, **inputs | {"aspect_ratio_ids": inputs["aspect_ratio_ids"].float()})
    with pytest.raises(ValueError, match="input_ids must be a tensor, got list"):
        ours(ids.tolist(), **inputs)
    with pytest.raises(ValueError, match=r"aspect_ratio_ids must be \[1, 1\] like pixel_values, got \[1\]"):
        ours(ids, **inputs | {"aspect_ratio_ids": inputs["aspect_ratio_ids"][0]})
    with pytest.raises(ValueError, match=r"aspect_ratio_ids must be 0 \(no image\) to 8, got \[\[9\]\]"):
        ours(ids, **inputs | {"aspect_ratio_ids": torch.tensor([[9]])})
    with pytest.raises(ValueError, match=r"cross_attention_mask must be \[1, 6, 1, 4\], got \[1, 6, 1, 3\]"):
        ours(ids, **inputs | {"cross_attention_mask": inputs["cross_attention_mask"][..., :3]})
    with pytest.raises(ValueError, match="pixels need input_ids"):
        ours(inputs_embeds=ours.embed_tokens(ids), **inputs)
    for changes, message in (
        ({"hidden_act": "relu"}, "hidden_act must be"),
        ({"image_size": 17}, r"image_size \(17\) must be a multiple"),
        ({"attention_heads": 5}, "must be a multiple of attention_heads"),
        ({"vision_output_dim": 64}, r"vision_output_dim \(64\) must be hidden_size \(32\) times 1 plus"),
        ({"intermediate_layers_indices": [1, 3]}, r"must ascend and be below num_hidden_layers \(3\), got \[1, 3\]"),
        ({"max_num_tiles": 3}, "supported_aspect_ratios must be rows and columns"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(ours.config.vision_config, **changes)
    with pytest.raises(ValueError, match=r"below num_hidden_layers \(4\), got \[4\]"):
        dataclasses.replace(ours.config, cross_attention_layers=[4])


def test_other_spellings_of_a_configuration():
    config_class = get_arch("mllama").config_class
    config = read_config(config_class, {"model_type": "mllama", "image_token_id": 77}, strict=True)
    assert config == dataclasses.replace(config_class(), image_token_index=77)
