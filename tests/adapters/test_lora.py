"""Adapters against PEFT on the same model in transformers: outputs, gradients, files; and what else runs with them."""

import copy
import json
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from liger_models import AutoLigerModel, LigerFusedLinearDPOLoss, LigerLlama, LlamaConfig
from liger_models.adapters import (
    LoRAConfig,
    adapter_config,
    apply_lora,
    load_adapter,
    merge_lora,
    quantize_base,
    save_adapter,
    unmerge_lora,
    without_adapters,
)
from liger_models.adapters.lora_layers import LoRALinear, adapted_layers
from liger_models.adapters.peft_files import peft_tensors
from liger_models.arch import list_archs
from liger_models.convert.tensors import hf_tensors, load_hf_tensors
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.linear.low_rank_factors import Rows, find_rows
from liger_models.layers.compile_ahead import never_ahead
from liger_models.layers.frozen import frozen_format
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.layers.lm_head import LigerLMHead

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
    test_vision,
)
from ..arch.families import (
    FIRST_CASES,
    LIMIT,
    VISION_CASES,
    beyond_kinds,
    error,
    hf_model,
    is_tower,
    load,
    make_folder,
    tiny,
    tokens,
)
from ..late import Late, transformers
from ..memory.test_estimate import measured_bytes, saved_bytes
from ..parallel.comparison import build
from ..parallel.images import image_batch, image_config

peft = Late("peft", "adapters are compared with those of peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT and transformers
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:NF4Tensor does not implement:UserWarning"),
]

STATE_SPACE = [arch for arch, _ in FIRST_CASES if arch in ("falcon_h1", "mamba2", "nemotron_h")]
"""Families in which PEFT refuses to adapt the output projection of the mixer."""
SHARED_EXPERTS = [arch for arch, variant in FIRST_CASES if "shared_expert" in str(tiny(arch)[variant])]
KINDS = [{}, {"use_rslora": True}, {"use_dora": True}]
IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
SOME = ["q_proj", "v_proj", "down_proj"]
OTHERS = ["k_proj", "o_proj", "up_proj", "lm_head"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def llama(config: LoRAConfig | None = None, **changes) -> LigerLlama:
    torch.manual_seed(0)
    model = LigerLlama.from_config(LlamaConfig(**(vars(CONFIG) | changes)))
    return model if config is None else stir(apply_lora(model, config))


def stir(model):
    """Adapters away from where they start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.device))
    return model


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def under_peft_names(model, values) -> dict[str, torch.Tensor]:
    """The adapters' tensors as they stand in a file: what `values` makes of a parameter."""
    return {
        theirs: tensor.write(values(tensor.parameter))
        for layer in adapted_layers(model).values()
        for theirs, tensor in peft_tensors(layer).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "up_proj"]], ids=str)
def test_factors_are_packed_in_two_ways(targets, dtype, kernel_device, poisoned_empty):
    """By a kernel, and in the general way, which compiled code takes: the same bits, gradients included."""
    model = llama(LoRAConfig(r=3, lora_alpha=7, target_modules=targets)).to(kernel_device)
    layers = adapted_layers(model).values()

    def results(lora):
        A, B = lora.factors(dtype)
        grads = torch.autograd.grad(
            (A.float() * torch.linspace(-1, 1, A.numel(), device=A.device).view_as(A)).sum()
            + (B.float() * torch.linspace(-1, 2, B.numel(), device=A.device).view_as(B)).sum(),
            [*lora.parameters()],
        )
        return A, B, *grads

    for layer in layers:
        assert None not in layer.lora.rows.values()
        got = results(layer.lora)
        layer.lora.rows = dict.fromkeys(layer.lora.rows)
        for ours, want in zip(got, results(layer.lora), strict=True):
            assert ours.dtype == want.dtype
            assert torch.equal(ours, want)


@pytest.mark.parametrize("trained", ["lora_A", "lora_B", ""])
def test_factors_of_untrained_adapters_need_no_gradient(kernel_device, trained):
    model = llama(LoRAConfig(r=3)).to(kernel_device)
    for lora in (layer.lora for layer in adapted_layers(model).values()):
        for name, parameter in lora.named_parameters():
            parameter.requires_grad_(bool(trained) and name.endswith(trained))
        A, B = lora.factors(torch.float32)
        assert (A.requires_grad, B.requires_grad) == (trained == "lora_A", trained == "lora_B")
        if trained:
            (A.sum() + B.sum()).backward()
            for name, parameter in lora.named_parameters():
                expected = torch.full_like(parameter, 1.0 if trained == "lora_A" else lora.config.scaling)
                assert torch.equal(parameter.grad, expected) if name.endswith(trained) else parameter.grad is None


