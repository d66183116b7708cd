"""Gemma 4 with images, against transformers: logits, loss, gradients, decoding; clipping; tensors for audio."""

import dataclasses
import json
import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from liger_models.layers.kv_cache import DecodeCache

from ..late import transformers
from .families import (
    LIMIT,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    error,
    fp64_twin,
    gradients_of,
    hf_model,
    is_tower,
    load,
    make_folder,
    tiny,
)
from .image_checks import assert_kernels_match, assert_one_graph, assert_policies_and_frozen_parts

CASES = [case for case in VISION_CASES if case[0] in ("gemma4", "gemma4_unified")]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", CASES[:1], indirect=True, ids="-".join)
clipped = pytest.mark.parametrize("pair", [("gemma4", "clipped")], indirect=True, ids="-".join)
MOST = 9
"""Number of tokens that an image is padded to."""


def make(model, rows, seed=0):
    """input_ids, mask, labels, and what transformers needs besides, of rows of word counts and images (rows, columns).

    Rows are padded on the left.
    """
    generator = torch.Generator().manual_seed(seed)
    config, pool = model.config, model.config.vision_config.pooled
    ids, positions = [], []
    for row in rows:
        ids.append([])
        for part in row:
            if isinstance(part, int):
                ids[-1] += torch.randint(3, 80, (part,), generator=generator).tolist()
                continue
            ids[-1] += [config.boi_token_id, *[config.image_token_id] * math.prod(part), config.eoi_token_id]
            places = torch.cartesian_prod(*(torch.arange(count * pool) for count in part)).flip(1)
            positions.append(torch.nn.functional.pad(places, (0, 0, 0, MOST * pool**2 - len(places)), value=-1))
    T = max(map(len, ids))
    mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in ids])
    ids = torch.tensor([[0] * (T - len(row)) + row for row in ids])
    types = (ids == config.image_token_id).long()
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    labels = ids.masked_fill((types == 1) | (mask == 0) | first, -100)
    images = {}
    if positions:
        places = torch.stack(positions)
        pixels = torch.rand(*places.shape[:2], config.vision_config.patch_values, generator=generator)
        images = {"pixel_values": pixels * (places >= 0).all(-1, keepdim=True), "image_position_ids": places}
    return ids, mask, labels, images, {"mm_token_type_ids": types}


ROWS = [[3, (3, 3), 9, (2, 3), 4], [2, (4, 1), 12], [11]]


@every_case
def test_logits_loss_and_gradients(pair):
    """Images of several shapes, with runs of image tokens longer than the window; a row without."""
    _, _, theirs, ours = pair
    ids, mask, labels, images, types = make(ours, ROWS)
    want = theirs(ids, attention_mask=mask, labels=labels, **images, **types)
    want.loss.backward()
    kept = mask.bool()
    assert error(ours(ids, attention_mask=mask, **images).logits[kept], want.logits[kept]) <= LIMIT
    got = ours(ids, attention_mask=mask, labels=labels, **images, **types)
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)
    assert any(is_tower(name) and gradient.any() for name, gradient in gradients_of(ours).items())


@pytest.mark.parametrize("pair", [("gemma4", "experts")], indirect=True, ids="-".join)
def test_token_types_show_where_images_are_in_embeddings(pair):
    _, _, theirs, ours = pair
    *_, types = make(ours, ROWS[:1])
    embeds = torch.randn(*types["mm_token_type_ids"].shape, ours.config.hidden_size)
    with torch.no_grad():
        want = theirs(inputs_embeds=embeds, **types).logits
        assert error(ours(inputs_embeds=embeds, **types).logits, want) <= LIMIT


def changed(root, tmp_path, variant, value):
    """A checkpoint with other values of the tower's constants: their names -> tensors by ``value(name, tensor)``."""
    folder = make_folder("gemma4", variant, root)
    tensors = load_file(folder / "model.safetensors")
    ends = ("input_min", "input_max", "output_min", "output_max", "std_bias", "std_scale")
    constants = {name: value(name, tensor) for name, tensor in tensors.items() if name.endswith(ends)}
    assert constants
    (tmp_path / "changed").mkdir()
    for file in folder.iterdir():
        (tmp_path / "changed" / file.name).write_bytes(file.read_bytes())
    save_file({**tensors, **constants}, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    return tmp_path / "changed", constants


@pytest.mark.parametrize("variant", ["shared", "clipped"])
def test_constants_of_the_tower(root, tmp_path, variant):
    """Bounds of linear layers, and what standardizes image tokens, differ from layer to layer."""
    generator = torch.Generator().manual_seed(0)

    def value(name, tensor):
        some = torch.rand(tensor.shape, generator=generator) + 0.5
        return -some if name.endswith("_min") else some

    folder, constants = changed(root, tmp_path, variant, value)
    theirs, ours = hf_model(folder), load("gemma4", folder)
    ids, mask, labels, images, types = make(ours, ROWS)
    plain = load("gemma4", make_folder("gemma4", variant, root))(ids, attention_mask=mask, labels=labels, **images)
    want = theirs(ids, attention_mask=mask, labels=labels, **images, **types)
    got = ours(ids, attention_mask=mask, labels=labels, **images)
    assert error(got.loss, want.loss) <= LIMIT
    assert error(got.loss, plain.loss) > 10 * LIMIT
    want.loss.backward()
    got.loss.backward()
    assert_same_gradients(ours, theirs)
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in frozen if is_tower(name)} in ({"least", "most"}, {"bias", "scale"})
    ours.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in constants.items())


