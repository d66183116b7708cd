"""LLaVA with CLIP's tower, against transformers: logits, gradients, decoding, names of tensors."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from liger_models.arch._llava.config import LlavaVisionConfig
from liger_models.convert.config_map import read_config
from liger_models.layers.kv_cache import DecodeCache

from .families import (
    LIMIT,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    error,
    load,
    make_folder,
    tiny,
)
from .image_checks import assert_one_graph, assert_policies_and_frozen_parts

CASES = [
    case
    for case in VISION_CASES
    if case[0] == "llava" and tiny("llava")[case[1]]["vision_config"]["model_type"] != "pixtral"
]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", CASES[:1], indirect=True, ids="-".join)
IMAGE = -1


def make(model, rows, seed=0):
    """input_ids, mask, labels and images of rows of word counts and images."""
    generator = torch.Generator().manual_seed(seed)
    image, vision = model.placeholder_id, model.config.vision_config
    ids = [
        [
            token
            for part in row
            for token in (
                [image] * model.visual.tokens
                if part == IMAGE
                else torch.randint(3, 80, (part,), generator=generator).tolist()
            )
        ]
        for row in rows
    ]
    T = max(map(len, ids))
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in ids])
    ids = torch.tensor([[0] * (T - len(row)) + row for row in ids])
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    labels = ids.masked_fill((ids == image) | (mask == 0) | first, -100)
    count, side = sum(row.count(IMAGE) for row in rows), vision.image_size
    pixels = torch.randn(count, 3, side, side, generator=generator)
    return ids, mask, labels, {"pixel_values": pixels} if count else {}


ROWS = [[3, IMAGE, 9, IMAGE, 4], [2, IMAGE, 12], [11]]


@every_case
def test_logits_loss_and_gradients(pair):
    """Rows with two images, one and none, padded on the left; blocks after the chosen one have no gradient."""
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
    assert all((p.grad is None) == ("unread" in name) for name, p in ours.named_parameters())


@one_case
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [[3, IMAGE, 5], [9], [IMAGE, 4, IMAGE, 2]]
    ids, _, labels, images = make(ours, [[part for row in rows for part in row]])
    bounds = torch.tensor([0, *(make(ours, [row])[0].shape[1] for row in rows)]).cumsum(0)
    got = ours(ids, labels=labels, cu_seqlens=bounds, return_logits=True, **images)
    got.loss.backward()
    assert_bounds_under_other_names(ours, bounds, got.logits, input_ids=ids, **images)
    logits, losses, targets, first = [], [], 0, 0
    for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
        last = first + row.count(IMAGE)
        own = {"pixel_values": images["pixel_values"][first:last]} if last > first else {}
        logits.append(theirs(ids[:, start:end], **own).logits)
        of_row = labels[:, start + 1 : end]
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], of_row[0], reduction="sum"))
        targets += int((of_row != -100).sum())
        first = last
    (sum(losses) / targets).backward()
    assert error(got.logits, torch.cat(logits, 1)) <= LIMIT
    assert_same_gradients(ours, theirs)


@every_case
def test_generate(pair, use_cache):
    _, _, theirs, ours = pair
    ids, mask, _, images = make(ours, ROWS)
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
    assert len(repeated["pixel_values"]) == 6
    ids, mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    torch.manual_seed(1)
    assert torch.equal(got, ours.generate(ids, attention_mask=mask, **options, **repeated))


@one_case
def test_pieces_with_a_cache_are_the_whole(pair):
    _, _, _, ours = pair
    ids, _, _, images = make(ours, [[3, IMAGE, 4, IMAGE, 5]])
    first, cache = 3 + 9 + 2, DecodeCache(ids.shape[1])
    with torch.no_grad():
        got = [
            ours(ids[:, :first], cache=cache, pixel_values=images["pixel_values"][:1]).logits,
            ours(ids[:, first:-1], cache=cache, pixel_values=images["pixel_values"][1:]).logits,
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


@pytest.mark.parametrize("case", CASES[:1], ids="-".join)
def test_all_spellings_of_names_are_read(case, root, tmp_path):
    """Names of files and modules, with and without ``vision_model``, are read; the hub's are written, bit for bit."""
    folder = make_folder(*case, root)
    stored = load_file(folder / "model.safetensors")
    plain = {name.replace("vision_tower.vision_model.", "vision_tower."): tensor for name, tensor in stored.items()}
    hub = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in plain.items()}
    modules = {
        "lm_head.weight"
        if "lm_head" in name
        else f"model.{name.replace('language_model.model.', 'language_model.')}": x
        for name, x in plain.items()
    }
    deep = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in modules.items()}
    assert len({frozenset(names) for names in (plain, hub, modules, deep)}) == 4
    for number, tensors in enumerate((plain, hub, modules, deep)):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "config.json").write_bytes((folder / "config.json").read_bytes())
        save_file(tensors, place / "model.safetensors")
        load(case[0], place).save_pretrained(place / "again")
        again = load_file(place / "again" / "model.safetensors")
        assert again.keys() == hub.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in hub.items())


@one_case
def test_wrong_numbers_are_named(pair):
    _, _, _, ours = pair
    ids, _, _, images = make(ours, [[3, IMAGE, 2]])
    pixels = images["pixel_values"]
    with pytest.raises(ValueError, match=r"each of the 9 image tokens \(1 images\), got 8"):
        ours(ids[:, torch.arange(ids.shape[1]) != 5], **images)
    with pytest.raises(ValueError, match="9 image placeholders in input_ids must have pixel_values, got none"):
        ours(ids)
    with pytest.raises(ValueError, match=r"must be \[images, 3, 12, 12\] without image_sizes, got \[1, 3, 8, 12\]"):
        ours(ids, pixel_values=pixels[:, :, :8])
    with pytest.raises(ValueError, match="and image_sizes"):
        ours(ids, image_sizes=torch.tensor([[12, 12]]), **images)
    config = ours.config
    for changes, message in (
        ({"vision_feature_layer": -5}, "vision_feature_layer must be one of the 3 blocks of the tower, got -5"),
        ({"text_type": "qwen2"}, "text_type must be"),
        (
            {"vision_config": LlavaVisionConfig(model_type="pixtral", hidden_act="gelu")},
            "must be 'full' with a pixtral",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **changes)
    base = tiny("llava")["clip"]
    for changes, message in (
        ({"vision_feature_layer": [-2, -1]}, r"vision_feature_layer must be one number, got \[-2, -1\]"),
        ({"text_config": {"model_type": "qwen2"}}, "text_config.model_type must be one of llama, mistral, got 'qwen2'"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config(type(config), {"model_type": "llava", **base, **changes})
