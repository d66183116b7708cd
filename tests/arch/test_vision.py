"""Vision-language models with images and videos, against transformers: positions, logits, loss, gradients, decoding."""

import copy
import dataclasses
import json
import shutil
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from liger_models import AutoLigerModel, KernelOptions, LigerLlama, LlamaConfig
from liger_models.arch import get_arch
from liger_models.cli.compare import where_it_differs
from liger_models.convert.config_map import read_config, write_config
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import CHECKPOINTING_POLICIES

from ..late import transformers
from .families import (
    LIMIT,
    VIDEO_CASES,
    VISION_CASES,
    assert_bounds_under_other_names,
    assert_same_gradients,
    auto_class,
    error,
    every_video_case,
    fp64_twin,
    gradients_of,
    is_tower,
    load,
    make_folder,
    one_mrope_case_each,
    one_video_case_each,
    one_video_case_of_each_kind,
    tiny,
)
from .image_checks import assert_one_graph

Grid = tuple[int, int, int]


class Batch:
    """Texts with images and videos in them.

    Args:
        model: says what placeholders and patches are like.
        rows: for each text what follows each other: a number of words, a grid of frames, rows and columns of image
            tokens as ("image", grid) or ("video", grid).
    """

    def __init__(self, model: Any, rows: list[list[Any]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        config, merge = model.config, model.visual.merge
        ids: list[list[int]] = []
        kinds: list[list[int]] = []
        start, end = (getattr(config, f"video_{edge}_token_id", None) for edge in ("start", "end"))
        grids: dict[str, list[Grid]] = {"image": [], "video": []}
        for row in rows:
            ids.append([])
            kinds.append([])
            for part in row:
                if isinstance(part, int):
                    ids[-1] += torch.randint(3, 80, (part,), generator=generator).tolist()
                    kinds[-1] += [0] * part
                    continue
                kind, (t, h, w) = part
                token = {"image": config.image_token_id, "video": config.video_token_id}[kind]
                around: list[list[int]] = [[], []]
                if kind == "video" and start is not None:  # frames have the placeholder of images
                    token, around = config.image_token_id, [[start], [end]]
                grids[kind].append((t, h * merge, w * merge))
                ids[-1] += around[0]
                kinds[-1] += [0] * len(around[0])
                for frame in range(t):
                    ids[-1] += [token] * (h * w)
                    kinds[-1] += [1 + (kind == "video")] * (h * w)
                    if model.frames_apart and frame < t - 1:
                        ids[-1] += [50 + frame]  # where the time of the next frame stands
                        kinds[-1] += [0]
                ids[-1] += around[1]
                kinds[-1] += [0] * len(around[1])
        T = max(map(len, ids))
        self.ids = torch.tensor([row + [0] * (T - len(row)) for row in ids])
        self.mask = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in ids])
        self.kinds = torch.tensor([row + [0] * (T - len(row)) for row in kinds], dtype=torch.int32)
        self.labels = self.ids.masked_fill((self.kinds > 0) | (self.mask == 0), -100)
        width = model.visual.patch_embed.in_features
        self.inputs: dict[str, Tensor] = {}
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if grids[kind]:
                grid = torch.tensor(grids[kind])
                self.inputs[pixels] = torch.randn(int(grid.prod(1).sum()), width, generator=generator)
                self.inputs[f"{kind}_grid_thw"] = grid

    def theirs(self, model: Any, **options: Any) -> Any:
        model.model.rope_deltas = None  # it remembers those of the last call
        return model(self.ids, mm_token_type_ids=self.kinds, **self.inputs, **options)

    def positions(self, model: Any, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        grids = {name: grid for name, grid in self.inputs.items() if name.endswith("grid_thw")}
        return model.model.get_rope_index(self.ids, mm_token_type_ids=self.kinds, attention_mask=mask, **grids)


ONE = [[3, ("image", (1, 2, 3)), 4]]
SEVERAL = [
    [2, ("image", (1, 3, 2)), 1, ("image", (1, 1, 1)), 5, ("image", (1, 4, 5)), 2],
    [9, ("image", (1, 5, 1)), 3],
    [11],
]
VIDEO = [[2, ("video", (3, 2, 3)), 4, ("image", (1, 2, 2)), 1, ("video", (2, 1, 2)), 3], [4, ("image", (1, 1, 3)), 2]]
LONG_VIDEO = [[2, ("video", (6, 1, 2)), 3]]
"""More frames than rows and columns: what follows has smaller positions than the last frames."""
BATCHES = {"one": ONE, "several": SEVERAL, "video": VIDEO, "long-video": LONG_VIDEO}
GLM_SEED = 2
"""Seed of GLM's videos: with seed 0, their fp32 gradients lose more digits than the limit on CPUs without AVX-512."""
every_batch = pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)