def test_factors_have_no_second_derivative(kernel_device):
    lora = llama(LoRAConfig(r=3)).to(kernel_device).layers[0].self_attn.qkv_proj.lora
    A, B = lora.factors(torch.float32)
    loss = (A * A).sum() + (B * B).sum()
    gradients = torch.autograd.grad(loss, [*lora.parameters()], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(gradient.sum() for gradient in gradients).backward()


def test_adapters_of_two_dtypes_are_refused(kernel_device):
    lora = llama(LoRAConfig(r=3)).to(kernel_device).layers[0].self_attn.qkv_proj.lora
    lora["k_proj"].half()
    with pytest.raises(ValueError, match=r"one dtype, got torch\.float16, torch\.float32"):
        lora.factors(torch.float32)


def test_rows_of_a_packed_weight():
    for rows, expected in (
        ([3], (12, 3, 1)),
        ([2, 3, 4], (12, 2, 3)),
        ([1, 3, 5, 7, 9, 11], (2, 1, 1)),
        ([0, 1, 4, 5, 8, 9], (4, 0, 2)),
        ([3, 7, 11], (4, 3, 1)),
    ):
        assert find_rows(torch.tensor(rows), 12) == expected
        assert Rows(*expected).of(torch.arange(12)).flatten().tolist() == rows
    for rows in ([2, 1], [0, 1, 3], [1, 1], [0, 2], [5, 6, 11, 0]):
        assert find_rows(torch.tensor(rows), 12) is None


def with_image(arch: str, model) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    """Tokens, and what ours and transformers' model get beside them; of a vision-language model an image."""
    if arch in test_gemma3.FAMILIES:
        ids, types, _, _, pixels = test_gemma3.make(model, [[3, test_gemma3.IMAGE, 9]])
        if arch == "paligemma":  # whose prefix follows from the labels
            return ids, {"pixel_values": pixels}, {"pixel_values": pixels}
        return ids, {"pixel_values": pixels}, {"pixel_values": pixels, "token_type_ids": types}
    if arch in ("gemma4", "gemma4_unified"):
        ids, _, _, images, types = test_gemma4_images.make(model, [[3, (2, 3), 9]])
        return ids, images, images | types
    if arch == "llama4":
        ids, _, _, pixels = test_llama4.make(model, [[3, (2,), 9]])
        return ids, {"pixel_values": pixels}, {"pixel_values": pixels}
    if arch == "mllama":
        ids, labels, inputs = test_mllama.make(model, [3, test_mllama.IMAGE, 9])
        return ids, inputs | {"labels": labels}, inputs | {"labels": labels}
    if arch == "llava_next":
        ids, _, _, images = test_llava_next.make(model, [[3, (20, 30), 9]])
        return ids, images, images
    if arch == "llava":
        ids, _, _, images = test_llava.make(model, [[3, test_llava.IMAGE, 9]])
        return ids, images, images
    if arch == "mistral3":
        ids, _, _, images = test_image_sizes.make(model, [[3, (2, 3), 9]])
        return ids, images, images
    if arch == "lfm2_vl":
        ids, _, _, images = test_lfm2_vl.make(model, [[3, (2, 3), 9]])
        return ids, images, images
    if arch in test_tiles.FAMILIES:
        rows = [[3, test_tiles.TILE, 9]]
        ids, _, _, pixels = test_tiles.make(model, rows)
        return ids, {"pixel_values": pixels}, test_tiles.for_rows(model, rows, pixels)
    if arch in dict(VISION_CASES):
        batch = test_vision.Batch(model, test_vision.ONE)
        return batch.ids, batch.inputs, batch.inputs | {"mm_token_type_ids": batch.kinds}
    return tokens(arch, next(iter(tiny(arch))), 2, 12), {}, {}


def learned_by(theirs) -> dict[str, torch.Tensor]:
    """The gradients of PEFT's adapters, under the names in its files."""
    return {
        name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }


def assert_equal_to_peft(ours, theirs, ids, our_inputs=None, their_inputs=None) -> None:
    our_inputs, their_inputs = {"labels": ids, **(our_inputs or {})}, {"labels": ids, **(their_inputs or {})}
    want = theirs(input_ids=ids, **their_inputs)
    want.loss.backward()
    want, logits = want.loss, want.logits
    assert error(ours(ids, return_logits=True, **our_inputs).logits, logits) <= LIMIT
    got = ours(ids, **our_inputs).loss
    assert error(got, want) <= LIMIT
    got.backward()
    grads, learned = under_peft_names(ours, lambda parameter: parameter.grad), learned_by(theirs)
    assert grads.keys() == learned.keys()
    assert all((grads[name] is None) == (gradient is None) for name, gradient in learned.items())
    learned = {name: gradient for name, gradient in learned.items() if gradient is not None}
    beyond = [name for name, gradient in learned.items() if error(grads[name], gradient) > LIMIT]
    if beyond:  # sums whose terms cancel are rounded on both sides: PEFT in fp64 judges them, by the same limit
        wide = copy.deepcopy(theirs).double()
        wide.set_experts_implementation("eager")  # the others have no fp64
        wide.zero_grad()
        given = {name: x.double() if x.is_floating_point() else x for name, x in their_inputs.items()}
        wide(input_ids=ids, **given).loss.backward()
        exact = learned_by(wide)
        for name in beyond:
            assert error(grads[name], exact[name]) <= LIMIT, name
    # Adapters of a tower's layers whose output the text does not read have no gradients on both sides.
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is not None) == (parameter.requires_grad and "visual.unread." not in name), name


@pytest.mark.cases(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "use_dora"),
    [
        *(pytest.param(arch, False, marks=beyond_kinds(arch)) for arch in list_archs()),
        *(pytest.param(arch, True, marks=beyond_kinds(arch)) for arch in sorted(dict(VISION_CASES))),
    ],
)
def test_every_architecture_is_peft_on_transformers(arch, use_dora, root, tmp_path):
    """Ours writes the adapters, PEFT reads them into the model of transformers; those of vision towers as well."""
    variant = next(iter(tiny(arch)))
    folder = make_folder(arch, variant, root)
    # PEFT takes the projections of a shared expert for those of experts, and has no DoRA for parameters.
    named = use_dora and arch in SHARED_EXPERTS
    targets: Any = r".*attn\.\w*proj\w*|.*shared_expert_gate" if named else "all-linear"
    targets = r".*\.(?!out_proj|fc\d_latent)\w*_proj" if arch in STATE_SPACE else targets
    config = LoRAConfig(r=4, lora_alpha=6, use_dora=use_dora, target_modules=targets)
    ours = stir(apply_lora(load(arch, folder), config))
    save_adapter(ours, tmp_path / "adapter", base=str(folder))
    theirs = peft.PeftModel.from_pretrained(hf_model(folder), tmp_path / "adapter", is_trainable=True)
    assert_equal_to_peft(ours.train(), theirs.train(), *with_image(arch, ours))


