"""What Gemma 4 has of its own: keys and values that layers share, an input for each block, a factor of the stream."""

import copy

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.convert.config_map import read_config, write_config
from liger_models.kernels.dispatch import reference_backend
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.memory.estimate import training_memory

from ..late import transformers
from .families import CASES, LIMIT, error, gradients_of, load, tiny, tokens

CASES = [case for case in CASES if case[0] in ("gemma4_text", "gemma4_unified_text")]
every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case = pytest.mark.parametrize("pair", CASES[:1], indirect=True, ids="-".join)


@pytest.mark.cases(5)
@every_case
def test_policies_and_mixed_ones_give_identical_gradients(pair):
    """A block that is recomputed must not replace the keys and values that other blocks have taken from it."""
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 2, 16)
    blocks = len(ours.layers)
    expected = None
    for policy in (*CHECKPOINTING_POLICIES, [("full", "none")[i % 2] for i in range(blocks)]):
        ours.zero_grad()
        ours.set_checkpointing(policy)
        ours(ids, labels=ids).loss.backward()
        expected = expected or gradients_of(ours)
        assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients_of(ours).items())


@one_case
def test_the_cache_holds_shared_keys_and_values_once(pair):
    arch, variant, theirs, ours = pair
    ids, cache = tokens(arch, variant, 2, 12), DecodeCache(12)
    with torch.no_grad():
        first = ours(ids[:, :7], cache=cache).logits
        rest = ours(ids[:, 7:8], cache=cache).logits
        want = theirs(ids[:, :8]).logits
    assert error(torch.cat([first, rest], 1), want) <= LIMIT
    assert sorted(cache._layers) == [0, 1]
    assert [hasattr(block.self_attn.k_norm, "weight") for block in ours.layers] == [True, True, False, False]
    assert ours.layers[2].self_attn.qkv_proj.out_features == 4 * 4


@one_case
def test_the_factor_of_the_stream_is_not_trained(pair, tmp_path):
    _, _, _, ours = pair
    frozen = [name for name, parameter in ours.named_parameters() if not parameter.requires_grad]
    assert frozen == [f"layers.{i}.layer_scalar.weight" for i in range(4)]
    assert all(block.layer_scalar.weight.item() == pytest.approx(0.8) for block in ours.layers)
    ours.save_pretrained(tmp_path)
    again = AutoLigerModel.from_pretrained(tmp_path, progress=False)
    assert [name for name, parameter in again.named_parameters() if not parameter.requires_grad] == frozen


@one_case
def test_embeddings_of_no_token_are_refused(pair):
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 2, 5)
    embeds = ours.embed_tokens(ids)
    assert error(ours(inputs_embeds=embeds).logits, ours(ids).logits) <= LIMIT
    with pytest.raises(ValueError, match="inputs_embeds must be embeddings of tokens"):
        ours(inputs_embeds=embeds + 0.1)


def test_unified_models_have_neither_experts_nor_inputs_for_blocks():
    hf = {"model_type": "gemma4_unified_text", **tiny("gemma4_unified_text")["untied"]}
    with pytest.raises(ValueError, match="hidden_size_per_layer_input 0, got False and 8"):
        AutoLigerModel.from_config({**hf, "hidden_size_per_layer_input": 8}, device="meta")


WIDE = {
    "model_type": "gemma4_text", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 50, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101,
}  # fmt: skip
"""With the heads of releases, of 256 and of 512."""


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}], ids=str)
@pytest.mark.parametrize("batch", ["plain", "packed", "left", "right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_heads_of_releases_on_gpu(changes, batch, dtype):
    """Logits and gradients are as near to fp64 as those of plain torch on the CPU in the same dtype."""
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({**WIDE, **changes}, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if "q_norm" in name:  # scores of about 1; with those of random weights rounding decides which key wins
                parameter.mul_(0.05)
    model.to(dtype)
    ids = torch.randint(3, 101, (2, 150), generator=torch.Generator().manual_seed(0))
    options = {}
    if batch == "packed":
        options["cu_seqlens"] = torch.tensor([0, 70, 150, 151, 300])
    elif batch != "plain":
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][1, slice(0, 30) if batch == "left" else slice(120, 150)] = 0
    seen = options.get("attention_mask", torch.ones_like(ids)).bool()

    compared = dtype

    def run(device, dtype):
        made = copy.deepcopy(model).to(device, dtype)
        inputs = {name: value.to(device) for name, value in options.items()}
        loss = made(ids.to(device), labels=ids.to(device), **inputs).loss
        loss.backward()
        gradients = gradients_of(made)
        with torch.no_grad():
            logits = made(ids.to(device), **inputs).logits.double().cpu()
        gradients = torch.cat([gradients[name].double().cpu().flatten() for name in gradients])
        # In bf16 the error of a single number, such as the loss, is a matter of luck.
        return logits[seen], gradients, *([loss.detach().double().cpu()] if compared == torch.float32 else [])

    with reference_backend():
        exact, plain = run("cpu", torch.float64), run("cpu", dtype)
    for got, near, want in zip(run("cuda", dtype), plain, exact, strict=True):
        assert error(got, want) <= 1.5 * error(near, want) + 1e-6


def test_the_estimate_counts_what_lies_between_the_blocks():
    hf = {"model_type": "gemma4_text", **tiny("gemma4_text")["shared"]}
    model = AutoLigerModel.from_config(hf, device="meta")
    without = AutoLigerModel.from_config(
        {**hf, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, device="meta"
    )
    full = (training_memory(each, 64).activations["full"] for each in (model, without))
    assert next(full) - next(full) == 64 * 2 * 2 * 4 * 8  # bf16, the inputs of 4 blocks and what they are made of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 3}, r"num_kv_shared_layers \(3\) must leave a layer of each type"),
        (
            {"num_global_key_value_heads": 3, "attention_k_eq_v": True},
            "must be a multiple of num_global_key_value_heads",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be None or 'vision', got 'all'"),
        ({"enable_moe_block": True}, "enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters must be of type 'proportional'",
        ),
        ({"per_layer_config": {"1": {"intermediate_size": 3}}}, "per_layer_config must give head_dim and"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations_that_do_not_fit(changes, message):
    hf = {"model_type": "gemma4_text", **tiny("gemma4_text")["shared"]}
    with pytest.raises(ValueError, match=message):
        AutoLigerModel.from_config({**hf, **changes}, device="meta")


def test_without_a_share_all_pairs_of_the_wide_heads_turn(tmp_path):
    """Rope parameters that are given have no default of it; without any it is a quarter."""
    rope = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gemma4_text", **tiny("gemma4_text")["rope"] | {"rope_parameters": rope})
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = load("gemma4_text", tmp_path), tokens("gemma4_text", "rope", 2, 30)
    with torch.no_grad():
        assert error(ours(ids).logits, theirs(ids).logits) <= LIMIT
    assert ours.config.partial_rotary_factor == 1.0
    again = read_config(type(ours.config), write_config(ours.config, {}, torch.float32))
    assert again == ours.config
    bare = {key: value for key, value in config.to_dict().items() if key != "rope_parameters"}
    assert read_config(type(ours.config), bare).partial_rotary_factor == 0.25