@one_case
def test_packed_documents_are_separate_documents(pair):
    _, _, theirs, ours = pair
    rows = [[3, (2, 3), 5], [9], [(3, 3), 4, (1, 2), 2]]
    alone = [make(ours, [row], seed) for seed, row in enumerate(rows)]
    bounds = torch.tensor([0, *(each[0].shape[1] for each in alone)]).cumsum(0)
    ids, labels = (torch.cat([each[i] for each in alone], 1) for i in (0, 2))
    names = ("pixel_values", "image_position_ids")
    images = {name: torch.cat([each[3][name] for each in alone if each[3]]) for name in names}
    got = ours(ids, labels=labels, cu_seqlens=bounds, return_logits=True, **images)
    got.loss.backward()
    assert_bounds_under_other_names(ours, bounds, got.logits, input_ids=ids, **images)
    logits, losses, targets = [], [], 0
    for own, _, own_labels, own_images, types in alone:
        logits.append(theirs(own, **own_images, **types).logits)
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], own_labels[0, 1:], reduction="sum"))
        targets += int((own_labels[:, 1:] != -100).sum())
    (sum(losses) / targets).backward()
    assert error(got.logits, torch.cat(logits, 1)) <= LIMIT
    assert_same_gradients(ours, theirs)


@pytest.mark.cases(9)
@every_case
def test_generate(pair, use_cache):
    _, _, theirs, ours = pair
    ids, mask, _, images, types = make(ours, ROWS, seed=1)  # of which no variant generates placeholders
    theirs.generation_config.eos_token_id = None
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **images}
    want = theirs.generate(ids, use_cache=True, **types, **options)
    got = ours.generate(ids, use_cache=use_cache, eos_token_id=[], **options)
    assert torch.equal(got, want)
    beams = ours.repeat_prompts(ids, images, 2)
    assert [len(beams[name]) for name in images] == [6, 6]
    assert torch.equal(beams["pixel_values"][2:4], images["pixel_values"][:2])


@one_case
def test_pieces_with_a_cache_are_the_whole(pair):
    """The last token is a placeholder of audio, as it may be generated."""
    _, _, theirs, ours = pair
    ids, _, _, images, types = make(ours, [[3, (3, 3), 4, (2, 2), 5]])
    ids[:, -1] = ours.config.audio_token_id
    first, cache = 3 + 11 + 2, DecodeCache(ids.shape[1])
    one, two = ({name: x[part] for name, x in images.items()} for part in (slice(0, 1), slice(1, 2)))
    with torch.no_grad():
        got = [
            ours(ids[:, :first], cache=cache, **one).logits,
            ours(ids[:, first:-2], cache=cache, **two).logits,
            ours(ids[:, -2:-1], cache=cache).logits,
            ours(ids[:, -1:], cache=cache).logits,
        ]
        assert error(torch.cat(got, 1), theirs(ids, **images, **types).logits) <= LIMIT


@every_case
def test_images_do_not_depend_on_each_other_nor_on_padding(pair):
    _, _, _, ours = pair
    _, _, _, images, _ = make(ours, ROWS)
    together = ours.visual(*images.values())
    counts = [9, 6, 4]
    for pixels, places, tokens in zip(*images.values(), together[:19].split(counts), strict=True):
        patches = len(tokens) * ours.config.vision_config.pooled**2
        assert error(ours.visual(pixels[None, :patches], places[None, :patches]), tokens) <= LIMIT


@one_case
def test_frozen_parts_and_checkpointing(pair):
    _, _, _, ours = pair
    ids, mask, labels, images, _ = make(ours, ROWS)
    assert_policies_and_frozen_parts(ours, ids, labels=labels, attention_mask=mask, **images)


@pytest.mark.compile
@pytest.mark.matrix  # tests/arch/test_vision.py compiles another family with images
@pytest.mark.parametrize("pair", CASES[:2], indirect=True, ids="-".join)
def test_compiled_in_one_graph(pair, fresh_dynamo):
    _, _, _, ours = pair
    ids, mask, labels, images, _ = make(ours, ROWS)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert_one_graph(ours, compiled, ids, labels=labels, attention_mask=mask, **images)


@one_case
def test_kernels_match_transformers(pair, kernel_device, root):
    _, _, theirs, ours = pair
    ids, _, labels, images, types = make(ours, [[2, (2, 3), 3]])
    want = theirs(ids, labels=labels, **images, **types)
    want.loss.backward()
    assert_kernels_match(pair, want.loss, kernel_device, root, input_ids=ids, labels=labels, **images)


