"""Gemma 3 and PaliGemma, against transformers: logits, loss, gradients, decoding; who sees whom among image tokens."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from liger_models import LigerPaliGemma
from liger_models.convert.config_map import read_config
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.patches import ends_of_runs

from .families import (
    LIMIT,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    error,
    fp64_twin,
    gradients_of,
    is_tower,
    tiny,
)
from .image_checks import assert_kernels_match, assert_one_graph, assert_policies_and_frozen_parts

FAMILIES = ("gemma3", "paligemma")
CASES = [case for case in VISION_CASES if case[0] in FAMILIES]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
FIRST = [next(case for case in CASES if case[0] == family) for family in FAMILIES]
one_case_each = pytest.mark.parametrize("pair", FIRST, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", FIRST[:1], indirect=True, ids="-".join)
one_paligemma = pytest.mark.parametrize("pair", FIRST[1:], indirect=True, ids="-".join)
IMAGE = -1


def make(model, rows, seed=0):
    """input_ids, token types, mask, labels and pixels of rows of word counts and images.

    Of PaliGemma, the answer is about half of the last words, and types are 1 and labels are given only there.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    has_prefix = isinstance(model, LigerPaliGemma)
    image = [config.image_token_index] * tokens_of(model)
    image = image if has_prefix else [config.boi_token_index, *image, config.eoi_token_index]
    ids = [
        [
            token
            for part in row
            for token in (image if part == IMAGE else torch.randint(3, 80, (part,), generator=generator).tolist())
        ]
        for row in rows
    ]
    T = max(map(len, ids))
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in ids])
    ids = torch.tensor([[0] * (T - len(row)) + row for row in ids])
    types = (ids == config.image_token_index).long()
    if has_prefix:
        types = torch.tensor([[0] * (T - row[-1] // 2 - 1) + [1] * (row[-1] // 2 + 1) for row in rows])
    size = config.vision_config.image_size
    count = sum(row.count(IMAGE) for row in rows)
    pixels = torch.randn(count, 3, size, size, generator=generator)
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    unlearned = types == (0 if has_prefix else 1)
    labels = ids.masked_fill(unlearned | (mask == 0) | first, -100)
    return ids, types, mask, labels, pixels


def tokens_of(model):
    config = model.config
    return config.tokens_per_image if isinstance(model, LigerPaliGemma) else config.mm_tokens_per_image


ROWS = [[3, IMAGE, 9, IMAGE, 4], [2, IMAGE, 12], [11]]


@every_case
def test_logits_loss_and_gradients(pair):
    """Rows with two images, one and none, padded on the left; runs of image tokens longer than the window."""
    _, _, theirs, ours = pair
    # With seed 0, fp32 gradients of PaliGemma's tower lose more digits than the limit on CPUs without AVX-512.
    ids, types, mask, labels, pixels = make(ours, ROWS, seed=6)
    want = theirs(ids, token_type_ids=types, attention_mask=mask, pixel_values=pixels, labels=labels)
    want.loss.backward()
    kept = mask.bool()
    options = {"pixel_values": pixels, "attention_mask": mask}
    assert error(ours(ids, token_type_ids=types, **options).logits[kept], want.logits[kept]) <= LIMIT
    got = ours(ids, labels=labels, **options)
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)
    assert any(is_tower(name) and gradient.any() for name, gradient in gradients_of(ours).items())


@one_case
def test_token_types_show_where_images_are_in_embeddings(pair):
    _, _, theirs, ours = pair
    _, types, _, _, _ = make(ours, ROWS[:1])
    embeds = torch.randn(*types.shape, ours.config.hidden_size)
    with torch.no_grad():
        want = theirs(inputs_embeds=embeds, token_type_ids=types).logits
        assert error(ours(inputs_embeds=embeds, token_type_ids=types).logits, want) <= LIMIT
    with pytest.raises(ValueError, match=r"token types must be \[1, 52\], got \[1, 51\]"):
        ours(inputs_embeds=embeds, token_type_ids=types[:, 1:])


@one_case_each
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [[3, IMAGE, 15], [9], [IMAGE, 4, IMAGE, 12]]
    alone = [make(ours, [row], seed) for seed, row in enumerate(rows)]
    bounds = torch.tensor([0, *(each[0].shape[1] for each in alone)]).cumsum(0)
    ids, labels, pixels = (torch.cat([each[i] for each in alone], dim) for i, dim in ((0, 1), (3, 1), (4, 0)))
    got = ours(ids, labels=labels, cu_seqlens=bounds, pixel_values=pixels, return_logits=True)
    got.loss.backward()
    types = torch.cat([each[1] for each in alone], 1)
    inputs = {"input_ids": ids, "token_type_ids": types, "pixel_values": pixels}
    assert_bounds_under_other_names(ours, bounds, got.logits, **inputs)
    logits, losses, targets = [], [], 0
    for own, types, _, own_labels, own_pixels in alone:
        images = {"pixel_values": own_pixels} if len(own_pixels) else {}
        logits.append(theirs(own, token_type_ids=types, **images).logits)
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], own_labels[0, 1:], reduction="sum"))
        targets += int((own_labels[:, 1:] != -100).sum())
    (sum(losses) / targets).backward()
    assert error(got.logits, torch.cat(logits, 1)) <= LIMIT
    assert_same_gradients(ours, theirs)


