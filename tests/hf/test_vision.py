"""Vision-language models with images and videos, beside transformers: forward, gradients, generation."""

import copy
from typing import Any

import pytest
import torch

from liger_models.base.vision_language import placeholder_ids
from liger_models.hf.auto import model_class

from ..arch import (
    test_gemma3,
    test_gemma4_images,
    test_image_sizes,
    test_lfm2_vl,
    test_llama4,
    test_llava,
    test_llava_next,
    test_mllama,
    test_tiles,
)
from ..arch.families import LIMIT, assert_same_gradients, error, hf_model, make_folder
from ..arch.test_vision import GLM_SEED, ONE, SEVERAL, VIDEO, Batch

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
CASES = [
    (family, rows)
    for family in (
        ("qwen2_vl", "gqa"),
        ("qwen2_5_vl", "gqa"),
        ("qwen3_vl", "gqa"),
        ("qwen3_vl_moe", "gqa"),
        ("glm4v", "gqa"),
        ("glm4v_moe", "biased"),
        ("muse_glimmer", "windows"),
    )
    for rows in ("images", "videos")
] + [
    (("gemma3", "tied"), "images"),
    (("paligemma", "gemma2"), "images"),
    (("gemma4", "shared"), "images"),
    (("llama4", "chunks"), "images"),
    (("mllama", "four"), "images"),
    (("mistral3", "untied"), "images"),
    (("llava", "clip"), "images"),
    (("llava_next", "tiles"), "images"),
    (("lfm2_vl", "tied"), "images"),
]
CASES += [(case, "images") for case in test_tiles.FIRST]


def batch_of(ours: Any, family: str, rows: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """input_ids and mask with padding on the left, labels, and the other inputs."""
    decoder, count = ours.model.decoder, 1 if rows == "one" else None
    if family in test_gemma3.FAMILIES:
        ids, types, mask, labels, pixels = test_gemma3.make(decoder, test_gemma3.ROWS[:count])
        return ids, mask, labels, {"pixel_values": pixels, "token_type_ids": types}
    if family == "gemma4":
        ids, mask, labels, images, types = test_gemma4_images.make(decoder, test_gemma4_images.ROWS[:count])
        return ids, mask, labels, images | types
    if family == "llama4":
        ids, mask, labels, pixels = test_llama4.make(decoder, test_llama4.ROWS[:count])
        return ids, mask, labels, {"pixel_values": pixels}
    if family == "llava_next":
        return test_llava_next.make(decoder, test_llava_next.ROWS[:count])
    if family == "llava":
        return test_llava.make(decoder, test_llava.ROWS[:count])
    if family == "mistral3":
        return test_image_sizes.make(decoder, test_image_sizes.ROWS[:count])
    if family == "lfm2_vl":
        return test_lfm2_vl.make(decoder, test_lfm2_vl.ROWS[:count])
    if family == "mllama":
        ids, labels, inputs = test_mllama.make(decoder, test_mllama.ROWS[0])
        return ids, torch.ones_like(ids), labels, inputs
    if family in test_tiles.FAMILIES:
        ids, mask, labels, pixels = test_tiles.make(decoder, test_tiles.ROWS[:count])
        return ids, mask, labels, test_tiles.for_rows(decoder, test_tiles.ROWS[:count], pixels)
    seed = GLM_SEED if (family, rows) == ("glm4v_moe", "videos") else 0
    batch = Batch(decoder, {"images": SEVERAL, "videos": VIDEO, "one": ONE}[rows], seed)
    shifts = (batch.mask == 0).sum(1)

    def to_the_right(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.roll(int(shift)) for row, shift in zip(x, shifts, strict=True)])

    labels = to_the_right(batch.labels)
    labels[torch.arange(len(labels)), shifts] = -100  # nothing to predict the first one from
    types = {} if family == "muse_glimmer" else {"mm_token_type_ids": to_the_right(batch.kinds)}
    return to_the_right(batch.ids), batch.mask.flip(1), labels, batch.inputs | types


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("hf", "rows"), CASES, indirect=["hf"], ids=lambda part: part if isinstance(part, str) else part[0]
)
def test_images(hf, rows, reasons):
    family, _, theirs, ours = hf
    theirs.__dict__.pop("forward", None)
    ids, mask, labels, inputs = batch_of(ours, family, rows)
    want = theirs(ids, attention_mask=mask, labels=labels, **inputs)
    want.loss.backward()
    got = ours(ids, attention_mask=mask, labels=labels, **inputs)
    kept = mask.bool()
    assert error(got.loss, want.loss) <= LIMIT
    assert error(got.logits[kept], want.logits[kept]) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours.model.decoder, theirs)

    theirs.generation_config.eos_token_id = ours.generation_config.eos_token_id = None
    text = theirs.config.get_text_config()
    text.output_router_logits = ours.config.get_text_config().output_router_logits = False
    options = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **inputs}
    choices = [{}, {"use_cache": False}]
    # transformers does not repeat the images of Llama 4 and the videos of GLM-4.1V for the beams.
    if family != "llama4" and not (family.startswith("glm4v") and rows == "videos"):
        choices.append({"num_beams": 2, "num_return_sequences": 2})
    for chosen in choices:
        if hasattr(getattr(theirs, "model", None), "rope_deltas"):
            theirs.model.rope_deltas = None
        assert torch.equal(ours.generate(ids, **options, **chosen), theirs.generate(ids, **options, **chosen)), chosen
    assert reasons == [None, None]  # beam search has a loop of its own


