"""PEFT itself on our models, against PEFT on the same models of transformers: outputs, training, files."""

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import liger_models.hf
from liger_models import AutoLigerModel, LigerLlama
from liger_models.adapters import LoRAConfig, apply_lora, unpack_projections
from liger_models.arch import list_archs
from liger_models.layers.layer import CHECKPOINTING_POLICIES

from ..arch.families import LIMIT, error, hf_model, load, make_folder, of_each_kind, tiny, tokens
from ..late import Late
from .test_lora import IDS, SHARED_EXPERTS, STATE_SPACE, llama, stir, with_image

peft = Late("peft", "it adapts models of this package")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT and transformers
    pytest.mark.filterwarnings("ignore:PEFT computes some projections itself:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings=True`:UserWarning"),
]

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "norm"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def trained(model) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def logits(model, ids=IDS) -> torch.Tensor:
    return model(input_ids=ids).logits


def assert_same_step(ours, theirs, ours_get, theirs_get) -> None:
    """Output and gradients are the same, under the same names."""
    want = theirs(**theirs_get)
    assert error(ours(return_logits=True, **ours_get).logits, want.logits) <= LIMIT
    want.loss.backward()
    ours(**ours_get).loss.backward()
    expected, got = ({name: p.grad for name, p in trained(model).items()} for model in (theirs, ours))
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:  # of a tower's layer whose output the text does not read
            assert got[name] is None, name
            assert "vision_tower" in name
        else:
            assert error(got[name], gradient) <= 2 * LIMIT, name


BY_PATTERN = ("llama4", "llama4_text", "phimoe")
"""The routers of Llama 4 and PhiMoE are linear layers in transformers, and would be targets as well."""


WITH_EXPERTS = ("ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe", "minimax_m2", "mixtral", "olmoe", "qwen3_moe")
"""Families in which PEFT takes the targets in MLPs for experts as well."""


def adapters(arch: str, **options):
    """All linear layers that both sides have."""
    targets: Any = SEVEN[:4] if arch in WITH_EXPERTS else "all-linear"
    targets = r".*attn\.\w*proj\w*|.*shared_expert_gate" if arch in SHARED_EXPERTS else targets
    # transformers makes names of this pattern, and "proj" would be the patch embedding's as well.
    targets = r".*attn\.(\w+_proj|qkv)" if arch == "glm4v_moe" else targets
    targets = r".*\.(?!out_proj|fc\d_latent)\w*_proj" if arch in STATE_SPACE else targets
    targets = r".*\.(qkv?|proj|fc[12]|[qkvo]_proj|gate_proj|up_proj|down_proj)" if arch in BY_PATTERN else targets
    return peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, **options)


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* all linear layers have adapters except:UserWarning")
@pytest.mark.parametrize("arch", of_each_kind(list_archs()))
def test_every_architecture(arch, root, tmp_path):
    """An adapter of transformers' model goes in, is trained, and goes out; merged, it is a checkpoint, and plain."""
    folder = make_folder(arch, next(iter(tiny(arch))), root)
    theirs = stir(peft.get_peft_model(hf_model(folder), adapters(arch))).train()
    theirs.save_pretrained(tmp_path / "theirs")
    plain = load(arch, folder)
    ids, inputs, their_inputs = with_image(arch, plain)
    names = plain.state_dict().keys()
    model = unpack_projections(plain)
    assert {id(each) for each in model.parameters()} == {id(each) for each in plain.parameters()}
    ours = peft.PeftModel.from_pretrained(model, tmp_path / "theirs", is_trainable=True).train()
    new = {"input_ids": ids, "labels": ids}
    assert_same_step(ours, theirs, new | inputs, new | their_inputs)
    ours.save_pretrained(tmp_path / "ours")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    expected = ours(input_ids=ids, **inputs).logits
    merged = ours.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    their_inputs = {name: value for name, value in their_inputs.items() if name != "labels"}
    assert error(hf_model(tmp_path / "merged")(input_ids=ids, **their_inputs).logits, expected) <= LIMIT
    assert merged.pack() is plain
    assert plain.state_dict().keys() == names
    assert error(plain(ids, **inputs).logits, expected) <= LIMIT