@pytest.mark.parametrize(
    ("arch", "targets"),
    [
        ("qwen2_vl", ["proj", "q_proj"]),  # PEFT would find the patch embedding's, a convolution, as well
        ("qwen2_vl", r".*\.(proj|v_proj)"),
        ("mixtral", r".*(0|1).*proj"),
        ("mistral3", ["merging_layer"]),
        ("mllama", ["multi_modal_projector", "fc2"]),
    ],
)
def test_what_is_named_is_adapted_by_peft_and_nothing_else(arch, targets, root, tmp_path):
    folder = make_folder(arch, next(iter(tiny(arch))), root)
    ours = stir(apply_lora(load(arch, folder), LoRAConfig(r=4, target_modules=targets)))
    save_adapter(ours, tmp_path / "adapter", base=str(folder))
    theirs = peft.PeftModel.from_pretrained(hf_model(folder), tmp_path / "adapter", is_trainable=True)
    assert_equal_to_peft(ours.train(), theirs.train(), *with_image(arch, ours))
    again = load_adapter(load(arch, folder), tmp_path / "adapter")
    assert under_peft_names(again, lambda parameter: 0) == under_peft_names(ours, lambda parameter: 0)


@pytest.mark.cases(5)
@pytest.mark.parametrize("arch", sorted(dict(VISION_CASES)))
def test_a_language_model_beside_a_tower(arch, root, tmp_path):
    """Adapters of it alone and of the head, merged and saved."""
    folder = make_folder(arch, next(iter(tiny(arch))), root)
    targets = r"(model\.)?language_model\..*\.[qv]_proj|(language_model\.)?lm_head"
    model = stir(apply_lora(load(arch, folder), LoRAConfig(r=4, target_modules=targets)))
    assert not any(p.requires_grad for name, p in model.named_parameters() if is_tower(name))
    ids, inputs, _ = with_image(arch, model)
    inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    logits = model(ids, **inputs).logits
    assert error(load(arch, folder)(ids, **inputs).logits, logits) > 1e-3
    merged = merge_lora(model)
    assert error(merged(ids, **inputs).logits, logits) <= LIMIT
    merged.save_pretrained(tmp_path / "merged")
    assert error(load(arch, tmp_path / "merged")(ids, **inputs).logits, logits) <= LIMIT


@pytest.mark.cases(9)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("variant", ["gqa", "biases"])
@pytest.mark.parametrize(
    "targets", [SOME, ["k_proj", "o_proj", "up_proj", "lm_head"], r".*\.1\.mlp\.\w+_proj"], ids=str
)
def test_every_kind_is_peft_on_transformers(kind, variant, targets, root, tmp_path):
    """PEFT writes the adapters, ours reads them."""
    folder = make_folder("llama", variant, root)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, **kind)
    theirs = stir(peft.get_peft_model(hf_model(folder), config))
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(load("llama", folder), tmp_path)
    assert adapter_config(ours).scaling == (3 if kind.get("use_rslora") else 1.5)
    assert_equal_to_peft(ours, theirs, tokens("llama", variant, 2, 12))


def test_names_that_a_model_lacks_are_passed_over_in_files_of_peft(root, tmp_path):
    """One list of names for many models is what people write, and PEFT takes it if one of them fits."""
    folder = make_folder("phi3", next(iter(tiny("phi3"))), root)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = stir(peft.get_peft_model(hf_model(folder), peft.LoraConfig(r=4, target_modules=names)))
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(load("phi3", folder), tmp_path)
    assert_equal_to_peft(ours, theirs, tokens("phi3", next(iter(tiny("phi3"))), 2, 12))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["fc1"]}))
    with pytest.raises(ValueError, match="got 'fc1'"):
        load_adapter(load("phi3", folder), tmp_path)


def test_files_go_around(tmp_path):
    model = llama(LoRAConfig(target_modules=SOME, use_dora=True))
    save_adapter(model, tmp_path, base="meta-llama/Llama-3.2-1B")
    keys = json.loads((tmp_path / "adapter_config.json").read_text())
    assert keys["target_modules"] == SOME
    assert keys["base_model_name_or_path"] == "meta-llama/Llama-3.2-1B"
    again = load_adapter(llama(), tmp_path)
    assert again(IDS).logits.equal(model(IDS).logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_new_adapters_change_nothing():
    for kind in KINDS:
        model = llama()
        logits = model(IDS).logits
        apply_lora(model, LoRAConfig(**kind))
        torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_merge_unmerge_and_export(kind, tied, tmp_path):
    config = LoRAConfig(target_modules=[*SOME, "k_proj", "gate_proj", "lm_head"], **kind)
    model = llama(config, tie_word_embeddings=tied)
    before, state = model(IDS).logits, copy.deepcopy(model.state_dict())
    merge_lora(model, reversible=True)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-5)
    model.to(torch.float32)  # ties again what the config says is tied
    model.save_pretrained(tmp_path)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(exported(IDS).logits, before, rtol=1e-4, atol=1e-5)
    unmerge_lora(model)
    assert model.state_dict().keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert model(IDS).logits.equal(before)
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied


