"""LLaVA-NeXT, whose images are cut into tiles, against transformers: logits, gradients, decoding, numbers of tokens."""

import dataclasses
import itertools

import pytest
import torch

from liger_models.arch._llava.tiles import arrange, best_resolution
from liger_models.layers.kv_cache import DecodeCache

from ..late import Late
from .families import LIMIT, VISION_CASES, assert_same_gradients, error, gradients_of

theirs_tiles = Late("transformers.image_processing_utils", "transformers")
theirs_processor = Late("transformers.models.llava_next.processing_llava_next", "transformers")

CASES = [case for case in VISION_CASES if case[0] == "llava_next"]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", CASES[:1], indirect=True, ids="-".join)


def make(model, rows, seed=0):
    """input_ids, mask, labels and images of rows of word counts and of images, by their heights and widths."""
    generator = torch.Generator().manual_seed(seed)
    config, image, ids, sizes = model.config, model.placeholder_id, [], []
    for row in rows:
        ids.append([])
        for part in row:
            if isinstance(part, int):
                ids[-1] += torch.randint(3, 80, (part,), generator=generator).tolist()
                continue
            sizes.append(part)
            ids[-1] += [image] * config.arrange(*part).count(model.visual.tokens)
    T = max(map(len, ids))
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in ids])
    ids = torch.tensor([[0] * (T - len(row)) + row for row in ids])
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    labels = ids.masked_fill((ids == image) | (mask == 0) | first, -100)
    if not sizes:
        return ids, mask, labels, {}
    tiles = max(1 + each.rows * each.columns for each in (config.arrange(*size) for size in sizes))
    side = config.vision_config.image_size
    # Tiles beyond an image's own must not matter, so they are not zeros.
    pixels = torch.randn(len(sizes), tiles, 3, side, side, generator=generator)
    return ids, mask, labels, {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


ROWS = [[3, (20, 30), 5, (40, 7), 4], [2, (11, 50), 12], [11]]


@every_case
def test_logits_loss_and_gradients(pair):
    """Rows with two images, one and none, of different numbers of tiles, padded on the left."""
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
    assert gradients_of(ours)["visual.newline.weight"].any()


@every_case
def test_generate(pair, use_cache):
    _, _, theirs, ours = pair
    ids, mask, _, images = make(ours, ROWS)
    theirs.generation_config.eos_token_id = None
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **images}
    want = theirs.generate(ids, use_cache=True, **options)
    assert torch.equal(ours.generate(ids, use_cache=use_cache, eos_token_id=[], **options), want)


@one_case
def test_several_continuations_and_pieces(pair):
    _, _, _, ours = pair
    ids, mask, _, images = make(ours, ROWS)
    options = {"max_new_tokens": 4, "do_sample": True, "eos_token_id": []}
    torch.manual_seed(1)
    got = ours.generate(ids, attention_mask=mask, num_return_sequences=2, **options, **images)
    repeated = ours.repeat_prompts(ids, images, 2)
    assert len(repeated["image_sizes"]) == 6
    twice = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    torch.manual_seed(1)
    assert torch.equal(got, ours.generate(twice[0], attention_mask=twice[1], **options, **repeated))

    ids, _, _, images = make(ours, [[3, (20, 30), 4, (40, 7), 5]])
    first, cache = 3 + ours.config.arrange(20, 30).count(9) + 2, DecodeCache(ids.shape[1])
    parts = [{name: tensor[i : i + 1] for name, tensor in images.items()} for i in (0, 1)]
    with torch.no_grad():
        pieces = [
            ours(ids[:, :first], cache=cache, **parts[0]).logits,
            ours(ids[:, first:], cache=cache, **parts[1]).logits,
        ]
        assert error(torch.cat(pieces, 1), ours(ids, **images).logits) <= LIMIT


@one_case
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [[3, (20, 30), 5], [9], [(30, 12), 4]]
    ids, _, _, images = make(ours, [[part for row in rows for part in row]])
    bounds = torch.tensor([0, *(make(ours, [row])[0].shape[1] for row in rows)]).cumsum(0)
    got = ours(ids, cu_seqlens=bounds, **images).logits
    parts = {0: {name: x[:1] for name, x in images.items()}, 2: {name: x[1:] for name, x in images.items()}}
    want = [
        theirs(ids[:, first:last], **parts.get(i, {})).logits
        for i, (first, last) in enumerate(itertools.pairwise(bounds))
    ]
    assert error(got, torch.cat(want, 1)) <= LIMIT


def test_numbers_of_tokens_are_transformers():
    """The sizes are those of the processor, also around all borders."""
    resolutions = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    processor = object.__new__(theirs_processor.LlavaNextProcessor)
    processor.image_processor = type("Images", (), {"image_grid_pinpoints": resolutions})
    processor.patch_size, processor.num_additional_image_tokens = 14, 0
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 2000, (300, 2), generator=generator).tolist()
    sizes += [[480, 640], [1080, 1920], [150, 200]]
    counts = []
    for height, width in [*sizes, [1, 1000], [1000, 1], [336, 336]]:
        want = theirs_tiles.select_best_resolution((height, width), resolutions)
        assert best_resolution(height, width, resolutions) == want
        counts.append(arrange(height, width, resolutions, 336, 24).count(576))
        assert counts[-1] == processor._get_number_of_features(height, width, 336, 336)
    assert counts[300:303] == [2340, 1948, 1368]


@one_case
def test_wrong_numbers_are_named(pair):
    _, _, _, ours = pair
    ids, _, _, images = make(ours, [[3, (20, 30), 2]])
    count = int((ids == ours.placeholder_id).sum())
    with pytest.raises(ValueError, match=rf"each of the {count} image tokens \(1 images\), got {count - 1}"):
        ours(ids[:, torch.arange(ids.shape[1]) != 5], **images)
    with pytest.raises(ValueError, match=r"must have the 5 tiles that image_sizes describes, got 3"):
        ours(ids, pixel_values=images["pixel_values"][:, :3], image_sizes=images["image_sizes"])
    with pytest.raises(ValueError, match="image_sizes must be positive"):
        ours(ids, pixel_values=images["pixel_values"], image_sizes=torch.tensor([[0, 30]]))
    with pytest.raises(ValueError, match=r"must be \[images, tiles, 3, 12, 12\] and image_sizes \[images, 2\]"):
        ours(ids, pixel_values=images["pixel_values"][0], image_sizes=images["image_sizes"])
    for sizes in ([[12, 25]], [], [[12]]):
        with pytest.raises(
            ValueError, match="image_grid_pinpoints must be heights and widths that are multiples of 12"
        ):
            dataclasses.replace(ours.config, image_grid_pinpoints=sizes)