@every_video_case
@every_batch
def test_logits_loss_and_gradients(pair, rows):
    """Samples with and without images of different sizes in one padded batch."""
    arch, _, theirs, ours = pair
    batch = Batch(ours, rows, seed=GLM_SEED if (arch, rows) == ("glm4v", VIDEO) else 0)
    mask = {} if batch.mask.all() else {"attention_mask": batch.mask}
    want = batch.theirs(theirs, labels=batch.labels, **mask)
    want.loss.backward()
    kept = batch.mask.bool()
    inputs = {"input_ids": batch.ids, **batch.inputs, **mask}
    difference = error(ours(**inputs).logits[kept], want.logits[kept])
    assert difference <= LIMIT, where_it_differs(ours, theirs, {"mm_token_type_ids": batch.kinds}, **inputs)
    got = ours(batch.ids, labels=batch.labels, **batch.inputs, **mask)
    assert got.logits is None
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()

    def twin() -> Any:
        wide = copy.deepcopy(theirs).double()
        wide.set_experts_implementation("eager")  # the others have no fp64
        wide.zero_grad()
        batch.theirs(wide, labels=batch.labels, **mask).loss.backward()
        return wide

    assert_same_gradients(ours, theirs, twin=twin)
    assert any(is_tower(name) and gradient.any() for name, gradient in gradients_of(ours).items())


@pytest.mark.cases(24)
@one_mrope_case_each
@every_batch
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_positions(pair, rows, side):
    _, _, theirs, ours = pair
    batch = Batch(ours, rows)
    mask = None
    if side != "none":
        mask = batch.mask.clone()
        if side == "left":
            shifts = (batch.mask == 0).sum(1)
            for name in ("ids", "kinds"):
                rolled = [row.roll(int(shift)) for row, shift in zip(getattr(batch, name), shifts, strict=True)]
                setattr(batch, name, torch.stack(rolled))
            mask = mask.flip(1)
    grids = [batch.inputs.get(f"{kind}_grid_thw") for kind in ("image", "video")]
    want, _ = batch.positions(theirs, mask)
    assert torch.equal(ours.multimodal_positions(batch.ids, *grids, attention_mask=mask), want)


def test_positions_of_a_video_count_its_seconds(root):
    folder = make_folder("qwen2_5_vl", "gqa", root)
    from .families import hf_model

    theirs, ours = hf_model(folder), load("qwen2_5_vl", folder)
    batch = Batch(ours, VIDEO)
    seconds = torch.tensor([0.7, 1.5])
    want, _ = theirs.model.get_rope_index(
        batch.ids, mm_token_type_ids=batch.kinds, second_per_grid_ts=seconds,
        image_grid_thw=batch.inputs["image_grid_thw"], video_grid_thw=batch.inputs["video_grid_thw"],
    )  # fmt: skip
    grids = batch.inputs["image_grid_thw"], batch.inputs["video_grid_thw"]
    assert torch.equal(ours.multimodal_positions(batch.ids, *grids, second_per_grid_ts=seconds), want)
    assert not torch.equal(ours.multimodal_positions(batch.ids, *grids), want)
    out = batch.theirs(theirs, second_per_grid_ts=seconds, attention_mask=batch.mask)
    got = ours(batch.ids, second_per_grid_ts=seconds, attention_mask=batch.mask, **batch.inputs)
    kept = batch.mask.bool()
    assert error(got.logits[kept], out.logits[kept]) <= LIMIT