@pytest.mark.gpu
@every_case
def test_on_gpu(pair):
    """flex_attention over more than one block there."""
    _, _, theirs, ours = pair
    ids, mask, labels, images, types = make(ours, [[100, (3, 3), 90, (2, 4), 4], [120, (1, 5), 12], [50]])
    want = theirs(ids, attention_mask=mask, labels=labels, **images, **types)
    want.loss.backward()
    ours.cuda()
    on_device = {name: x.cuda() for name, x in images.items()}
    got = ours(ids.cuda(), labels=labels.cuda(), attention_mask=mask.cuda(), **on_device)
    got.loss.backward()
    assert error(got.loss, want.loss) <= LIMIT
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask, **images}
    assert_same_gradients(ours, theirs, twin=partial(fp64_twin, ours, **inputs))


def test_tensors_of_the_audio_tower_are_saved_again(root, tmp_path):
    """They belong to no parameter; so does their part of config.json."""
    folder = make_folder("gemma4", "shared", root)
    tensors = load_file(folder / "model.safetensors")
    audio = {
        "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.linear.weight": torch.randn(4, 3).bfloat16(),
        "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.input_max": torch.tensor(2.5),
        "model.embed_audio.embedding_projection.weight": torch.randn(64, 4),
    }
    (tmp_path / "with").mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"audio_config": {"hidden_size": 4}}
    (tmp_path / "with" / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **audio}, tmp_path / "with" / "model.safetensors")
    load("gemma4", tmp_path / "with").save_pretrained(tmp_path / "again")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == tensors.keys() | audio.keys()
    for name, tensor in {**tensors, **audio}.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert json.loads((tmp_path / "again" / "config.json").read_text())["audio_config"] == {"hidden_size": 4}


@pytest.mark.parametrize("arch", ["gemma4", "gemma4_unified"])
def test_a_checkpoint_without_a_tower(arch, tmp_path):
    """The error says what to do, and that works."""
    sizes = next(iter(tiny(arch).values())) | {"vision_config": None}
    theirs = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(arch, **sizes), dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vision_config must be given, got none"):
        load(arch, tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(3, 80, (2, 9))
    with torch.no_grad():
        assert error(load(keys["model_type"], tmp_path)(ids).logits, theirs(ids).logits) <= LIMIT


@one_case
def test_wrong_inputs_are_named(pair):
    _, _, _, ours = pair
    ids, _, _, images, _ = make(ours, [[3, (3, 3), 2]])
    pixels, places = images.values()

    def raises(message, *args, **options):
        with pytest.raises(ValueError, match=message):
            ours(*args, **options)

    raises(r"each of the 9 image tokens \(1 images\), got 8", ids[:, torch.arange(ids.shape[1]) != 5], **images)
    raises("9 image placeholders in input_ids must have pixel_values, got none", ids)
    raises("pixel_values must be a tensor, got ndarray", ids, pixel_values=pixels.numpy(), image_position_ids=places)
    raises("must be given together", ids, pixel_values=pixels)
    with pytest.raises(TypeError, match=r"image_position_ids must be int64 or int32, got torch\.float32"):
        ours(ids, pixel_values=pixels, image_position_ids=places.float())
    torn = torch.cat([ids[:, :6], torch.tensor([[9]]), ids[:, 6:]], 1)
    raises("the placeholders of each image must be contiguous .*, got 1 apart", torn, **images)
    raises("in one document, got 1 apart", ids, cu_seqlens=torch.tensor([0, 6, ids.shape[1]]), **images)
    raises(r"must be \[images, a multiple of 4, 12\], got \[1, 35, 12\]", ids, pixel_values=pixels[:, :35],
           image_position_ids=places[:, :35])  # fmt: skip
    raises(r"image_position_ids must be \[1, 36, 2\]", ids, pixel_values=pixels, image_position_ids=places[:, :32])
    for wrong in (places * 5, places.flip(1) - 1, places.masked_fill(places.sum(-1, keepdim=True) == 10, -1)):
        raises("image_position_ids must have column and row", ids, pixel_values=pixels, image_position_ids=wrong)
    raises("pixels need input_ids", inputs_embeds=ours.embed_tokens(ids), **images)
    raises("input_features must be left out, got some. The model takes texts and images, and no audio", ids,
           input_features=torch.zeros(1, 8, 4))  # fmt: skip
    raises("pixel_values_videos must be left out", ids, pixel_values_videos=pixels)
    sound = torch.where(ids == 90, 94, ids)
    raises("input_ids must have no placeholders of audio or videos, got 9", sound)
    with pytest.raises(ValueError, match="no audio"):
        ours.generate(ids, input_features=torch.zeros(1, 8, 4), max_new_tokens=1, **images)
    for changes, message in (
        ({"hidden_activation": "relu"}, "hidden_activation must be"),
        ({"head_dim": 6}, "head_dim must be a multiple of 4"),
        ({"num_key_value_heads": 1}, "must be num_attention_heads"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(ours.config.vision_config, **changes)