def test_an_adapted_model_is_not_saved_as_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="Save LoRA adapters with save_adapter, or merge them"):
        llama(LoRAConfig()).save_pretrained(tmp_path / "model")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_policies(dropout):
    """The same gradients, also where elements are dropped: the backward draws the same ones."""
    model = llama(LoRAConfig(lora_dropout=dropout))
    results = []
    for policy in CHECKPOINTING_POLICIES:
        model.set_checkpointing(policy)
        model.zero_grad()
        torch.manual_seed(3)
        model(IDS, labels=IDS).loss.backward()
        results.append(gradients(model))
    for other in results[1:]:
        for name, gradient in results[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_losses_of_hidden_states_see_the_adapter_of_the_head(kind):
    """Log-probabilities and preference losses are those of the logits, and so are the gradients."""
    model = llama(LoRAConfig(target_modules=["q_proj", "lm_head"], **kind))
    log_probs = model(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    found = model(IDS, labels=IDS, return_log_probs=True).log_probs
    torch.testing.assert_close(found[:, :-1], log_probs)
    chosen, rejected = log_probs.sum(1)
    want = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
    want.backward()
    expected = gradients(model)
    model.zero_grad()
    loss = LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=False)
    got, _ = model(IDS, labels=IDS, loss_function=lambda x, weight, target: loss(weight, x, target)).loss
    got.backward()
    torch.testing.assert_close(got, want)
    assert gradients(model).keys() == expected.keys()
    for name, gradient in gradients(model).items():
        assert error(gradient, expected[name]) <= LIMIT, name


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_frozen_model_is_still_there(kind):
    plain, model = llama(), llama(LoRAConfig(target_modules=SOME + OTHERS, lora_dropout=0.5, **kind))
    expected, adapted = plain(IDS, labels=IDS, return_logits=True), model.eval()(IDS).logits
    model.train()
    with without_adapters(model):
        out = model(IDS, labels=IDS, return_logits=True)
        with without_adapters(model), pytest.raises(ValueError, match="input_ids"):
            model()
        assert torch.equal(model(IDS).logits, out.logits)
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(model.eval()(IDS).logits, adapted)
    with pytest.raises(ValueError, match="LigerLlama must have adapters, got none"), without_adapters(plain):
        pass


def test_dropout():
    model = llama(LoRAConfig(lora_dropout=0.5, target_modules=["q_proj", "lm_head"]))
    assert not model(IDS).logits.equal(model(IDS).logits)
    model.eval()
    assert model(IDS).logits.equal(model(IDS).logits)
    x = torch.ones(1, 32)
    layer = model.layers[0].self_attn.qkv_proj.train()
    base = torch.nn.functional.linear(x, layer.weight)
    mean = torch.stack([layer(x) - base for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, layer.eval()(x) - base, rtol=0.1, atol=0.02)


def test_dropout_saves_a_byte_for_each_element():
    dropout = llama(LoRAConfig(lora_dropout=0.5)).layers[0].self_attn.qkv_proj.dropout
    x, saved = torch.ones(6, 32, dtype=torch.bfloat16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = dropout(x)
    assert sum(each.nbytes for each in saved) == 6 * 32
    y.sum().backward()
    assert torch.equal(x.grad, y)
    assert set(y.flatten().tolist()) == {0.0, 2.0}
    assert dropout.eval()(x) is x


@pytest.mark.parametrize("use_dora", [False, True])
def test_logits_without_gradients_are_those_with_them(use_dora, backend, monkeypatch):
    """The head adds its low-rank term to the logits, instead of columns to its weight."""
    model = llama(LoRAConfig(use_dora=use_dora, target_modules=["lm_head"])).to(backend).eval()
    ids = IDS[:, :5].to(backend)
    want = model(ids).logits.detach()
    monkeypatch.delattr(type(model.lm_head), "operands")
    monkeypatch.delattr(LigerLMHead, "operands")
    with torch.no_grad():
        for got, count in ((model(ids).logits, 0), (model(ids, logits_to_keep=1).logits, -1)):
            torch.testing.assert_close(got, want[:, count:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "lm_head"], "all-linear"], ids=["some", "all"])
def test_fused_ops_with_and_without_adapters(targets, kernel_device):
    """In Triton's interpreter, with frozen weights: the kernels' loss and gradients are the references'."""
    from liger_models.kernels import dispatch

    model = llama(LoRAConfig(target_modules=targets)).to(kernel_device)
    ids = IDS.to(kernel_device)
    loss = model(ids, labels=ids).loss
    loss.backward()
    got = gradients(model)
    model = llama(LoRAConfig(target_modules=targets))
    with dispatch.reference_backend():
        want = model(IDS, labels=IDS).loss
        want.backward()
    assert error(loss, want) <= LIMIT
    for name, gradient in gradients(model).items():
        assert error(got[name], gradient) <= 1e-4, name


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", ["nf4", "float8"])
@pytest.mark.parametrize("policy", CHECKPOINTING_POLICIES)
def test_fused_ops_on_a_quantized_base(policy, dtype, kernel_device, monkeypatch):
    """Loss and gradients are those of the same ops with the dequantized weights, dense, and of the references."""
    pytest.importorskip("torchao")
    from liger_models.kernels import dispatch
    from liger_models.kernels.linear import projection

    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model, dense = (llama(LoRAConfig(r=4), **sizes) for _ in range(2))
    quantize_base(model, dtype=dtype)
    for path, layer in adapted_layers(model).items():
        dense.get_submodule(path).weight.data.copy_(layer.dense_weight())
    products = []
    linear_forward = projection.linear_forward
    spy = lambda x, weight, *rest: products.append(type(weight)) or linear_forward(x, weight, *rest)
    monkeypatch.setattr(projection, "linear_forward", spy)
    found = []
    for each in (model, dense):
        each.set_checkpointing(policy)
        never_ahead(each)  # the recorded step calls the products, too
        found.append(on(kernel_device, each, IDS, {}))
    assert products.count(FrozenWeight) == products.count(torch.nn.Parameter) >= 2
    with dispatch.reference_backend():
        found.append(on("cpu", model, IDS, {}))
    (loss, grads), *others = found
    for other, expected in others:
        assert error(loss, other) <= LIMIT
        assert grads.keys() == expected.keys()
        for name, gradient in expected.items():
            assert error(grads[name], gradient) <= 1e-4, name


@pytest.mark.parametrize("dtype", [None, "nf4", "float8"])
def test_one_op_computes_a_layer(dtype, kernel_device, monkeypatch):
    """What the separate products do; where it must not (DoRA, dropout, other ways of computing), it is not called."""
    from liger_models.adapters import lora_layers
    from liger_models.kernels import dispatch
    from liger_models.kernels.matmul import batch_invariance

    calls, original = [], lora_layers.low_rank_linear
    monkeypatch.setattr(lora_layers, "low_rank_linear", lambda *args: calls.append(1) or original(*args))
    x, ids = torch.randn(1, 64, device=kernel_device), IDS[:1, :1].to(kernel_device)
    for kind, expected in (({}, 1), ({"use_dora": True}, 0), ({"lora_dropout": 0.1}, 0)):
        model = llama(LoRAConfig(r=4, target_modules=["q_proj", "v_proj", *OTHERS[1:3], "down_proj"], **kind),
                      hidden_size=64, intermediate_size=128)  # fmt: skip
        model = model if dtype is None else quantize_base(model, dtype=dtype)
        for name, parameter in model.to(kernel_device).named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter, std=0.1)
        layer = model.layers[0].self_attn.qkv_proj
        with torch.no_grad():
            layer(x)
            assert len(calls) == expected
            with torch.autocast(kernel_device, torch.float16):
                layer(x)
            with batch_invariance.batch_invariant():
                layer(x)
            model.eval()
            with dispatch.reference_backend():
                want = layer.cpu()(x.cpu())
                logits = model.cpu()(ids.cpu()).logits
        layer.to(kernel_device)(x)  # with gradients, and in evaluation without dropout
        assert len(calls) == expected + ("use_dora" not in kind)
        with torch.no_grad():
            torch.testing.assert_close(layer(x).cpu(), want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model.to(kernel_device)(ids).logits.cpu(), logits, rtol=1e-4, atol=1e-5)
        calls.clear()


@pytest.mark.parametrize(("policy", "matrices"), [("none", 7), ("selective", 4)])
def test_a_block_with_adapters_keeps_what_a_trained_one_does(policy, matrices, monkeypatch):
    """With many rows, A x is kept besides for each adapted matrix, but not in an MLP that is recomputed."""

    def per_token(model):
        return saved_bytes(model, policy, 127, torch.float32) - saved_bytes(model, policy, 63, torch.float32)

    layers, rows, r, size = 2, 64, 4, 4
    assert per_token(llama(LoRAConfig(r=r))) == per_token(llama())
    monkeypatch.setattr("liger_models.kernels.linear.projection.MANY_ROWS", 1)
    assert per_token(llama(LoRAConfig(r=r))) - per_token(llama()) == layers * rows * matrices * r * size
    assert per_token(llama(LoRAConfig(lora_dropout=0.1))) > per_token(llama()) + 64 * 32 * 4


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", ["nf4", "float8"])
@pytest.mark.parametrize("policy", ["none", "selective"])
def test_a_block_on_a_quantized_base_keeps_what_a_dense_one_does(policy, dtype, kernel_device):
    """As autograd counts it: no input of an adapter and no dequantized weight."""
    pytest.importorskip("torchao")

    def measured(tokens, quantized):
        model = llama(LoRAConfig(r=4), hidden_size=64, intermediate_size=128)
        model = (quantize_base(model, dtype=dtype) if quantized else model).to(kernel_device)
        model.set_checkpointing(policy)
        return measured_bytes(model, torch.ones(1, tokens, dtype=torch.int64, device=kernel_device))

    dense, quantized = ([measured(tokens, each) for tokens in (16, 48)] for each in (False, True))
    assert quantized[1] - quantized[0] == dense[1] - dense[0] > 0


def assert_blocks_compile(model) -> None:
    """The gradients are the same after all blocks are compiled."""
    model(IDS, labels=IDS).loss.backward()
    want = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    for block in model.layers:
        block.compile(fullgraph=True, backend="aot_eager")
    model(IDS, labels=IDS).loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.compile
@pytest.mark.parametrize("kind", [{}, {"use_dora": True}], ids=str)
def test_blocks_compile(kind):
    model = llama(LoRAConfig(**kind))
    assert_blocks_compile(model)


def test_adapters_learn_and_decode():
    model = llama(LoRAConfig(r=8, lora_alpha=16))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) < 0.6 * sum(p.numel() for p in llama().parameters())
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(model.get_parameter(name).equal(value) for name, value in frozen.items())
    ids = model.generate(IDS[:, :8], max_new_tokens=4, eos_token_id=[])
    assert ids.equal(merge_lora(model).generate(IDS[:, :8], max_new_tokens=4, eos_token_id=[]))