@one_video_case_each
def test_packed_documents_are_separate_documents(pair):
    """One packed row gives the logits, the loss and the gradients of each text alone."""
    _, _, theirs, ours = pair
    rows = [*SEVERAL, VIDEO[0]]
    packed = Batch(ours, [[part for row in rows for part in row]])
    lengths = [int(Batch(ours, [row]).mask.sum()) for row in rows]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    got = ours(packed.ids, labels=packed.labels, cu_seqlens=bounds, return_logits=True, **packed.inputs)
    got.loss.backward()
    assert_bounds_under_other_names(ours, bounds, got.logits, input_ids=packed.ids, **packed.inputs)

    logits, losses, targets = [], [], 0
    offsets = dict.fromkeys(packed.inputs, 0)
    for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
        alone = Batch(ours, [row])
        alone.ids, alone.kinds = packed.ids[:, start:end], packed.kinds[:, start:end]
        for name, tensor in alone.inputs.items():
            alone.inputs[name] = packed.inputs[name][offsets[name] : offsets[name] + len(tensor)]
            offsets[name] += len(tensor)
        out = alone.theirs(theirs)
        labels = packed.labels[:, start + 1 : end]
        logits.append(out.logits)
        losses.append(torch.nn.functional.cross_entropy(out.logits[0, :-1], labels[0], reduction="sum"))
        targets += int((labels != -100).sum())
    want = sum(losses) / targets
    want.backward()
    assert error(got.logits, torch.cat(logits, 1)) <= LIMIT
    assert error(got.loss, want) <= LIMIT
    assert_same_gradients(ours, theirs)


@every_video_case
@every_batch
def test_cached_decode(pair, rows):
    """The prompt, then single tokens, give transformers' logits of the whole."""
    _, _, theirs, ours = pair
    batch = Batch(ours, rows[:1])
    length = batch.ids.shape[1]
    new = torch.randint(3, 80, (1, 4), generator=torch.Generator().manual_seed(1))
    cache = DecodeCache(length + 4)
    with torch.no_grad():
        got = [ours(batch.ids, cache=cache, **batch.inputs).logits]
        got += [ours(token, cache=cache).logits for token in new.split(1, 1)]
        batch.ids, batch.kinds = torch.cat([batch.ids, new], 1), torch.nn.functional.pad(batch.kinds, (0, 4))
        want = batch.theirs(theirs).logits
    assert error(torch.cat(got, 1), want) <= LIMIT


@one_video_case_each
def test_images_in_later_pieces(pair):
    """A conversation in pieces, with images in several, gives the logits of the whole; rows can be chosen between."""
    _, _, _, ours = pair
    whole = Batch(ours, [[2, ("image", (1, 2, 3)), 4, ("image", (1, 3, 1)), 5]])
    cuts = [2 + 6 + 1, 3, 3 + 5]  # the second image begins in the third piece
    cache = DecodeCache(whole.ids.shape[1])
    grid = whole.inputs["image_grid_thw"]
    first = int(grid[0].prod())
    with torch.no_grad():
        want = ours(whole.ids, **whole.inputs).logits
        pieces = whole.ids.split(cuts, 1)
        inputs = [
            {"pixel_values": whole.inputs["pixel_values"][:first], "image_grid_thw": grid[:1]},
            {},
            {"pixel_values": whole.inputs["pixel_values"][first:], "image_grid_thw": grid[1:]},
        ]
        got = [ours(pieces[0], cache=cache, **inputs[0]).logits]
        cache.select(torch.tensor([0, 0]))
        for ids, given in zip(pieces[1:], inputs[1:], strict=True):
            both = {name: torch.cat([tensor, tensor]) for name, tensor in given.items()}
            got.append(ours(ids.expand(2, -1), cache=cache, **both).logits[1:])
    assert error(torch.cat(got, 1), want) <= LIMIT


@pytest.mark.parametrize("pair", [("glm4v", "gqa")], indirect=True, ids="-".join)
def test_a_video_without_its_end_does_not_reach_the_next_document(pair):
    """Truncation may cut off the end of a video, and what follows in a packed row is another document."""
    _, _, _, ours = pair
    cut = Batch(ours, VIDEO[:1])
    end = int((cut.ids[0] == ours.config.video_end_token_id).nonzero()[-1])
    image = Batch(ours, ONE)
    ids, kinds = (torch.cat([x[:, :end], y], 1) for x, y in ((cut.ids, image.ids), (cut.kinds, image.kinds)))
    bounds = torch.tensor([0, end, ids.shape[1]])
    places = ours.media_places(ids, bounds)
    assert torch.equal(places[0].int() + 2 * places[1].int(), kinds)
    assert not torch.equal(ours.media_places(ids)[0], places[0])
    inputs = {name: torch.cat([tensor, image.inputs.get(name, tensor[:0])]) for name, tensor in cut.inputs.items()}
    packed = ours(ids, cu_seqlens=bounds, **inputs).logits
    alone = [ours(cut.ids[:, :end], **cut.inputs).logits, ours(image.ids, **image.inputs).logits]
    assert error(packed, torch.cat(alone, 1)) <= LIMIT