@pytest.mark.cases(7)
@pytest.mark.parametrize(
    ("hf", "rows"), CASES, indirect=["hf"], ids=lambda part: part if isinstance(part, str) else part[0]
)
def test_the_features_of_images(hf, rows):
    family, _, theirs, ours = hf
    *_, inputs = batch_of(ours, family, rows)
    name = "get_video_features" if rows == "videos" else "get_image_features"
    if family == "mllama":  # transformers has no method for it
        assert not hasattr(ours, name)
        return
    given = {
        key: value for key, value in inputs.items() if ("video" in key) == (rows == "videos") and "token" not in key
    }
    want = getattr(theirs, name)(**given)
    # Of Llama 4 transformers returns the features before the projection.
    want = theirs.multi_modal_projector(want.last_hidden_state) if family == "llama4" else want.pooler_output
    got = getattr(ours, name)(**dict(reversed(given.items()))).pooler_output
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert error(one, other) <= LIMIT


CROPPABLE = [case for case, _ in CASES if case[0] != "lfm2_vl"]
"""Families without states of convolutions, from which rejected tokens cannot be removed."""


@pytest.mark.cases(5)
@pytest.mark.parametrize("hf", dict.fromkeys(CROPPABLE), indirect=True, ids="-".join)
def test_an_assistant_sees_the_images(hf):
    """A draft of the same model is accepted whole; one that sees no images would end elsewhere."""
    family, _, _, ours = hf
    ids, mask, _, inputs = batch_of(ours, family, "one")
    options = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0, "do_sample": False, **inputs}
    ours.generation_config.eos_token_id = None
    ours.config.get_text_config().output_router_logits = False
    want = ours.generate(ids, **options)
    got = ours.generate(ids, assistant_model=copy.deepcopy(ours), return_dict_in_generate=True, **options)
    assert torch.equal(got.sequences, want)
    # The next turn needs no pixels.
    mask = torch.ones_like(want)
    ours.generate(want, attention_mask=mask, past_key_values=got.past_key_values, max_new_tokens=2, pad_token_id=0)


@pytest.mark.cases(4)
@pytest.mark.parametrize("hf", dict.fromkeys(CROPPABLE), indirect=True, ids="-".join)
def test_an_assistant_of_texts_gets_no_images(hf, root):
    family, _, _, ours = hf
    ids, mask, _, inputs = batch_of(ours, family, "one")
    options = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0, "do_sample": False, **inputs}
    ours.generation_config.eos_token_id = None
    ours.config.get_text_config().output_router_logits = False
    folder = make_folder("llama", "gqa", root)
    want = ours.generate(ids, **options)
    for draft in (hf_model(folder), model_class("llama").from_pretrained(folder)):
        if ids.max() >= ours.config.get_text_config().vocab_size:  # a placeholder that only the embedding has
            with pytest.raises(ValueError, match="assistant_model must have an embedding for each token"):
                ours.generate(ids, assistant_model=draft, **options)
        else:
            assert torch.equal(ours.generate(ids, assistant_model=draft, **options), want)


@pytest.mark.parametrize(
    ("hf", "rows"), CASES, indirect=["hf"], ids=lambda part: part if isinstance(part, str) else part[0]
)
@pytest.mark.cases(7)
@pytest.mark.parametrize("first", [{}, {"output_hidden_states": True}], ids=["engine", "loop"])
def test_a_second_turn_continues_from_the_cache(hf, rows, first):
    """The second turn has no pixels; its tokens are those after the whole conversation with all pixels."""
    family, _, _, ours = hf
    ids, mask, _, inputs = batch_of(ours, family, rows)
    options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True}
    ours.generation_config.eos_token_id = None
    ours.config.get_text_config().output_router_logits = False
    answer = ours.generate(ids, attention_mask=mask, **inputs, **options, **first)

    both = torch.cat([answer.sequences, torch.tensor([[7, 8, 9]]).expand(len(ids), -1)], 1)
    new = both.shape[1] - ids.shape[1]
    mask = torch.nn.functional.pad(mask, (0, new), value=1)
    got = ours.generate(both, attention_mask=mask, past_key_values=answer.past_key_values, **options)
    types = {
        name: torch.nn.functional.pad(x, (0, new), value=int(family == "paligemma"))
        for name, x in inputs.items()
        if "token_type" in name
    }
    want = ours.generate(both, attention_mask=mask, **inputs | types, **options)
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("hf", "rows"), CASES, indirect=["hf"], ids=lambda part: part if isinstance(part, str) else part[0]
)
def test_a_placeholder_in_an_answer_needs_no_image_in_the_next_turn(hf, rows):
    family, _, _, ours = hf
    ids, mask, _, inputs = batch_of(ours, family, rows)
    ours.generation_config.eos_token_id = None
    ours.config.get_text_config().output_router_logits = False
    config = ours.model.decoder.config
    placeholder = placeholder_ids(config)[0]
    placeholder = placeholder if placeholder < config.vocab_size else 3  # as in Llama 3.2 Vision

    def second_is_placeholder(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_second = tokens.shape[1] == ids.shape[1] + 1
        return scores.index_fill(1, torch.tensor([placeholder]), 1e9) if is_second else scores

    options = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    mask_of_both = torch.nn.functional.pad(mask, (0, 5), value=1)
    continued = []
    for loop in (False, True):  # the engine fills the cache later, and the loop of transformers token by token
        answer = ours.generate(
            ids, attention_mask=mask, logits_processor=[second_is_placeholder], return_dict_in_generate=True,
            output_hidden_states=loop, **inputs, **options,
        )  # fmt: skip
        assert (answer.sequences[:, -3] == placeholder).all()
        both = torch.nn.functional.pad(answer.sequences, (0, 1), value=7)
        continued.append(
            ours.generate(both, attention_mask=mask_of_both, past_key_values=answer.past_key_values, **options)
        )
    assert torch.equal(*continued)