def test_half_precision_models_have_fp32_adapters():
    model = apply_lora(llama().bfloat16(), LoRAConfig(use_dora=True, target_modules=["q_proj", "lm_head"]))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert abs(loss - llama()(IDS, labels=IDS).loss) < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(llama(LoRAConfig())(IDS, labels=IDS).loss, loss, atol=0.1, rtol=0)


def test_nf4_base():
    """4 bits in memory; loss and gradients are those of a model that has the rounded weights in fp32."""
    pytest.importorskip("torchao")
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    model = quantize_base(llama(LoRAConfig(r=4), **sizes))
    rounded = llama(LoRAConfig(r=4), **sizes)
    quantized = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, LoRALinear)]
    assert len(quantized) == 2 * 4
    for path, layer in quantized:
        other = rounded.get_submodule(path).weight
        assert 0 < error(layer.dense_weight(), other) < 0.15
        other.data.copy_(layer.dense_weight())
        stored = layer.weight.nbytes + layer.stored.scales.nbytes
        assert stored < other.nbytes / 7
    for policy in ("none", "full"):
        for each in (model, rounded):
            each.zero_grad()
            each.set_checkpointing(policy)
        loss, want = model(IDS, labels=IDS).loss, rounded(IDS, labels=IDS).loss
        assert error(loss, want) <= LIMIT
        loss.backward()
        want.backward()
        got = gradients(model)
        for name, gradient in gradients(rounded).items():
            assert error(got[name], gradient) <= LIMIT, name
    logits = model(IDS).logits
    torch.testing.assert_close(merge_lora(model)(IDS).logits, logits, rtol=1e-4, atol=1e-5)