@pytest.mark.parametrize(
    ("family", "text", "count"),
    [
        ("glm4v", {"rope_parameters": {"partial_rotary_factor": 0.5}}, 10_292_777_472),
        ("glm4v_moe", {"head_dim": 128, "vocab_size": 151552}, 107_744_743_936),
    ],
)
def test_the_sizes_of_glm4v(family, text, count):
    """The models are GLM-4.1V-9B-Thinking and GLM-4.5V. Only these of their sizes differ from the defaults."""
    model = AutoLigerModel.from_config({"model_type": family, "text_config": text}, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(size for name, size in sizes.items() if "correction" not in name) == count


def padded_left(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, kinds of tokens and mask."""
    shifts = (batch.mask == 0).sum(1)
    ids, kinds = (
        torch.stack([row.roll(int(shift)) for row, shift in zip(x, shifts, strict=True)])
        for x in (batch.ids, batch.kinds)
    )
    return ids, kinds, batch.mask.flip(1)


@pytest.mark.cases(18)
@one_video_case_each
@every_batch
def test_generate(pair, rows, use_cache):
    """Greedy continuations of prompts with images, padded on the left, are transformers'."""
    _, _, theirs, ours = pair
    batch = Batch(ours, rows)
    ids, kinds, mask = padded_left(batch)
    theirs.generation_config.eos_token_id = None
    kinds = {"mm_token_type_ids": kinds} if hasattr(theirs.model, "get_rope_index") else {}
    want = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=use_cache, **kinds,
        **batch.inputs,
    )  # fmt: skip
    got = ours.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=[],
        use_cache=use_cache, **batch.inputs,
    )  # fmt: skip
    assert torch.equal(got, want)


@pytest.mark.cases(13)
@one_video_case_each
def test_several_continuations_of_prompts_with_images(pair, use_cache):
    """The same as of repeated prompts and images."""
    _, _, _, ours = pair
    batch = Batch(ours, VIDEO)
    ids, _, mask = padded_left(batch)
    options = {"max_new_tokens": 4, "do_sample": True, "eos_token_id": [], "use_cache": use_cache}
    torch.manual_seed(1)
    got = ours.generate(ids, attention_mask=mask, num_return_sequences=2, **options, **batch.inputs)
    repeated = ours.repeat_prompts(ids, batch.inputs, 2)
    ids, mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    torch.manual_seed(1)
    assert torch.equal(got, ours.generate(ids, attention_mask=mask, **options, **repeated))
    assert not torch.equal(got[0], got[1])


@pytest.mark.cases(9)
@one_video_case_each
@pytest.mark.parametrize("several", [1, 2])
def test_drafts_of_prompts_with_images(pair, several):
    """A draft that sees the images, too, and one that does not."""
    _, _, _, ours = pair
    batch = Batch(ours, VIDEO)
    ids, _, mask = padded_left(batch)
    options = {"attention_mask": mask, "max_new_tokens": 6, "eos_token_id": [], **batch.inputs}
    options |= {"do_sample": True, "seed": 3, "num_return_sequences": several} if several > 1 else {}
    want = ours.generate(ids, **options)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    blind = LigerLlama.from_config(LlamaConfig(vocab_size=ours.config.vocab_size, **sizes))
    if any(hasattr(block, "linear_attn") for block in ours.layers):
        with pytest.raises(ValueError, match="recurrent states"):
            ours.generate(ids, draft_model=blind, **options)
        return
    for draft in (ours, blind):
        assert torch.equal(ours.generate(ids, draft_model=draft, **options), want)


@pytest.mark.cases(5)
@one_video_case_each
def test_checkpointing_policies_give_identical_gradients(pair):
    _, _, _, ours = pair
    batch = Batch(ours, VIDEO)
    gradients = []
    for language, vision in [(policy, None) for policy in CHECKPOINTING_POLICIES] + [
        ("none", "full"),
        ("full", "none"),
    ]:
        ours.zero_grad()
        ours.set_checkpointing(language, vision_policy=vision)
        ours(batch.ids, labels=batch.labels, attention_mask=batch.mask, **batch.inputs).loss.backward()
        gradients.append(gradients_of(ours))
    for other in gradients[1:]:
        assert all(torch.equal(gradient, other[name]) for name, gradient in gradients[0].items())
    with pytest.raises(ValueError, match=r"vision_policy must be one of .*, got 'some'"):
        ours.set_checkpointing("none", vision_policy="some")