@pytest.fixture(scope="module")
def folder(root):
    return make_folder("llama", "gqa", root)


KINDS: dict[str, dict[str, Any]] = {
    "seven": {"target_modules": SEVEN},
    "two": {"target_modules": ["k_proj", "up_proj"]},
    "expression": {"target_modules": r".*\.1\.self_attn\.[qv]_proj"},
    "layers": {"target_modules": SEVEN, "layers_to_transform": [1], "rank_pattern": {"v_proj": 2}},
    "dora": {"target_modules": SEVEN, "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", *NORMS]},
    "projections": {"target_modules": ["q_proj"], "modules_to_save": ["v_proj", "gate_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "biases": {"target_modules": SEVEN, "bias": "all"},
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["gqa", "biases"])
def test_a_training_step_is_that_of_transformers(kind, variant, root, tmp_path):
    """From the same adapter, an optimizer step in fp32 gives the same one; the files hold the same names."""
    folder = make_folder("llama", variant, root)
    options = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **KINDS[kind]}
    theirs = peft.get_peft_model(hf_model(folder), peft.LoraConfig(**options))
    names = trained(theirs).keys()
    assert trained(peft.get_peft_model(unpacked("llama", folder), peft.LoraConfig(**options))).keys() == names
    stir(theirs).save_pretrained(tmp_path / "start")
    ours = peft.PeftModel.from_pretrained(unpacked("llama", folder), tmp_path / "start", is_trainable=True)
    ids = tokens("llama", variant, 2, 12)
    assert error(logits(ours, ids), logits(theirs, ids)) <= LIMIT
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(trained(model).values(), lr=1e-2)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    expected = trained(theirs)
    for name, parameter in trained(ours).items():
        assert error(parameter, expected[name]) <= LIMIT, name
    ours.save_pretrained(tmp_path / "end")
    keys = load_file(tmp_path / "end" / "adapter_model.safetensors").keys()
    assert keys == load_file(tmp_path / "start" / "adapter_model.safetensors").keys()
    if kind == "seven":
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in keys
    again = peft.PeftModel.from_pretrained(hf_model(folder), tmp_path / "end")
    assert error(logits(ours, ids), logits(again, ids)) <= LIMIT
    ours.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert error(logits(hf_model(tmp_path / "merged"), ids), logits(again, ids)) <= LIMIT


def unpacked(arch: str, folder):
    return unpack_projections(load(arch, folder))


@pytest.mark.parametrize("targets", [SEVEN, "all-linear", ["qkv_proj"], ["o_proj"], r".*_proj"], ids=str)
def test_a_packed_model_is_refused_and_unchanged(targets):
    model = llama()
    state, before = copy.deepcopy(model.state_dict()), logits(model)
    with pytest.raises(ValueError, match=r"Pass unpack_projections\(model\), from liger_models.adapters"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=targets))
    assert model.state_dict().keys() == state.keys()
    assert torch.equal(logits(model), before)
    adapted = stir(peft.get_peft_model(unpack_projections(model), peft.LoraConfig(target_modules=SEVEN)))
    assert error(logits(adapted), before) > 1e-3