def test_float8_base():
    """8 bits in memory; what it computes is what a model with the rounded weights does, before and after merging."""
    pytest.importorskip("torchao")
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model = quantize_base(llama(LoRAConfig(r=4), **sizes), dtype="float8")
    rounded = llama(LoRAConfig(r=4), **sizes)
    for path, layer in adapted_layers(model).items():
        other = rounded.get_submodule(path).weight
        assert 0 < error(layer.dense_weight(), other) < 0.05
        other.data.copy_(layer.dense_weight())
        assert layer.weight.nbytes == other.nbytes // 4
    for each in (model, rounded):
        each(IDS, labels=IDS).loss.backward()
    want = gradients(rounded)
    for name, gradient in gradients(model).items():
        assert error(gradient, want[name]) <= LIMIT, name
    logits = model(IDS).logits
    torch.testing.assert_close(logits, rounded(IDS).logits)
    ids = model.generate(IDS[:, :8], max_new_tokens=4, eos_token_id=[])
    assert ids.equal(rounded.generate(IDS[:, :8], max_new_tokens=4, eos_token_id=[]))
    torch.testing.assert_close(merge_lora(model, reversible=True)(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(unmerge_lora(model)(IDS).logits, logits)
    assert all(frozen_format(layer).name == "float8" for layer in adapted_layers(model).values())


@pytest.mark.cases(1)
@pytest.mark.parametrize("use_dora", [False, True])
def test_products_in_float8_learn_as_those_in_bfloat16(use_dora, kernel_device, monkeypatch):
    """On a GPU with float8; here the CPU multiplies, with torch's casts for those of the interpreter."""
    pytest.importorskip("torchao")
    from liger_models.kernels.frozen import frozen_float8_linear

    monkeypatch.setattr(frozen_float8_linear, "MOST_ROWS", 1)  # as for more tokens than these
    if kernel_device == "cpu":
        monkeypatch.setattr(frozen_float8_linear, "quantize_rows", frozen_float8_linear.quantize_rows_reference)
    model = llama(LoRAConfig(r=4, use_dora=use_dora), hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    (want, wanted), found = on(kernel_device, model, IDS, {}), []
    for place, name in ((torch, "_scaled_mm"), (frozen_float8_linear, "tile_product")):
        product = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *args, product=product, **options: found.append(1) or product(*args, **options)
        )
    loss, grads = on(kernel_device, quantize_base(model, dtype="float8"), IDS, {})
    # Forward and backward of 4 products in 2 layers, but for the gradient of the embeddings, which nobody asks for.
    assert len(found) == 2 * 2 * 4 - 1
    assert error(loss, want) < 0.01
    assert all(error(grads[name], gradient) < 0.25 for name, gradient in wanted.items())
    joined = [torch.cat([each.float().flatten() for each in of.values()]) for of in (grads, wanted)]
    assert torch.cosine_similarity(*joined, dim=0) > 0.99


def test_quantized_weights_can_be_loaded_again():
    pytest.importorskip("torchao")
    model = llama(LoRAConfig(r=4), hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    dense = {name: each.clone() for name, each in hf_tensors(model, merge=False)}
    quantized = dict(hf_tensors(quantize_base(model, dtype="float8"), merge=False))
    load_hf_tensors(model, dense)
    again = dict(hf_tensors(model, merge=False))
    assert all(torch.equal(again[name], tensor) for name, tensor in quantized.items())
    assert not all(torch.equal(again[name], tensor) for name, tensor in dense.items())


@pytest.mark.parametrize("dtype", ["nf4", "float8"])
def test_weights_that_are_quantized_as_they_are_read(dtype, tmp_path):
    """The model equals one that is quantized after loading: weights, loss, tokens, and the merged model."""
    pytest.importorskip("torchao")
    from liger_models.train.report import estimate

    config = LoRAConfig(r=4)
    llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    read = lambda shard: LigerLlama.from_pretrained(tmp_path, progress=False, shard=shard)
    want = quantize_base(stir(apply_lora(read(None), config)), dtype=dtype)
    model = stir(read(lambda model: quantize_base(apply_lora(model, config), dtype=dtype)))
    for name, parameter in want.named_parameters():
        if ".lora." in name:
            model.get_parameter(name).data.copy_(parameter)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora." in name)
    kinds = {"four_bit": dtype == "nf4", "float8": dtype == "float8"}
    counted, expected = (estimate(each, 64, **kinds) for each in (model, want))
    assert counted._replace(weights=0) == expected._replace(weights=0)
    assert abs(counted.weights / expected.weights - 1) < 0.01  # factors of scales
    assert model.num_parameters() == want.num_parameters()
    outputs = [each(IDS, labels=IDS) for each in (model, want)]
    for each in outputs:
        each.loss.backward()
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert all(torch.equal(gradient, gradients(want)[name]) for name, gradient in gradients(model).items())
    ids = [each.generate(IDS[:, :8], max_new_tokens=4, eos_token_id=[]) for each in (model, want)]
    assert torch.equal(*ids)
    frozen = {name: each.clone() for name, each in model.named_parameters()}
    for merged, other in zip(hf_tensors(merge_lora(model, reversible=True)), hf_tensors(want), strict=True):
        assert merged[0] == other[0]
        assert torch.equal(merged[1], other[1])
    for name, parameter in unmerge_lora(model).named_parameters():
        assert torch.equal(parameter, frozen[name])


def test_4_bits_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match=r"quantize_base: .*pip install 'liger_models\[lora\]'"):
        quantize_base(llama(LoRAConfig()))


def on(device: str, model, ids, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients."""
    model.to(device).zero_grad()
    inputs = {"labels": ids} | inputs
    loss = model(ids.to(device), **{name: tensor.to(device) for name, tensor in inputs.items()}).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.gpu
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen2_vl", "gemma3"])
def test_a_gpu_is_as_the_cpu(arch, use_dora, root):
    folder = make_folder(arch, next(iter(tiny(arch))), root)
    model = stir(apply_lora(load(arch, folder), LoRAConfig(r=4, use_dora=use_dora)))
    ids, inputs, _ = with_image(arch, model)
    (want, wanted), (got, found) = (on(device, model, ids, inputs) for device in ("cpu", "cuda"))
    assert error(got, want) <= LIMIT
    for name, gradient in wanted.items():
        assert error(found[name], gradient) <= LIMIT, name


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_nf4_on_a_gpu_is_as_on_the_cpu(policy):
    model = quantize_base(llama(LoRAConfig(r=4), hidden_size=128, intermediate_size=256))
    model.set_checkpointing(policy)
    (want, wanted), (got, found) = (on(device, model, IDS, {}) for device in ("cpu", "cuda"))
    assert error(got, want) <= LIMIT
    for name, gradient in wanted.items():
        assert error(found[name], gradient) <= LIMIT, name


@pytest.mark.gpu
def test_nf4_on_the_way_to_a_gpu_takes_no_room_for_dense_weights():
    pytest.importorskip("torchao")
    # Quantizing one weight takes about as much as seven copies of it in bf16, so there must be many.
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    model = llama(LoRAConfig(r=4), **sizes).to(torch.bfloat16)
    dense = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, LoRALinear))
    want = quantize_base(copy.deepcopy(model))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize_base(model, "cuda")
    assert torch.cuda.max_memory_allocated() - before < dense
    for name, layer in model.named_modules():
        if isinstance(layer, LoRALinear):
            assert torch.equal(layer.dense_weight().cpu(), want.get_submodule(name).dense_weight())
    assert all(parameter.is_cuda for parameter in model.parameters())


@pytest.mark.parametrize("arch", ["gemma4", "gemma4_unified", "muse_glimmer"])
def test_quantized_patch_embeddings_take_pixels(arch):
    """The weight has the dtype of its codes, which is none for pixels."""
    pytest.importorskip("torchao")
    model = quantize_base(apply_lora(build(*image_config(arch)), LoRAConfig(r=2)), dtype="float8")
    assert any(name.startswith("visual.patch_embed.lora") for name, _ in model.named_parameters())
    model(**image_batch(model.config, 0)).loss.backward()
    assert all(each.grad is not None for name, each in model.named_parameters() if name.endswith("lora_B"))


MIXTURE = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], "Did you mean q_proj?"),
        (["w1"], "Routed experts are named experts.down_proj, experts.gate_up_proj, also in target_parameters"),
        (["gate"], "Routers, norms and the embedding have no adapters"),
        (["embed_tokens"], "the embedding have no adapters"),
        ("q_proj", r"A string is a regular expression for whole names.* a list: \['q_proj'\]"),
        ("(q_proj", "must be a regular expression, got '\\(q_proj'"),
        ([], "must name linear layers .*, got none"),
    ],
)
def test_names_that_are_nothing(targets, message):
    with pytest.raises(ValueError, match=message):
        apply_lora(AutoLigerModel.from_config(MIXTURE), LoRAConfig(target_modules=targets))


WRONG: list[dict[str, Any]] = [
    *({"r": value} for value in (0, 2.0, "8", True, None)),
    *({"lora_alpha": value} for value in (float("nan"), float("inf"), "16", None, True)),
    *({"lora_dropout": value} for value in (1.0, -0.1, float("nan"), "0.1")),
    *({name: value} for name in ("use_rslora", "use_dora") for value in ("false", 1, None)),
    *({"target_modules": value} for value in ([1], None, 3, ["q_proj", None])),
    *({"target_parameters": value} for value in ("experts.down_proj", [1], 3)),
]
"""Settings of adapters that are out of range or of another type."""


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_settings_out_of_range(change):
    with pytest.raises(ValueError, match=f"LoRAConfig: {next(iter(change))} must be"):
        LoRAConfig(**change)


def test_files_with_wrong_settings_leave_the_model_as_it_was(tmp_path):
    """Neither adapted nor frozen; and so do tensors of integers."""
    save_adapter(llama(LoRAConfig()), tmp_path)
    file, model = tmp_path / "adapter_config.json", llama()
    model.norm.requires_grad_(False)
    before = {name: (each.requires_grad, each.clone()) for name, each in model.named_parameters()}

    def assert_unchanged():
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        for name, (requires_grad, values) in before.items():
            assert after[name].requires_grad == requires_grad
            assert torch.equal(after[name], values)

    keys = json.loads(file.read_text())
    for change in WRONG:
        file.write_text(json.dumps(keys | change))
        with pytest.raises(ValueError, match=rf"adapter_config\.json: .*{next(iter(change))}"):
            load_adapter(model, tmp_path)
        assert_unchanged()
    file.write_text(json.dumps(keys))
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    (*_, last) = tensors
    for tensor in (tensors[last].int(), tensors[last][..., :1].clone()):
        save_file(tensors | {last: tensor}, weights)
        with pytest.raises(ValueError, match="must be floats"):
            load_adapter(model, tmp_path)
        assert_unchanged()
    adapted = llama(LoRAConfig())
    with pytest.raises(ValueError, match="must not have adapters yet"):
        load_adapter(adapted, tmp_path)
    assert adapter_config(adapted) is not None


@pytest.mark.cases(8)
@pytest.mark.parametrize("sizes", [(128, 64), (64, 128), (64, 64), (128, 192)], ids=str)
@pytest.mark.parametrize("dtype", ["nf4", "float8"])
@pytest.mark.parametrize("adapted", [True, False])
def test_a_quantized_model_is_copied(sizes, dtype, adapted):
    pytest.importorskip("torchao")
    width, intermediate = sizes
    model = llama(LoRAConfig(r=4) if adapted else None, hidden_size=width, intermediate_size=intermediate)
    quantize_base(model, dtype=dtype)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(IDS).logits, model(IDS).logits)
    assert not {each.data_ptr() for each in twin.parameters()} & {each.data_ptr() for each in model.parameters()}


def test_calls_out_of_order():
    model = llama(LoRAConfig())
    with pytest.raises(ValueError, match="must not have adapters yet"):
        apply_lora(model)
    with pytest.raises(ValueError, match="reversible=True"):
        unmerge_lora(merge_lora(model))
    with pytest.raises(ValueError, match="must have adapters"):
        merge_lora(llama())
    with pytest.raises(ValueError, match="must have adapters"):
        save_adapter(llama(), "nowhere")
    pytest.importorskip("torchao")
    with pytest.raises(ValueError, match="must not be quantized yet"):
        quantize_base(quantize_base(llama(LoRAConfig())), dtype="float8")
    with pytest.raises(ValueError, match="dtype must be one of nf4, float8, got 'int4'"):
        quantize_base(llama(LoRAConfig()), dtype="int4")


def test_layers_of_another_kind_are_not_left_out():
    class Other(torch.nn.Linear):
        """As torchao's Float8Linear."""

    model = llama()
    model.layers[0].self_attn.o_proj = Other(32, 32, bias=False)
    with pytest.raises(ValueError, match=r"must be nn\.Linear, got Other"):
        apply_lora(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_rank_without_tensors_of_its_size_is_refused_before_anything_is_allocated(tmp_path):
    save_adapter(llama(LoRAConfig()), tmp_path)
    file, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 10**9}))
    with pytest.raises(ValueError, match=r"adapter_config\.json: r must be the rank .* got 1000000000 and at most 8"):
        load_adapter(llama(), tmp_path)
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(())}, weights)
    with pytest.raises(ValueError, match="got 1000000000 and at most 0"):
        load_adapter(llama(), tmp_path)


