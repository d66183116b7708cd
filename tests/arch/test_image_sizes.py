"""Mistral Small 3 and Pixtral, whose images keep their sizes, against transformers: logits, gradients, decoding."""

import dataclasses

import pytest
import torch

from liger_models.arch._towers.pixtral import PixtralVisionConfig
from liger_models.layers.kv_cache import DecodeCache

from .families import (
    LIMIT,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    error,
    gradients_of,
    is_tower,
    tiny,
)
from .image_checks import assert_kernels_match, assert_one_graph, assert_policies_and_frozen_parts

CASES = [
    case
    for case in VISION_CASES
    if case[0] == "mistral3"
    or (case[0] == "llava" and tiny("llava")[case[1]]["vision_config"]["model_type"] == "pixtral")
]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize(
    "pair", [case for case in CASES if case[0] == "mistral3"][:1], indirect=True, ids="-".join
)
ROW_END, END = 91, 92


def make(model, rows, seed=0):
    """input_ids, mask, labels and images of rows of word counts and of images, by their rows and columns of tokens."""
    generator = torch.Generator().manual_seed(seed)
    image, side, ids, sizes = model.placeholder_id, model.token_side, [], []
    for row in rows:
        ids.append([])
        for part in row:
            if isinstance(part, int):
                ids[-1] += torch.randint(3, 80, (part,), generator=generator).tolist()
                continue
            sizes.append([length * side for length in part])
            row_of_image = [*[image] * part[1], ROW_END]
            ids[-1] += [*(row_of_image * part[0])[:-1], END]
    T = max(map(len, ids))
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in ids])
    ids = torch.tensor([[0] * (T - len(row)) + row for row in ids])
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    labels = ids.masked_fill((ids == image) | (mask == 0) | first, -100)
    images = {}
    if sizes:
        sizes = torch.tensor(sizes)
        # What is beyond an image's size must not matter, so it is not zeros.
        images = {"pixel_values": torch.randn(len(sizes), 3, *sizes.amax(0).tolist(), generator=generator)}
        images["image_sizes"] = sizes
    return ids, mask, labels, images


ROWS = [[3, (2, 3), 9, (1, 1), 4], [2, (3, 1), 12], [11]]


@every_case
def test_logits_loss_and_gradients(pair):
    """Rows with two images, one and none, of different sizes, padded on the left."""
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


@one_case
def test_padding_on_the_right_and_images_of_one_size(pair):
    _, _, theirs, ours = pair
    ids, mask, _, images = make(ours, [[3, (2, 2), 4], [(2, 2), 1, (2, 2)]])
    ids, mask = ids.flip(1), mask.flip(1)
    want = theirs(ids, attention_mask=mask, **images).logits
    assert error(ours(ids, attention_mask=mask, **images).logits[mask.bool()], want[mask.bool()]) <= LIMIT
    alone = ours(ids, attention_mask=mask, pixel_values=images["pixel_values"]).logits
    assert torch.equal(alone, ours(ids, attention_mask=mask, **images).logits)


@one_case
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [[3, (2, 1), 5], [9], [(1, 2), 4, (2, 2), 2]]
    whole = make(ours, [[part for row in rows for part in row]])
    lengths = [make(ours, [row])[0].shape[1] for row in rows]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    ids, _, labels, images = whole
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


@pytest.mark.cases(7)
@every_case
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
    assert len(repeated["image_sizes"]) == 6
    ids, mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    torch.manual_seed(1)
    assert torch.equal(got, ours.generate(ids, attention_mask=mask, **options, **repeated))


@one_case
def test_pieces_with_a_cache_are_the_whole(pair):
    _, _, _, ours = pair
    ids, _, _, images = make(ours, [[3, (1, 2), 4, (2, 1), 5]])
    first, cache = 3 + 3 + 2, DecodeCache(ids.shape[1])
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
def test_wrong_numbers_are_named(pair):
    _, _, _, ours = pair
    ids, _, _, images = make(ours, [[3, (2, 3), 2]])
    pixels, side = images["pixel_values"], ours.token_side
    with pytest.raises(ValueError, match=r"each of the 6 image tokens \(1 images\), got 5"):
        ours(ids[:, torch.arange(ids.shape[1]) != 4], **images)
    with pytest.raises(ValueError, match="6 image placeholders in input_ids must have pixel_values, got none"):
        ours(ids)
    with pytest.raises(ValueError, match="image_sizes needs pixel_values, got 1 sizes"):
        ours(ids, image_sizes=images["image_sizes"])
    torn = torch.cat([ids[:, :5], torch.tensor([[9]]), ids[:, 5:]], 1)
    with pytest.raises(ValueError, match=r"placeholders of each image must be contiguous .*, got 1 apart"):
        ours(torn, **images)
    with pytest.raises(ValueError, match=rf"with multiples of {side}, got \[1, 3, {2 * side}, {3 * side - 1}\]"):
        ours(ids, pixel_values=pixels[..., :-1])
    for sizes in ([2 * side, 4 * side], [side, side - 1], [0, side]):
        with pytest.raises(ValueError, match=f"image_sizes must be positive multiples of {side} of at most"):
            ours(ids, pixel_values=pixels, image_sizes=torch.tensor([sizes]))
    with pytest.raises(ValueError, match=r"image_sizes must be \[1, 2\], got \[2\]"):
        ours(ids, pixel_values=pixels, image_sizes=torch.tensor([side, side]))
    with pytest.raises(ValueError, match="pixels need input_ids"):
        ours(inputs_embeds=ours.embed_tokens(ids), **images)


def test_towers_that_are_not_supported():
    for changes, message in (
        ({"hidden_act": "relu"}, "hidden_act must be"),
        ({"num_attention_heads": 5}, "must be a multiple of num_attention_heads"),
        ({"hidden_size": 32, "num_attention_heads": 16}, "width of a head must be a multiple of 4, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(PixtralVisionConfig(), **changes)


def test_other_language_models_are_refused_by_name():
    from liger_models import AutoLigerModel

    with pytest.raises(ValueError, match=r"text_config.model_type must be 'mistral' .* got 'mistral4'.*get_arch"):
        AutoLigerModel.from_config({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, device="meta")