@pytest.mark.cases(9)
@one_video_case_each
@pytest.mark.parametrize("part", ["tower", "language model"])
def test_a_frozen_part(pair, part):
    """The gradients of the other part are those of training both."""
    _, _, _, ours = pair
    batch = Batch(ours, VIDEO)
    run = lambda: ours(batch.ids, labels=batch.labels, attention_mask=batch.mask, **batch.inputs).loss.backward()
    run()
    every = gradients_of(ours)
    ours.zero_grad()
    for name, parameter in ours.named_parameters():
        if is_tower(name) == (part == "tower"):
            parameter.requires_grad_(False)
    run()
    left = gradients_of(ours)
    assert {is_tower(name) for name in left} == {part != "tower"}
    assert len(left) == sum(is_tower(name) == (part != "tower") for name in every)
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, every[name])


@one_video_case_each
def test_images_do_not_see_each_other(pair):
    """The tokens of an image are the same whatever other images are in the batch, and depend on all of the image."""
    _, _, _, ours = pair
    batch = Batch(ours, SEVERAL)
    pixels, grid = batch.inputs["pixel_values"], batch.inputs["image_grid_thw"]
    together = ours.visual(pixels, grid)[0]
    merged = grid.prod(1) // ours.visual.merge**2
    places = zip(pixels.split(grid.prod(1).tolist()), grid, together.split(merged.tolist()), strict=True)
    for own, one, tokens in places:
        assert error(ours.visual(own, one[None])[0], tokens) <= LIMIT
    changed = pixels.clone()
    changed[-1] += 1
    after = ours.visual(changed, grid)[0]
    last = int(merged[-1])
    assert torch.equal(after[:-last], together[:-last])
    assert not torch.isclose(after[-last:], together[-last:]).all(1).any()


@one_video_case_each
def test_a_batch_of_transformers_processors_is_taken(pair):
    _, _, _, ours = pair
    batch = Batch(ours, ONE)
    want = ours(batch.ids, **batch.inputs).logits
    assert torch.equal(ours(batch.ids, mm_token_type_ids=batch.kinds, **batch.inputs).logits, want)


@pytest.mark.cases(1)
@pytest.mark.compile
@one_video_case_of_each_kind
def test_compiled_in_one_graph(pair, fresh_dynamo):
    """Also with images of other sizes than those of the first call."""
    arch, _, _, ours = pair
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    for rows in (SEVERAL, VIDEO) if arch in ("qwen2_5_vl", "qwen3_vl") else (SEVERAL,):  # each tower once
        batch = Batch(ours, rows)
        assert_one_graph(ours, compiled, batch.ids, labels=batch.labels, attention_mask=batch.mask, **batch.inputs)


@pytest.mark.cases(5)
@one_video_case_each
def test_half_precision(pair):
    """fp32 pixels into a model in bf16."""
    _, _, _, ours = pair
    batch = Batch(ours, ONE)
    want = ours(batch.ids, **batch.inputs).logits
    got = ours.bfloat16()(batch.ids, **batch.inputs).logits
    assert got.dtype == torch.bfloat16
    assert error(got, want) <= 0.1