def test_unload_disable_and_several_adapters(folder, tmp_path):
    def make(model):
        """Two adapters, of other matrices and other ranks."""
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=SEVEN))
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(1)
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        return model

    plain, packed = logits(load("llama", folder)), load("llama", folder)
    ours, theirs = make(unpack_projections(packed)), make(hf_model(folder))
    seen = []
    for change in ({}, "other", ["default", "other"]):
        for model in (ours, theirs):
            if change:
                model.base_model.set_adapter(change)
        seen.append(logits(ours))
        assert error(seen[-1], logits(theirs)) <= LIMIT
        with ours.disable_adapter():
            assert error(logits(ours), plain) <= LIMIT
    assert error(seen[0], seen[1]) > 1e-3
    for model in (ours, theirs):
        model.add_weighted_adapter(["default", "other"], [0.5, 2.0], "both", "cat")
        model.set_adapter("both")
    assert error(logits(ours), logits(theirs)) <= LIMIT
    ours.save_pretrained(tmp_path)
    assert (tmp_path / "other" / "adapter_model.safetensors").is_file()
    with pytest.raises(ValueError, match="must have no adapters to be packed or saved"):
        ours.base_model.model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model = model.merge_and_unload\(\), or model.unload\(\)"):
        ours.base_model.model.pack()
    assert ours.unload().pack() is packed
    assert torch.equal(logits(packed), plain)
    assert all(map(torch.equal, packed.state_dict().values(), load("llama", folder).state_dict().values()))


def test_the_model_computes_with_the_modules_of_the_tree():
    """As soon as PEFT has set its configurations, before a forward, and as soon as it has deleted them."""
    model = llama()
    plain = logits(model)
    adapted = stir(peft.get_peft_model(unpack_projections(model), peft.LoraConfig(target_modules=["q_proj"])))
    assert isinstance(model.layers[0].self_attn.qkv_proj.q_proj, peft.tuners.lora.Linear)
    first = logits(model)
    assert error(first, plain) > 1e-3
    adapted.add_adapter("other", peft.LoraConfig(target_modules=["down_proj"]))
    stir(adapted).base_model.set_adapter("other")
    second = logits(model)
    assert error(second, first) > 1e-3
    assert torch.equal(second, logits(adapted))
    adapted.unload()
    assert type(model.layers[0].mlp.down_proj.down_proj) is torch.nn.Linear
    assert error(logits(model), plain) <= LIMIT


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_policies(dropout):
    """The same gradients under every policy, also where adapters drop elements."""
    config = peft.LoraConfig(target_modules=SEVEN, lora_dropout=dropout)
    model = stir(peft.get_peft_model(unpack_projections(llama()), config)).train()
    results = []
    for policy in (*CHECKPOINTING_POLICIES, None):
        model.set_checkpointing(policy) if policy else model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(3)
        model(input_ids=IDS, labels=IDS).loss.backward()
        results.append({name: parameter.grad.clone() for name, parameter in trained(model).items()})
    for other in results[1:]:
        for name, gradient in results[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_a_tied_head(saved, tmp_path):
    """A copy of embedding or head is trained and the other is not, as in transformers; merging unties them."""
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    config = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    ours = stir(peft.get_peft_model(unpack_projections(model), peft.LoraConfig(**config)))
    ours.to(torch.float32)  # `Decoder._apply` ties again
    ours.save_pretrained(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(hf_model(tmp_path / "base"), tmp_path / "adapter")
    expected = logits(ours)
    assert error(expected, logits(theirs)) <= LIMIT
    merged = ours.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert error(logits(hf_model(tmp_path / "merged")), expected) <= LIMIT
    packed = merged.pack().to(torch.float32)
    assert error(logits(packed), expected) <= LIMIT
    again = unpack_projections(LigerLlama.from_pretrained(tmp_path / "base", progress=False)).pack()
    assert again.lm_head.weight is again.embed_tokens.weight


def test_a_scaled_embedding(root, tmp_path):
    """Gemma multiplies embeddings, and so what an adapter adds to them."""
    folder = make_folder("gemma", next(iter(tiny("gemma"))), root)
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])
    theirs = stir(peft.get_peft_model(hf_model(folder), config))
    theirs.save_pretrained(tmp_path)
    ours = peft.PeftModel.from_pretrained(unpacked("gemma", folder), tmp_path, low_cpu_mem_usage=True)
    ids = tokens("gemma", next(iter(tiny("gemma"))), 2, 12)
    assert error(logits(copy.deepcopy(ours), ids), logits(theirs, ids)) <= LIMIT