@pytest.mark.cases(10)
@every_case
def test_generate(pair, use_cache):
    _, _, theirs, ours = pair
    ids, types, mask, _, pixels = make(ours, ROWS)
    theirs.generation_config.eos_token_id = None
    options = {"attention_mask": mask, "pixel_values": pixels, "max_new_tokens": 6, "do_sample": False}
    want = theirs.generate(ids, token_type_ids=types, use_cache=True, pad_token_id=0, **options)
    got = ours.generate(ids, token_type_ids=types, use_cache=use_cache, pad_token_id=0, eos_token_id=[], **options)
    assert torch.equal(got, want)


@one_case_each
def test_pieces_with_a_cache_are_the_whole(pair):
    _, _, _, ours = pair
    ids, _, _, _, pixels = make(ours, [[3, IMAGE, 4, IMAGE, 5]])
    first = (ids.shape[1] - 12) // 2 + 5
    cache = DecodeCache(ids.shape[1])
    with torch.no_grad():
        got = [
            ours(ids[:, :first], pixel_values=pixels[:1], cache=cache).logits,
            ours(ids[:, first:-2], pixel_values=pixels[1:], cache=cache).logits,
            *(ours(ids[:, i : i + 1], cache=cache).logits for i in (-2,)),
            ours(ids[:, -1:], cache=cache).logits,
        ]
        assert error(torch.cat(got, 1), ours(ids, pixel_values=pixels).logits) <= LIMIT


@one_case_each
def test_a_placeholder_that_was_generated(pair):
    """It is embedded as any other token is."""
    _, _, theirs, ours = pair
    ids, types, _, _, pixels = make(ours, ROWS[:1])
    new, cache = torch.tensor([[ours.config.image_token_index]]), DecodeCache(ids.shape[1] + 1)
    with torch.no_grad():
        past = theirs(ids, token_type_ids=types, pixel_values=pixels, use_cache=True).past_key_values
        want = theirs(new, past_key_values=past).logits
        ours(ids, token_type_ids=types, pixel_values=pixels, cache=cache)
        assert error(ours(new, cache=cache).logits, want) <= LIMIT


@one_case
def test_image_tokens_see_each_other_and_texts_only_what_is_before(pair):
    _, _, _, ours = pair
    ids, types, _, _, pixels = make(ours, [[3, IMAGE, 4, IMAGE, 5]])
    before = ours(ids, pixel_values=pixels).logits[0]
    for image, other in ((0, 1), (1, 0)):
        changed = pixels.clone()
        changed[image, :, -1, -1] += 9.0  # the last corner, in the last token of the image
        same = torch.isclose(ours(ids, pixel_values=changed).logits[0], before, atol=1e-6).all(1)
        runs = types[0].nonzero().flatten().split(16)
        assert not same[runs[image]].any()
        assert same[: runs[image][0]].all()
        if other < image:
            assert same[runs[other]].all()


def test_ends_of_runs():
    inside = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 1, 1]]).bool()
    assert ends_of_runs(inside).tolist() == [[0, 2, 2, 3, 4, 5], [1, 1, 2, 3, 5, 5]]


@one_paligemma
def test_a_prefix_sees_itself_and_an_answer_what_is_before(pair):
    _, _, _, ours = pair
    ids, types, _, labels, pixels = make(ours, [[3, IMAGE, 14]])
    before = ours(ids, token_type_ids=types, pixel_values=pixels).logits[0]
    start = int(types[0].argmax())
    for place in (0, start - 1, start, ids.shape[1] - 1):
        changed = ids.clone()
        changed[0, place] += 1
        same = torch.isclose(ours(changed, token_type_ids=types, pixel_values=pixels).logits[0], before, atol=1e-6)
        first = 0 if place < start else place
        assert [bool(row.all()) for row in same[: start + 1]] == [index < first for index in range(start + 1)]
        assert same[:first].all()
    # The number of types may be that of the prompt, and types do not count after cached tokens.
    short = ours(ids, token_type_ids=types[:, :start], pixel_values=pixels).logits[0]
    assert torch.equal(short, before)
    # Labels are never seen by the tokens that predict them, unlike in transformers without types.
    assert torch.equal(ours(ids, labels=labels, pixel_values=pixels, return_logits=True).logits[0], before)