@pytest.mark.cases(5)
@one_video_case_each
def test_wrong_numbers_are_named(pair):
    _, _, _, ours = pair
    batch = Batch(ours, ONE)
    pixels, grid = batch.inputs["pixel_values"], batch.inputs["image_grid_thw"]
    rows = len(pixels)
    with pytest.raises(ValueError, match="one image placeholder for each of the 6 image tokens, got 5"):
        ours(batch.ids[:, torch.arange(batch.ids.shape[1]) != 3], **batch.inputs)
    with pytest.raises(ValueError, match="6 image placeholders in input_ids must have pixel_values, got none"):
        ours(batch.ids)
    with pytest.raises(ValueError, match=f"hold the {rows} patches that image_grid_thw describes, got {rows - 1}"):
        ours(batch.ids, pixel_values=pixels[:-1], image_grid_thw=grid)
    with pytest.raises(ValueError, match="pixel_values and image_grid_thw must be given together"):
        ours(batch.ids, pixel_values=pixels)
    with pytest.raises(ValueError, match=r"pixel_values must be \[patches, values\] and image_grid_thw \[items, 3\]"):
        ours(batch.ids, pixel_values=pixels, image_grid_thw=grid[0])
    with pytest.raises(ValueError, match=rf"pixel_values must be \[patches, {pixels.shape[1]}\], got \[{rows}, 5\]"):
        ours(batch.ids, pixel_values=pixels[:, :5], image_grid_thw=grid)
    with pytest.raises(ValueError, match="image_grid_thw must be a tensor, got list"):
        ours(batch.ids, pixel_values=pixels, image_grid_thw=grid.tolist())
    with pytest.raises(ValueError, match="attention_mask must be a tensor, got list"):
        ours(batch.ids, attention_mask=[[1] * 13], **batch.inputs)
    for wrong in ([[1, 3, 8]], [[1, 8, 3]], [[1, 1, 24]], [[1, -4, -6]], [[1, 4, 6], [0, 4, 6]]):  # as many patches
        with pytest.raises(ValueError, match=r"image_grid_thw must have .* multiples of 2, got \[\[\d, -?\d"):
            ours(batch.ids, pixel_values=pixels, image_grid_thw=torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"attention_mask must be \[1, 13\] .*, got \[1, 3\]"):
        ours(batch.ids, attention_mask=torch.ones(1, 3), **batch.inputs)
    swapped = Batch(ours, [[2, ("image", (1, 2, 3)), 4], [2, ("video", (2, 1, 2)), ("image", (1, 1, 2)), 3]])
    swapped.inputs["image_grid_thw"] = swapped.inputs["image_grid_thw"].flip(0)
    message = r"of each image must be contiguous in input_ids and in one document, got 1 apart .* order"
    with pytest.raises(ValueError, match=message):
        ours(swapped.ids, **swapped.inputs)
    start = int((batch.ids[0] == ours.config.image_token_id).nonzero()[0])
    for cut, apart in ((start, False), (start + 3, True), (start + 6, False)):
        bounds = torch.tensor([0, cut, batch.ids.shape[1]])
        with pytest.raises(ValueError, match=r"in one document, got 1 apart") if apart else nullcontext():
            ours(batch.ids, cu_seqlens=bounds, **batch.inputs)
    with pytest.raises(ValueError, match="video placeholders in input_ids must have pixel_values_videos"):
        ours(torch.full((1, 3), ours.config.video_token_id))
    with pytest.raises(ValueError, match="pixels need input_ids"):
        ours(inputs_embeds=ours.embed_tokens(batch.ids), **batch.inputs)
    with pytest.raises(TypeError, match=r"'images'\. It takes .*image_grid_thw"):
        ours.generate(batch.ids, max_new_tokens=1, images=pixels)
    if not hasattr(ours.config.vision_config, "tokens_per_second"):
        with pytest.raises(ValueError, match="second_per_grid_ts must not be given"):
            ours(batch.ids, second_per_grid_ts=[1.0], **batch.inputs)
        return
    video = Batch(ours, LONG_VIDEO)
    for seconds in ([], [1.0, 2.0]):
        with pytest.raises(ValueError, match=rf"for each of the 1 videos, got \[{len(seconds)}\]"):
            ours(video.ids, second_per_grid_ts=seconds, **video.inputs)


@one_video_case_each
def test_pixels_of_no_image_are_none(pair):
    """What a collator makes of a batch of texts."""
    _, _, _, ours = pair
    batch = Batch(ours, ONE)
    nothing = {name: tensor[:0] for name, tensor in batch.inputs.items()}
    text = batch.ids[:, -4:]
    assert torch.equal(ours(text, **nothing).logits, ours(text).logits)
    assert torch.equal(ours.generate(text, max_new_tokens=2, **nothing), ours.generate(text, max_new_tokens=2))
    with pytest.raises(ValueError, match="6 image placeholders in input_ids must have pixel_values, got none"):
        ours(batch.ids, **nothing)