def test_the_resized_vocabulary_is_saved(folder, tmp_path):
    """PEFT compares it with that of the base model and saves the embedding."""
    model = load("llama", folder)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    adapted = peft.get_peft_model(unpack_projections(model), peft.LoraConfig(target_modules=SEVEN))
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path)
    assert any("embed_tokens" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_bfloat16_and_generation(folder):
    """Weights in bfloat16, adapters in float32, as PEFT has them."""
    model = unpack_projections(load("llama", folder, dtype=torch.bfloat16))
    adapted = stir(peft.get_peft_model(model, peft.LoraConfig(target_modules=SEVEN, task_type="CAUSAL_LM")))
    assert {parameter.dtype for parameter in trained(adapted).values()} == {torch.float32}
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in trained(adapted).values())
    new = adapted.generate(input_ids=IDS, max_new_tokens=4, eos_token_id=[])
    merged = adapted.merge_and_unload().pack()
    assert new.shape == merged.generate(IDS, max_new_tokens=4, eos_token_id=[]).shape == (2, 20)


def test_fused_ops_run_where_nothing_is_unpacked(kernel_device):
    """In Triton's interpreter or on a GPU: loss and gradients are the references'."""
    from liger_models.kernels import dispatch

    def make():
        model = unpack_projections(llama(num_hidden_layers=1))
        model.set_checkpointing("full")
        return stir(peft.get_peft_model(model, peft.LoraConfig(target_modules=SEVEN, r=4)))

    model, reference, ids = make().to(kernel_device), make(), IDS.to(kernel_device)
    assert {each.device.type for each in model.parameters()} == {torch.device(kernel_device).type}
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with dispatch.reference_backend():
        want = reference(input_ids=IDS, labels=IDS).loss
        want.backward()
    assert error(loss, want) <= LIMIT
    for name, parameter in trained(model).items():
        assert error(parameter.grad, reference.get_parameter(name).grad) <= 1e-4, name


@pytest.mark.compile
@pytest.mark.slow
def test_one_graph():
    model = unpack_projections(llama(num_hidden_layers=1))
    adapted = stir(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"])))
    compiled = torch.compile(adapted, backend="aot_eager", fullgraph=True)
    expected = adapted(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(compiled(input_ids=IDS, labels=IDS).loss, expected)


@pytest.mark.filterwarnings("ignore:(target_parameters|.* (rank|alpha)_pattern keys):RuntimeWarning")
@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("mixtral", {"target_modules": "all-linear"}, "got .'down_proj', .*instead of 'all-linear'"),
        ("mixtral", {"target_modules": ["q_proj", "w2"]}, "PEFT derived them from target_modules: load the model"),
        ("mixtral", {"target_modules": ["gate"]}, "target_parameters must be empty, got .'gate.weight'"),
        ("qwen3_moe", {"target_modules": SEVEN}, "Experts and routers have no adapters in PEFT"),
        ("gpt_oss", {"target_parameters": ["experts.down_proj"]}, "target_parameters must be empty, got"),
        ("qwen2_vl", {"target_modules": ["proj"]}, "weight, which cannot have adapters"),
        (
            "qwen3_vl_moe",
            {"target_modules": SEVEN},
            r"got 'down_proj', which means model\..*\.experts.down_proj as well",
        ),
        ("llama", {"target_modules": ["lm_head"]}, "lm_head has the loss inside: train it with modules_to_save"),
        ("llama", {"target_modules": ["self_attn"]}, "is not supported"),
        ("llama", {"modules_to_save": ["mlp"]}, r"single layers.* name mlp.gate_proj, mlp.up_proj, mlp.down_proj\."),
        ("gemma3", {"modules_to_save": ["multi_modal_projector"]}, "multi_modal_projector: PEFT must replace linear"),
        ("mixtral", {"target_parameters": ["experts.nothing"]}, "target_parameters must be empty"),
        ("llama", {"target_modules": ["fc1"]}, "not found in the base model"),
    ],
)
def test_refused(arch, options, message, root):
    folder = make_folder(arch, next(iter(tiny(arch))), root)
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(unpacked(arch, folder), peft.LoraConfig(**{"target_modules": ["q_proj"]} | options))