@one_paligemma
def test_types_that_do_not_fit_are_named(pair):
    _, _, _, ours = pair
    ids, types, mask, _, pixels = make(ours, [[3, IMAGE, 6], [5]])
    options = {"attention_mask": mask, "pixel_values": pixels}
    turned = 1 - types
    with pytest.raises(ValueError, match="token_type_ids must be 0 in the prefix of each document and 1 after it"):
        ours(ids, token_type_ids=turned, **options)
    with pytest.raises(ValueError, match=r"token_type_ids and labels must be \[2, 18\], got \[2, 19\]"):
        ours(ids, token_type_ids=torch.nn.functional.pad(types, (1, 0)), **options)
    with pytest.raises(ValueError, match="labels must be -100 where token_type_ids are 0"):
        ours(ids, token_type_ids=torch.zeros_like(types), labels=ids.masked_fill(mask == 0, -100), **options)
    with pytest.raises(TypeError, match="token_type_ids must be int64"):
        ours(ids, token_type_ids=types.float(), **options)
    with pytest.raises(ValueError, match="prompts must be causal, got LigerPaliGemma"):
        ours.rollout([[3, 4, 5]], max_new_tokens=2)
    base = tiny("paligemma")["gemma2"]
    for changes, message in (
        ({"projection_dim": 32}, "projection_dim must be the width of the language model, 64, got 32"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type must be one of gemma, gemma2, got 'llama'"),
        ({"vision_config": {"model_type": "clip"}}, "vision_config.model_type must be one of siglip_vision_model"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config(type(ours.config), {"model_type": "paligemma", **base, **changes})


@one_case_each
def test_frozen_parts_and_checkpointing(pair):
    _, _, _, ours = pair
    ids, _, mask, labels, pixels = make(ours, ROWS)
    assert_policies_and_frozen_parts(ours, ids, labels=labels, attention_mask=mask, pixel_values=pixels)


@pytest.mark.matrix
@pytest.mark.compile
@one_case_each
def test_compiled_in_one_graph(pair, fresh_dynamo):
    _, _, _, ours = pair
    ids, _, mask, labels, pixels = make(ours, ROWS)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert_one_graph(ours, compiled, ids, labels=labels, attention_mask=mask, pixel_values=pixels)


@pytest.mark.cases(1)
@one_case_each
def test_kernels_match_transformers(pair, kernel_device, root):
    _, _, theirs, ours = pair
    ids, types, _, labels, pixels = make(ours, [[2, IMAGE, 13]])
    want = theirs(ids, token_type_ids=types, pixel_values=pixels, labels=labels)
    want.loss.backward()
    assert_kernels_match(pair, want.loss, kernel_device, root, input_ids=ids, labels=labels, pixel_values=pixels)


@pytest.mark.gpu
@one_case_each
def test_on_gpu(pair):
    """flex_attention over more than one block there."""
    _, _, theirs, ours = pair
    ids, types, mask, labels, pixels = make(ours, [[100, IMAGE, 90, IMAGE, 4], [120, IMAGE, 12], [50]])
    want = theirs(ids, token_type_ids=types, attention_mask=mask, pixel_values=pixels, labels=labels)
    want.loss.backward()
    ours.cuda()
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "pixel_values": pixels}
    got = ours(**{name: tensor.cuda() for name, tensor in batch.items()})
    got.loss.backward()
    assert error(got.loss, want.loss) <= LIMIT
    assert_same_gradients(ours, theirs, twin=partial(fp64_twin, ours, **batch))


@one_case
def test_wrong_numbers_are_named(pair):
    _, _, _, ours = pair
    ids, _, _, _, pixels = make(ours, [[3, IMAGE, 2]])
    with pytest.raises(ValueError, match=r"each of the 16 image tokens \(1 images\), got 15"):
        ours(ids[:, torch.arange(ids.shape[1]) != 5], pixel_values=pixels)
    with pytest.raises(ValueError, match="16 image placeholders in input_ids must have pixel_values, got none"):
        ours(ids)
    with pytest.raises(ValueError, match="pixel_values must be a tensor, got ndarray"):
        ours(ids, pixel_values=pixels.numpy())
    torn = torch.cat([ids[:, :5], torch.tensor([[9]]), ids[:, 5:]], 1)
    with pytest.raises(ValueError, match=r"the 16 placeholders of each image must be contiguous .*, got 1 apart"):
        ours(torn, pixel_values=pixels)
    with pytest.raises(ValueError, match=r"in one document, got 1 apart"):
        ours(ids, pixel_values=pixels, cu_seqlens=torch.tensor([0, 6, ids.shape[1]]))
    with pytest.raises(ValueError, match=r"must be \[images, 3, 32, 32\], got \[1, 3, 16, 32\]"):
        ours(ids, pixel_values=pixels[:, :, :16])
    with pytest.raises(ValueError, match="pixels need input_ids"):
        ours(inputs_embeds=ours.embed_tokens(ids), pixel_values=pixels)
    config = ours.config
    for changes, message in (
        ({"hidden_act": "relu"}, "hidden_act must be"),
        ({"image_size": 33}, "image_size \\(33\\) must be a multiple"),
        ({"num_attention_heads": 5}, "must be a multiple of num_attention_heads"),
        ({"vision_use_head": True}, "vision_use_head must be False"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config.vision_config, **changes)
    with pytest.raises(ValueError, match=r"mm_tokens_per_image \(15\) must be the square"):
        dataclasses.replace(config, mm_tokens_per_image=15)
    assert math.isqrt(config.mm_tokens_per_image) == config.tokens_per_side