@one_mrope_case_each
def test_configurations_that_do_not_fit_are_refused(pair):
    _, _, _, ours = pair
    config = ours.config
    width = "hidden_size" if not hasattr(config.vision_config, "out_hidden_size") else "out_hidden_size"
    with pytest.raises(ValueError, match=rf"vision_config\.{width} \(65\) must be"):
        dataclasses.replace(config, vision_config=dataclasses.replace(config.vision_config, **{width: 65}))
    with pytest.raises(ValueError, match="must be a multiple of 4 · num_heads"):
        dataclasses.replace(config.vision_config, num_heads=3)
    with pytest.raises(ValueError, match="hidden_act must be"):
        dataclasses.replace(config.vision_config, hidden_act="relu")
    sections = [1, 1] if type(ours).interleaved else [1, 1, 1]  # interleaved ones need not add up
    with pytest.raises(ValueError, match=r"mrope_section must be three numbers that add up to"):
        type(ours)(dataclasses.replace(config, mrope_section=sections))


@one_video_case_of_each_kind
def test_kernels_match_transformers(pair, kernel_device, root):
    arch, variant, theirs, ours = pair
    batch = Batch(ours, [[2, ("image", (1, 1, 2)), 1, ("image", (1, 2, 2)), 2]])
    want = batch.theirs(theirs, labels=batch.labels)
    want.loss.backward()
    inputs = {name: tensor.to(kernel_device) for name, tensor in batch.inputs.items()}
    off = KernelOptions(rms_norm=False, layer_norm=False, rope=False, swiglu=False, fused_linear_cross_entropy=False)
    cases = [(None, "full"), (None, "none"), (off, "none")]
    if kernel_device == "cpu" and arch != "qwen2_5_vl":  # the interpreter is slow: "full" has the same ops, and more
        del cases[1:]
    for kernels, policy in cases:
        ours = load(arch, make_folder(arch, variant, root), kernels=kernels, device=kernel_device)
        ours.set_checkpointing(policy)
        got = ours(batch.ids.to(kernel_device), labels=batch.labels.to(kernel_device), **inputs)
        assert error(got.loss, want.loss) <= LIMIT
        got.loss.backward()
        assert_same_gradients(ours, theirs)


