"""Qwen3-Next beyond what every family is tested for: states in decoding, long texts, tensors that are kept."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from liger_models import KernelOptions, LigerQwen3Next
from liger_models.convert import get_hf_state_dict, load_hf_tensors
from liger_models.layers.kv_cache import DecodeCache

from ..late import transformers
from .families import LIMIT, assert_same_gradients, error, load, tiny, tokens

CASE = ("qwen3_next", "aux")
one_case = pytest.mark.parametrize("pair", [CASE], indirect=True, ids="-".join)


@one_case
def test_several_chunks_of_the_recurrence(pair):
    """Both compute 64 tokens at once, from the state after those before."""
    *case, theirs, ours = pair
    ids = tokens(*case, 2, 150)
    mask = torch.ones_like(ids)
    mask[1, :70] = 0  # more than a chunk
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 70] = -100
    want = theirs(ids, attention_mask=mask, labels=labels)
    got = ours(ids, attention_mask=mask, labels=labels)
    assert error(got.loss, want.loss) <= LIMIT
    want.loss.backward()
    got.loss.backward()
    assert_same_gradients(ours, theirs)


@one_case
def test_generates_what_transformers_generates(pair, use_cache):
    """Prompts that are padded on the left: padding must leave no trace in the states."""
    *case, theirs, ours = pair
    ids = tokens(*case, 3, 8)
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :7] = 0, 0
    ids = ids.masked_fill(mask == 0, 0)
    options = {"max_new_tokens": 12, "attention_mask": mask, "pad_token_id": 0}
    theirs.__dict__.pop("forward", None)  # with router logits transformers cannot use its cache
    theirs.config.output_router_logits = False
    want = theirs.generate(ids, do_sample=False, eos_token_id=None, **options)
    got = ours.generate(ids, eos_token_id=[], use_cache=use_cache, **options)
    assert torch.equal(got, want)


@one_case
def test_a_kept_cache_can_grow_but_not_be_cut_back(pair):
    *case, _, ours = pair
    ids = tokens(*case, 2, 8)
    cache = DecodeCache(30)
    options = {"max_new_tokens": 3, "eos_token_id": []}
    said = ours.generate(ids, cache=cache, **options)
    more = torch.cat([said, ids[:, :2]], 1)
    assert torch.equal(ours.generate(more, cache=cache, **options), ours.generate(more, **options))
    other = more.clone()
    other[1, 9] = (other[1, 9] + 1) % 32
    message = (
        rf"must begin with all 15 tokens of the cache, .* got token {int(other[1, 9])} instead of .* at 9 of row 1"
    )
    with pytest.raises(ValueError, match=message):
        ours.generate(other, cache=cache, **options)
    with pytest.raises(ValueError, match=r"and have further ones, got only 13 tokens\. Use a new DecodeCache"):
        ours.generate(more, cache=cache, **options)
    assert cache.length == 15


@one_case
def test_padding_in_pieces_of_a_prompt(pair):
    """Also a piece that is a single token, which is padding in one row."""
    *case, _, ours = pair
    ids, cache = tokens(*case, 2, 9), DecodeCache(9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    bounds = ((0, 2), (2, 3), (3, 9))
    with torch.no_grad():
        want = ours(ids, attention_mask=mask).logits
        got = [ours(ids[:, begin:end], attention_mask=mask[:, :end], cache=cache).logits for begin, end in bounds]
    assert error(torch.cat(got, 1)[mask == 1], want[mask == 1]) <= LIMIT


@one_case
def test_rows_of_the_cache_are_selected_with_their_states(pair):
    *case, _, ours = pair
    ids, rows = tokens(*case, 2, 9), torch.tensor([1, 1, 0])
    cache = DecodeCache(9)
    with torch.no_grad():
        ours(ids[:, :6], cache=cache)
        cache.select(rows)
        got = ours(ids[rows, 6:], cache=cache).logits
        assert error(got, ours(ids[rows]).logits[:, 6:]) <= LIMIT


@one_case
def test_a_forward_that_fails_leaves_the_states_as_they_were(pair):
    *case, _, ours = pair
    ids, cache = tokens(*case, 2, 9), DecodeCache(9)

    def fail(*_):
        raise RuntimeError("out of memory")

    with torch.no_grad():
        for begin, end in ((0, 5), (5, 9)):
            for module in (ours.layers[-1], ours.lm_head):
                handle = module.register_forward_pre_hook(fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    ours(ids[:, begin:end], cache=cache)
                handle.remove()
            got = ours(ids[:, begin:end], cache=cache).logits
        assert error(got, ours(ids).logits[:, 5:]) <= LIMIT


@one_case
def test_a_cache_that_starts_anew_has_no_states(pair):
    *case, _, ours = pair
    ids = tokens(*case, 1, 7)
    cache = DecodeCache(7)
    with torch.no_grad():
        ours(tokens(*case, 1, 5, seed=1), cache=cache)
        cache.length = 0
        assert error(ours(ids, cache=cache).logits, ours(ids).logits) <= LIMIT


def test_layers_that_predict_a_second_token_are_saved_again(tmp_path):
    """They belong to no parameter; transformers would lose them."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}
    heads = {"num_attention_heads": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 1}
    widths = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "head_dim": 16}
    model = LigerQwen3Next.from_config(LigerQwen3Next.config_class(**sizes, **heads, **widths))
    model.save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    second = {
        "mtp.fc.weight": torch.randn(32, 64).bfloat16(),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(3),
    }
    save_file({**tensors, **second}, tmp_path / "plain" / "model.safetensors")

    model = load(CASE[0], tmp_path / "plain")
    model.save_pretrained(tmp_path / "again", dtype=torch.float16, max_shard_size="20KB")
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1
    assert found.keys() == tensors.keys() | second.keys()
    for name, tensor in second.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    load_hf_tensors(
        model, {**dict.fromkeys(second, torch.zeros(1)), **get_hf_state_dict(model)}
    )  # engines may send both

    save_file({**tensors, "mtp_fc.weight": torch.ones(3)}, tmp_path / "plain" / "model.safetensors")
    with pytest.raises(ValueError, match=r"Unexpected: mtp_fc\.weight"):
        load(CASE[0], tmp_path / "plain")


def test_a_convolution_that_the_kernel_does_not_take_is_refused_at_once(tmp_path):
    """When the model is built, not by its first forward; plain torch takes wider ones."""
    wide = {**tiny("qwen3_next")["aux"], "linear_conv_kernel_dim": 6}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_next", **wide)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"linear_conv_kernel_dim\) must be 2 to 4, got 6\. KernelOptions"):
        load(CASE[0], tmp_path)
    ours, ids = load(CASE[0], tmp_path, kernels=KernelOptions(linear_attention=False)), tokens(*CASE, 2, 20)
    with torch.no_grad():
        assert error(ours(ids).logits, theirs(ids).logits) <= LIMIT
    with pytest.raises(ValueError, match="must be 2 to 4, got 1"):
        LigerQwen3Next(dataclasses.replace(ours.config, linear_conv_kernel_dim=1), ours.kernels)
