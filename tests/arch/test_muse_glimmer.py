"""Muse Glimmer: which embeddings are normalized, where positions come from, and which layers rotate."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from liger_models import MuseGlimmerConfig
from liger_models.arch.muse_glimmer.tower import MuseGlimmerVisionConfig
from liger_models.convert.config_map import read_config
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.patches import interpolate_positions, locate_patches

from .families import LIMIT, error, tokens

first_case = pytest.mark.parametrize("pair", [("muse_glimmer", "windows")], indirect=True, ids="-".join)


@first_case
def test_given_embeddings_are_not_normalized(pair):
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 2, 9)
    rows = F.embedding(ids, ours.embed_tokens.weight)
    want = theirs(inputs_embeds=rows).logits
    assert error(ours(inputs_embeds=rows).logits, want) <= LIMIT
    assert error(ours(ids).logits, want) > 0.01
    assert error(ours(inputs_embeds=ours.embed_tokens(ids)).logits, ours(ids).logits) <= LIMIT


@first_case
def test_a_generated_placeholder_is_the_first_word(pair):
    """Transformers looks up word 0 for every placeholder, also without an image."""
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 1, 8)
    for token in (ours.config.image_token_id, ours.config.video_token_id):
        ids[0, -1] = token
        cache = DecodeCache(8)
        with torch.no_grad():
            ours(ids[:, :-1], cache=cache)
            got = ours(ids[:, -1:], cache=cache).logits
            assert error(got, theirs(ids).logits[:, -1:]) <= LIMIT


def test_positions_outside_of_the_learned_grid_are_zero():
    weight = torch.randn(25, 6)
    learned = weight.T.view(1, 6, 5, 5)
    for height, width in ((2, 3), (5, 5), (7, 11), (1, 20)):
        patches = locate_patches(torch.tensor([[1, height, width]]), height * width, 1)
        rows, columns = ((2 * torch.arange(length) + 1) / length - 1 for length in (height, width))
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1)[None]
        want = F.grid_sample(learned, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        got = interpolate_positions(weight, patches, aligned=False)
        torch.testing.assert_close(got, want[0].flatten(1).T, rtol=0, atol=1e-5)


def test_which_layers_have_a_window_or_rotate():
    config = MuseGlimmerConfig(num_hidden_layers=6)
    assert [config.window(layer) for layer in range(6)] == [2048, None, 2048, 2048, 2048, None]
    assert [config.rotates(layer) for layer in range(6)] == [True, False, True, True, True, False]
    thetas, types = [0.0, 1.0, 0.0], ["sliding_attention", "full_attention", "full_attention"]
    config = MuseGlimmerConfig(num_hidden_layers=3, layer_rope_theta=thetas, layer_types=types)
    assert [config.window(layer) for layer in range(3)] == [2048, None, None]
    assert [config.rotates(layer) for layer in range(3)] == [False, True, False]
    vision = MuseGlimmerVisionConfig(num_hidden_layers=6)
    assert [vision.is_full(layer) for layer in range(6)] == [False, False, False, True, False, True]


def test_configurations_that_do_not_fit_are_refused():
    config = MuseGlimmerConfig()
    with pytest.raises(ValueError, match=r"out_hidden_size \(6144\) must be vision_config.hidden_size · merge_size²"):
        dataclasses.replace(config, vision_config=dataclasses.replace(config.vision_config, hidden_size=64))
    with pytest.raises(ValueError, match="layer_rope_theta must hold 52 numbers, got 1"):
        MuseGlimmerConfig(layer_rope_theta=[0.0])
    with pytest.raises(ValueError, match="attention_bias must be False, got True"):
        MuseGlimmerConfig(attention_bias=True)
    with pytest.raises(ValueError, match="must be a multiple of 4 · num_attention_heads"):
        MuseGlimmerVisionConfig(num_attention_heads=5)
    with pytest.raises(ValueError, match=r"pos_emb_height \(32\) and pos_emb_width \(16\) must be equal"):
        MuseGlimmerVisionConfig(pos_emb_width=16)
    with pytest.raises(ValueError, match="layer_types must hold 50 of full_attention, window_attention"):
        MuseGlimmerVisionConfig(layer_types=["sliding_attention"] * 50)
    with pytest.raises(ValueError, match="hidden_act must be"):
        MuseGlimmerVisionConfig(hidden_act="relu")
    with pytest.raises(ValueError, match="the tower's rope_type must be 'axial' or 'default', got 'linear'"):
        read_config(MuseGlimmerConfig, {"vision_config": {"rope_parameters": {"rope_type": "linear"}}})