@pytest.mark.gpu
@one_video_case_each
@pytest.mark.parametrize("rows", [SEVERAL, VIDEO, [[2, ("image", (1, 20, 30)), 3, ("image", (1, 9, 11)), 40]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_gpu(pair, root, rows, dtype):
    """flex_attention over images there, a dense mask on the CPU."""
    arch, variant, theirs, _ = pair
    ours = load(arch, make_folder(arch, variant, root), dtype=dtype, device="cuda")
    batch = Batch(ours, rows)
    options = {} if batch.mask.all() else {"attention_mask": batch.mask}
    want = batch.theirs(theirs, labels=batch.labels, **options)
    want.loss.backward()
    on_gpu = {name: tensor.cuda() for name, tensor in (batch.inputs | options).items()}
    got = ours(batch.ids.cuda(), labels=batch.labels.cuda(), **on_gpu)
    got.loss.backward()
    assert error(got.loss, want.loss) <= (LIMIT if dtype == torch.float32 else 0.02)
    if dtype == torch.float32:
        twin = partial(fp64_twin, ours, input_ids=batch.ids, labels=batch.labels, **batch.inputs, **options)
        assert_same_gradients(ours, theirs, twin=twin)


@pytest.mark.cases(10)
@pytest.mark.parametrize("arch", sorted({arch for arch, _ in VISION_CASES}))
def test_keys_of_the_language_model_count_in_its_own_configuration_only(arch):
    """Transformers ignores them at the top level, where other tools put some."""
    hf = transformers.AutoConfig.for_model(arch, **next(iter(tiny(arch).values()))).to_dict()
    rope = {"rope_type": "default", "rope_theta": 77.0}
    strange = {
        "rms_norm_eps": 0.5, "sliding_window": 3, "final_logit_softcapping": 2.0, "use_bidirectional_attention": None,
        "hidden_size": 8, "num_hidden_layers": 1, "rope_parameters": rope, "max_position_embeddings": 5,
        "norm_eps": 0.5,
    }  # fmt: skip
    strange = {key: value for key, value in strange.items() if key in hf["text_config"]}
    assert len(strange) >= 5
    sizes = ("hidden_size", "num_hidden_layers")
    bare = {key: value for key, value in hf["text_config"].items() if key in sizes or key not in strange}
    config_class = get_arch(arch).config_class
    for text in (hf["text_config"], bare):  # without a key in text_config its default counts
        nested = hf | {"text_config": text}
        theirs, same = (transformers.AutoConfig.for_model(**copy.deepcopy(each)) for each in (nested, nested | strange))
        assert same.get_text_config().to_dict() == theirs.get_text_config().to_dict()
        assert read_config(config_class, nested | strange) == read_config(config_class, nested)


@pytest.mark.cases(18)
@pytest.mark.parametrize("arch", sorted({arch for arch, _ in VISION_CASES} - {"mllama"}))
@pytest.mark.parametrize("top", [None, False, True])
@pytest.mark.parametrize("text", [None, False, True])
def test_which_tie_word_embeddings_counts(arch, top, text):
    hf = json.loads(json.dumps(transformers.AutoConfig.for_model(arch, **next(iter(tiny(arch).values()))).to_dict()))
    for part, tied in ((hf, top), (hf["text_config"], text)):
        part.pop("tie_word_embeddings", None)
        part |= {} if tied is None else {"tie_word_embeddings": tied}
    with torch.device("meta"):
        theirs = auto_class(arch).from_config(transformers.AutoConfig.for_model(**copy.deepcopy(hf)))
    theirs.tie_weights()
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    if arch == "mistral3" and top is None:  # released files have a head of their own, and no key
        tied = bool(text)
    assert read_config(get_arch(arch).config_class, hf).tie_word_embeddings == tied


@pytest.mark.parametrize("arch", sorted({arch for arch, _ in VIDEO_CASES}))
def test_the_default_rotation_of_a_tower_is_the_axial_one(arch):
    """Transformers replaces the name of the type."""
    hf = transformers.AutoConfig.for_model(arch, **next(iter(tiny(arch).values()))).to_dict()
    hf["vision_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 77.0}
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(hf)).vision_config.rope_parameters
    assert theirs == {"rope_type": "axial", "rope_theta": 77.0}
    assert read_config(get_arch(arch).config_class, hf).vision_config.rope_theta == 77.0


def test_a_head_that_is_not_the_embedding_is_refused_with_both_places_of_the_key(root, tmp_path):
    folder = shutil.copytree(make_folder("qwen2_vl", "tied", root), tmp_path / "stored")
    tensors = load_file(folder / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="to false, at the top level and in text_config, to load both"):
        load("qwen2_vl", folder)


@pytest.mark.parametrize("arch", sorted({arch for arch, _ in VISION_CASES}))
def test_a_changed_configuration_is_written_over_the_file_that_it_was_read_from(arch):
    """Also what transformers writes into text_config: rope parameters, and values that are unset again."""
    hf = transformers.AutoConfig.for_model(arch, **next(iter(tiny(arch).values()))).to_dict()
    config_class = get_arch(arch).config_class
    config = read_config(config_class, json.loads(json.dumps(hf)))
    changed = dataclasses.replace(config, rope_theta=77.0, pad_token_id=None)
    if arch in {each for each, _ in VIDEO_CASES}:  # the default of the tower's base is not written
        hf["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 77.0}
    if hasattr(config, "layer_types") and arch != "gemma4":  # whose number of layers with shared keys follows from them
        changed = dataclasses.replace(changed, layer_types=None)
    written = json.loads(json.dumps(write_config(changed, hf, torch.float32)))
    assert read_config(config_class, written) == changed
    rope = transformers.AutoConfig.for_model(**written).get_text_config().rope_parameters
    assert rope.get("full_attention", rope)["rope_theta"] == 77.0


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 16}])
def test_the_original_length_without_a_text_config_is_in_the_rope_parameters(arch, inside):
    sizes = next(iter(tiny(arch).values()))
    rope = {"type": "yarn", "factor": 4.0, "mrope_section": [2, 3, 3], **inside}
    text = {key: value for key, value in sizes["text_config"].items() if key != "rope_parameters"}
    hf = {**sizes, **text, "rope_scaling": rope, "original_max_position_embeddings": 8, "model_type": arch}
    del hf["text_config"]
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(hf)).get_text_config().rope_parameters
    ours = read_config(get_arch(arch).config_class, hf).rope_scaling
    assert theirs["original_max_position_embeddings"] == ours.original_max_position_embeddings == (16 if inside else 64)