def test_all_linear_layers_of_a_mixture_of_experts(root):
    """Without experts, which a warning says; other choices need none."""
    folder = make_folder("qwen3_moe", next(iter(tiny("qwen3_moe"))), root)
    message = "all linear layers have adapters except down_proj, gate, gate_proj, up_proj"
    with pytest.warns(UserWarning, match=message):
        peft.get_peft_model(unpacked("qwen3_moe", folder), peft.LoraConfig(target_modules=SEVEN[:4]))
    peft.get_peft_model(unpacked("qwen3_moe", folder), peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.filterwarnings("ignore:(target_parameters|.* (rank|alpha)_pattern keys):RuntimeWarning")
def test_adapters_of_experts_are_not_lost(root, tmp_path):
    folder = make_folder("mixtral", next(iter(tiny("mixtral"))), root)
    theirs = peft.get_peft_model(hf_model(folder), peft.LoraConfig(r=2, target_modules=["q_proj", "w1", "w2", "w3"]))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Experts"):
        peft.PeftModel.from_pretrained(unpacked("mixtral", folder), tmp_path)


def test_tensors_of_other_modules_are_not_lost(tmp_path):
    adapted = peft.get_peft_model(unpack_projections(llama(num_hidden_layers=3)), peft.LoraConfig(target_modules=SEVEN))
    adapted.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tensors must belong to adapted modules of LigerLlama, got 14 others"):
        peft.PeftModel.from_pretrained(unpack_projections(llama()), tmp_path)


@pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`:UserWarning")
@pytest.mark.parametrize("name", ["trainable_token_indices", "ensure_weight_tying"])
def test_what_tied_heads_do_not_support(name):
    options = {"target_modules": ["q_proj"], name: [1, 2] if name == "trainable_token_indices" else True}
    with pytest.raises(ValueError, match=f"{name} must be empty in a model that ties"):
        peft.get_peft_model(unpack_projections(llama(tie_word_embeddings=True)), peft.LoraConfig(**options))


def test_tokens_that_are_trained_alone():
    """They are rows of the embedding, and of the head where it is tied, which has no adapters."""
    config = peft.TrainableTokensConfig(token_indices=[1, 2], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="token_indices must be empty in a model that ties"):
        peft.get_peft_model(unpack_projections(llama(tie_word_embeddings=True)), config)
    adapted = peft.get_peft_model(unpack_projections(llama()), config)
    trained = [name for name, each in adapted.named_parameters() if each.requires_grad]
    assert trained == ["base_model.model.model.embed_tokens.trainable_tokens_delta.default"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_tokens_whose_embedding_is_normalized_are_not_trained_alone(wrapped):
    """PEFT would look them up without the norm; a copy of the whole embedding has it."""
    sizes = {"model_type": "muse_glimmer", **tiny("muse_glimmer")["windows"]}
    configs = [
        peft.TrainableTokensConfig(token_indices=[1, 2], task_type="CAUSAL_LM"),
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]),
    ]
    make = lambda: AutoLigerModel.from_config(sizes)
    unpack = lambda model: unpack_projections(liger_models.hf.wrap(model) if wrapped else model)
    for config in configs:
        with pytest.raises(ValueError, match="token_indices must be empty for LigerMuseGlimmer, got"):
            peft.get_peft_model(unpack(make()), config)
    model = make()
    want = model(IDS).logits
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    torch.testing.assert_close(peft.get_peft_model(unpack(model), config)(IDS).logits, want)


def test_weights_are_moved():
    """Packed weights and parts are not in memory at the same time, except those of one layer."""
    model = llama()
    qkv = model.layers[0].self_attn.qkv_proj
    unpacked = unpack_projections(model)
    assert qkv.weight is None
    assert sum(each.numel() for each in model.parameters()) == sum(each.numel() for each in llama().parameters())
    assert unpacked.pack() is model
    assert not [*unpacked.parameters()]


def test_a_second_adapter_is_checked_in_the_next_forward(root):
    folder = make_folder("qwen3_vl_moe", next(iter(tiny("qwen3_vl_moe"))), root)
    adapted = peft.get_peft_model(unpacked("qwen3_vl_moe", folder), peft.LoraConfig(target_modules=["q_proj"]))
    adapted(input_ids=IDS)
    adapted.add_adapter("second", peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    with pytest.raises(ValueError, match="got 'down_proj', which means"):
        adapted(input_ids=IDS)


def test_a_module_that_holds_a_model(tmp_path):
    """Calls go through it."""

    class Doubled(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.decoder, self.name_or_path = model, "somewhere"

        def forward(self, **inputs):
            out = self.decoder(**inputs)
            return out._replace(logits=2 * out.logits)

    model = Doubled(llama())
    expected = logits(model)
    adapted = peft.get_peft_model(unpack_projections(model), peft.LoraConfig(target_modules=SEVEN))
    assert adapted.peft_config["default"].base_model_name_or_path == "somewhere"
    assert error(logits(adapted), expected) <= LIMIT
    assert adapted.unload().pack() is model
    assert torch.equal(logits(model), expected)


def test_a_module_beside_the_model(tmp_path):
    """It is frozen, trained as a whole, or adapted, under its own name; one of a name of transformers' is refused."""

    class Valued(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.decoder, self.value = model, torch.nn.Sequential()
            self.value.out = torch.nn.Linear(32, 2)
            self.bias = torch.nn.Parameter(torch.zeros(2))

        def forward(self, **inputs):
            return self.value(self.decoder(output_hidden_states=True, **inputs).hidden_states[-1]) + self.bias

    def adapt(**options):
        return peft.get_peft_model(unpack_projections(Valued(llama())), peft.LoraConfig(r=4, **options))

    base = adapt(target_modules=["q_proj"])
    assert all("lora_" in name for name in trained(base))
    assert not any(parameter.requires_grad for parameter in base.base_model.model.inner.value.parameters())
    start = "base_model.model.value"
    saved = adapt(target_modules=SEVEN, modules_to_save=["value"])
    assert f"{start}.modules_to_save.default.out.weight" in trained(saved)
    adapted = adapt(target_modules=["q_proj", "out"])
    assert trained(adapted).keys() == trained(base).keys() | {f"{start}.out.lora_{x}.default.weight" for x in "AB"}
    expected = stir(adapted)(input_ids=IDS)
    merged = adapted.merge_and_unload().pack()
    assert type(merged.value.out) is torch.nn.Linear
    assert error(merged(input_ids=IDS), expected) <= LIMIT

    model = Valued(llama())
    model.lm_head = torch.nn.Linear(32, 2)
    with pytest.raises(ValueError, match=r"Valued must have modules of other names .*, got lm_head, .* Rename it"):
        unpack_projections(model)


def test_what_cannot_be_unpacked():
    model = llama()
    unpacked = unpack_projections(model)
    for again in (model, unpacked, torch.nn.Sequential(unpacked)):
        with pytest.raises(ValueError, match="got a model that is unpacked already"):
            unpack_projections(again)
    with pytest.raises(ValueError, match=r"got UnpackedLMHead. Call pack\(\) on"):
        apply_lora(model)
    with pytest.raises(ValueError, match="got LoRALinear"):
        unpack_projections(llama(LoRAConfig()))
    with pytest.raises(ValueError, match="must be or hold one CausalLM, got 0"):
        unpack_projections(torch.nn.Linear(2, 2))


def hf_llama(folder, **options):
    import liger_models.hf

    return liger_models.hf.LlamaForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("targets", [["q_proj"], ["o_proj"], None, "all-linear"], ids=str)
def test_the_error_of_a_packed_model_names_the_way(folder, targets):
    """Also where PEFT finds none of the names."""
    model = load("llama", folder)
    assert not hasattr(model, "peft_config")  # which other tools ask
    before = model.state_dict().keys()
    with pytest.raises(ValueError, match=r"must be unpacked.* Pass unpack_projections\(model\)"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
    assert model.state_dict().keys() == before


def test_adalora(folder):
    """On a bare model a clear error; on one of `liger_models.hf` the loss with its regularization."""
    config = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "total_step": 10}
    with pytest.raises(ValueError, match=r"AdaLoRA.* got LigerLlama.*liger_models.hf.wrap\(model\)"):
        peft.get_peft_model(unpack_projections(load("llama", folder)), peft.AdaLoraConfig(**config))
    losses = []
    for model in (hf_model(folder), unpack_projections(hf_llama(folder, dtype=torch.float32))):
        torch.manual_seed(0)
        adapted = stir(peft.get_peft_model(model, peft.AdaLoraConfig(**config))).train()
        losses.append(adapted(input_ids=IDS, labels=IDS).loss)
    assert error(*reversed(losses)) <= LIMIT


def test_prompts_of_a_bare_model(folder):
    """They are trained; its own ``generate`` would pass over them."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(hf_model(folder), copy.deepcopy(config))
    torch.manual_seed(0)
    ours = peft.get_peft_model(unpacked("llama", folder), config)
    mask = torch.ones_like(IDS)
    want = theirs(input_ids=IDS, attention_mask=mask, labels=IDS).loss
    assert error(ours(input_ids=IDS, attention_mask=mask, labels=IDS).loss, want) <= LIMIT
    with pytest.raises(ValueError, match=r"learned prompts need transformers' generate.*liger_models.hf.wrap"):
        ours.generate(input_ids=IDS, max_new_tokens=2)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_activated_lora_with_recomputation(folder, policy):
    """PEFT removes the hooks that say where the adapters begin before the backward computes the blocks again."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], alora_invocation_tokens=[int(IDS[0, 4])],
        init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model(unpacked("llama", folder), config).train()
    other = IDS.roll(2, 1)  # the adapters begin elsewhere
    gradients = []
    for recomputation in ("none", policy):
        model.get_base_model().set_checkpointing(recomputation)
        model.zero_grad()
        losses = [model(input_ids=ids, labels=ids).loss for ids in (IDS, other)]
        sum(losses).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    want, got = gradients
    for name in want:
        assert want[name].abs().max() > 0
        assert error(got[name], want[name]) <= LIMIT, name


def test_an_adapter_for_each_prompt_with_beams(folder):
    answers = []
    for model in (hf_model(folder), unpack_projections(hf_llama(folder, dtype=torch.float32))):
        adapted = peft.get_peft_model(model, adapters("llama", task_type="CAUSAL_LM"))
        adapted.add_adapter("other", adapters("llama", task_type="CAUSAL_LM"))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
        options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
        answers.append(adapted.eval().generate(input_ids=IDS, adapter_names=["default", "other"], **options))
    assert torch.equal(*answers)


def test_attributes_that_are_set_on_the_tree_reach_the_model(folder):
    model = unpack_projections(hf_llama(folder))
    model.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 7
    assert model(input_ids=IDS, labels=IDS).loss == 7
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.max_new_tokens = 3
    assert model.generate(input_ids=IDS, do_sample=False).shape[1] == IDS.shape[1] + 3
    with pytest.raises(ValueError, match="LigerLlama takes it as an argument of the forward"):
        unpacked("llama", folder).loss_function = len


def test_the_output_of_the_embedding_may_require_gradients(folder):
    model = unpacked("llama", folder).requires_grad_(False)
    for _ in range(2):
        model.enable_input_require_grads()
    assert model.get_input_embeddings()(IDS).requires_grad
    model.disable_input_require_grads()
    assert not model.get_input_embeddings()(IDS).requires_grad