def test_files_with_a_pattern_for_which_re_does_not_return(tmp_path):
    save_adapter(llama(LoRAConfig(target_modules=["q_proj"])), tmp_path)
    file = tmp_path / "adapter_config.json"
    keys = json.loads(file.read_text())
    file.write_text(json.dumps(keys | {"target_modules": r"(\w+\.?)+!"}))
    with pytest.raises(ValueError, match="must name linear layers"):
        load_adapter(llama(), tmp_path)
    file.write_text(json.dumps(keys | {"target_modules": r"(\w+\.?)+q_proj"}))
    assert adapter_config(load_adapter(llama(), tmp_path)).r == 8


def test_files_that_do_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        load_adapter(llama(), tmp_path)
    save_adapter(llama(LoRAConfig()), tmp_path)
    with pytest.raises(ValueError, match="too many or too few"):
        load_adapter(llama(num_hidden_layers=3), tmp_path)
    model = llama(intermediate_size=64)
    logits = model(IDS).logits
    with pytest.raises(ValueError, match="must be"):
        load_adapter(model, tmp_path)
    assert adapter_config(model) is None
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model(IDS).logits.equal(logits)
    assert model.state_dict().keys() == llama(intermediate_size=64).state_dict().keys()
    apply_lora(model)
    file = tmp_path / "adapter_config.json"
    keys = json.loads(file.read_text())
    changes: list[dict[str, Any]] = [{"peft_type": "IA3"}, {"bias": "all"}, {"rank_pattern": {"q_proj": 4}}]
    changes += [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"target_modules": None}]
    for change in changes:
        file.write_text(json.dumps(keys | change))
        with pytest.raises(ValueError, match=next(iter(change))):
            load_adapter(llama(), tmp_path)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json: must be JSON"):
        load_adapter(llama(), tmp_path)
    file.write_text(json.dumps(keys | {"init_lora_weights": "gaussian"}))
    load_adapter(llama(), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: must be a whole safetensors file, got 3 bytes"):
        load_adapter(llama(), tmp_path)
