"""Adapters of routed experts against PEFT's of transformers' parameters: outputs, gradients, files; and what runs with
them."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from liger_models import AutoLigerModel
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
from liger_models.adapters.lora import language_targets
from liger_models.adapters.lora_config import EXPERTS
from liger_models.adapters.lora_experts import LoRAExperts
from liger_models.adapters.lora_layers import adapted_layers
from liger_models.adapters.quantize import quantized_bytes, quantized_experts, quantized_layers
from liger_models.convert import get_hf_state_dict, load_hf_tensors
from liger_models.generation.loop import generate
from liger_models.generation.rollouts import rollout
from liger_models.kernels import dispatch
from liger_models.layers.frozen import frozen_parts, frozen_weights
from liger_models.layers.layer import CHECKPOINTING_POLICIES, routed_layers
from liger_models.memory.estimate import training_memory
from liger_models.parallel.state_checks import describe
from liger_models.train.loop import TrainOptions, load_model
from liger_models.train.report import estimate

from ..arch.families import LIMIT, error, hf_model, load, make_folder, tiny, tokens
from ..memory.test_estimate import DTYPE, TOKENS, measured_bytes, same_bytes, saved_bytes
from ..train.runs import no_group_is_left
from .test_lora import (
    IDS,
    MIXTURE,
    assert_blocks_compile,
    assert_equal_to_peft,
    gradients,
    llama,
    peft,
    root,
    stir,
    under_peft_names,
    with_image,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT and transformers
]
__all__ = ["no_group_is_left", "root"]

# PEFT takes targets such as "down_proj" for experts in some mixtures, so linear layers are named by a pattern here.
ATTENTION = r".*attn\.\w*proj\w*"
MIXTURES = [
    *((arch, None) for arch in ("mixtral", "qwen3_moe", "qwen3_vl_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss")),
    ("qwen3_moe", "mixed"), ("qwen3_5_moe", None), ("gemma4", "experts"), ("gemma4_text", "experts"),
    ("llama4_text", None), ("llama4", None), ("kimi_linear", None),
]  # fmt: skip
GPT_OSS = MIXTURE | {"model_type": "gpt_oss", "head_dim": 8, "sliding_window": 8, "swiglu_limit": 0.02}


def mixture(hf=MIXTURE, config: LoRAConfig | None = None, **options):
    torch.manual_seed(0)
    model = AutoLigerModel.from_config(hf, **options)
    return model if config is None else stir(apply_lora(model, config))


def experts(**config) -> LoRAConfig:
    return LoRAConfig(**{"r": 4, "target_modules": ["q_proj"], "target_parameters": EXPERTS, **config})


def values(parameter):
    return parameter.detach()


@pytest.mark.cases(4)
@pytest.mark.parametrize(("arch", "variant"), MIXTURES)
def test_every_mixture_is_peft_on_transformers(arch, variant, root, tmp_path):
    """Ours writes the adapters and PEFT reads them; PEFT writes them and ours reads the same bits."""
    folder = make_folder(arch, variant or next(iter(tiny(arch))), root)
    ours = stir(apply_lora(load(arch, folder), experts(lora_alpha=6, target_modules=ATTENTION)))
    save_adapter(ours, tmp_path / "ours", base=str(folder))
    theirs = peft.PeftModel.from_pretrained(hf_model(folder), tmp_path / "ours", is_trainable=True)
    assert_equal_to_peft(ours.train(), theirs.train(), *with_image(arch, ours))
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_adapter(load(arch, folder), tmp_path / "theirs")
    want = under_peft_names(ours, values)
    assert len(want) > 4
    assert under_peft_names(again, values).keys() == want.keys()
    assert all(tensor.equal(want[name]) for name, tensor in under_peft_names(again, values).items())


@pytest.mark.cases(4)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["shared_expert.up_proj"]], ids=str)
@pytest.mark.parametrize(("arch", "variant"), [("qwen3_next", "aux"), ("qwen3_moe", "mixed")])
def test_linear_layers_with_the_names_of_experts(arch, variant, targets, root, tmp_path):
    """PEFT would take them for experts, so that the file names their weights as parameters."""
    targets = ["layers.3.mlp.up_proj"] if arch == "qwen3_moe" and "shared_expert.up_proj" in targets else targets
    folder = make_folder(arch, variant, root)
    ours = stir(apply_lora(load(arch, folder), LoRAConfig(r=4, lora_alpha=6, target_modules=targets)))
    save_adapter(ours, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(hf_model(folder), tmp_path / "ours", is_trainable=True)
    assert_equal_to_peft(ours.train(), theirs.train(), tokens(arch, variant, 2, 12))
    theirs.save_pretrained(tmp_path / "theirs")
    want = under_peft_names(ours, values)
    for name in ("ours", "theirs"):
        again = under_peft_names(load_adapter(load(arch, folder), tmp_path / name), values)
        assert again.keys() == want.keys()
        assert all(tensor.equal(want[name]) for name, tensor in again.items())


@pytest.mark.cases(4)
@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[:1], EXPERTS[1:]], ids=str)
@pytest.mark.parametrize("arch", ["mixtral", "gpt_oss"])
def test_files_of_peft_come_back_bit_for_bit(arch, parameters, root, tmp_path):
    """Experts alone, one of their matrices or both; transformers has those of GPT-OSS transposed."""
    folder = make_folder(arch, next(iter(tiny(arch))), root)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=[], target_parameters=[f"mlp.{each}" for each in parameters]
    )
    theirs = stir(peft.get_peft_model(hf_model(folder), config))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_adapter(load(arch, folder), tmp_path / "theirs")
    assert_equal_to_peft(ours, theirs, tokens(arch, next(iter(tiny(arch))), 2, 12))
    save_adapter(ours, tmp_path / "ours")
    keys = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert keys["target_modules"] == []
    assert keys["target_parameters"] == sorted(parameters)
    got, want = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert got.keys() == want.keys()
    assert all(got[name].equal(tensor) for name, tensor in want.items())


@pytest.mark.parametrize("hf", [MIXTURE, GPT_OSS], ids=["mixtral", "gpt_oss"])
def test_merge_unmerge_and_export(hf, tmp_path):
    model, plain = mixture(hf, experts(use_rslora=True)), mixture(hf)
    before, state = model(IDS).logits, copy.deepcopy(model.state_dict())
    assert error(plain(IDS).logits, before) > 1e-3
    tensors = get_hf_state_dict(model)
    unmerged = get_hf_state_dict(model, merge=False)
    assert all(tensor.equal(unmerged[name]) for name, tensor in get_hf_state_dict(plain).items())
    merge_lora(model, reversible=True)
    assert not adapted_layers(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert error(model(IDS).logits, before) <= LIMIT
    model.save_pretrained(tmp_path)
    assert error(hf_model(tmp_path)(IDS).logits, before) <= LIMIT
    assert all(tensor.equal(tensors[name]) for name, tensor in get_hf_state_dict(model).items())
    unmerge_lora(model)
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert model(IDS).logits.equal(before)
    with pytest.raises(ValueError, match=r"must not have adapters, got some on layers.0.mlp, "):
        apply_lora(mixture(hf), experts(target_modules=[])).save_pretrained(tmp_path)


def test_new_adapters_change_nothing_and_can_be_switched_off():
    plain, model = mixture(), apply_lora(mixture(), experts(lora_dropout=0.5))
    logits = plain(IDS).logits
    assert model.eval()(IDS).logits.equal(logits)
    stir(model)
    with without_adapters(model.train()):
        assert model(IDS).logits.equal(logits)
    assert not model(IDS).logits.equal(model(IDS).logits)
    assert model.eval()(IDS).logits.equal(model(IDS).logits)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}
    assert sum(name.startswith("layers.1.mlp.lora.") for name in trained) == 4


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_policies(dropout):
    """The same gradients, also where elements are dropped: the backward draws the same ones."""
    model, results = mixture(config=experts(lora_dropout=dropout)), []
    for policy in CHECKPOINTING_POLICIES:
        model.set_checkpointing(policy)
        model.zero_grad()
        torch.manual_seed(3)
        model(IDS, labels=IDS).loss.backward()
        results.append(gradients(model))
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for name, gradient in results[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-7)


def test_padding_and_packing_leave_a_document_as_it_is():
    model = mixture(config=experts())
    one, other = IDS[:1, :6], IDS[1:, :5]
    alone = model(one).logits[0], model(other).logits[0]
    packed = model(torch.cat([one, other], 1), cu_seqlens=torch.tensor([0, 6, 11])).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)
    padded = torch.cat([torch.nn.functional.pad(other, (1, 0)), one])
    mask = torch.ones_like(padded).index_fill_(1, torch.tensor([0]), 0) | torch.tensor([[0], [1]])
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[0, 1:], alone[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hf", [MIXTURE, GPT_OSS], ids=["mixtral", "gpt_oss"])
def test_decoding(hf):
    """With the cache, with pages, and as the merged model decodes; A and B are computed once."""
    model, prompts = mixture(hf, experts()).eval(), [[5, 3, 9], [7, 8, 2, 4, 1]]
    found, original = [], LoRAExperts.low_ranks
    options = {"max_new_tokens": 5, "eos_token_id": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoRAExperts, "low_ranks", lambda self, dtype: found.append(original(self, dtype)) or found[-1])
        got = generate(model, prompts, **options)
    firsts = {pair[0][0].data_ptr() for pair in found}
    assert len(found) > 2 * len(firsts) == 4
    rolled = rollout(model, prompts, batch_size=2, chunk_size=4, **options)
    assert [row.tokens.tolist() for row in rolled] == [row[-5:].tolist() for row in got]
    assert got.equal(generate(model, prompts, **options, use_cache=False))
    assert got.equal(generate(merge_lora(model), prompts, **options))


@pytest.mark.parametrize("hf", [MIXTURE, GPT_OSS], ids=["mixtral", "gpt_oss"])
def test_the_kernels_are_the_reference(hf, kernel_device):
    hf, ids = hf | {"num_hidden_layers": 1}, IDS[:1, :5]
    model = mixture(hf, experts()).to(kernel_device)
    loss = model(ids.to(kernel_device), labels=ids.to(kernel_device)).loss
    loss.backward()
    got = gradients(model)
    model = mixture(hf, experts())
    with dispatch.reference_backend():
        want = model(ids, labels=ids).loss
        want.backward()
    assert error(loss, want) <= LIMIT
    for name, gradient in gradients(model).items():
        assert error(got[name], gradient) <= 1e-4, name


@pytest.mark.parametrize("policy", ["none", "selective"])
def test_a_block_keeps_what_a_trained_one_does(policy, kernel_device):
    """Per token, adapters of experts keep nothing besides; and the estimate counts what is measured."""
    tokens, dtype = TOKENS[kernel_device], DTYPE[kernel_device]
    options = {"device": kernel_device, "dtype": dtype}

    def per_token(model):
        return saved_bytes(model, policy, tokens + 8, dtype) - saved_bytes(model, policy, tokens, dtype)

    adapted = mixture(config=experts(target_modules=[]), **options)
    adapted.embed_tokens.weight.requires_grad_()  # the first block saves as the others do
    assert per_token(adapted) == per_token(mixture(**options))
    adapted.set_checkpointing(policy)
    ids = torch.arange(tokens, device=kernel_device)[None] % 3
    assert same_bytes(saved_bytes(adapted, policy, tokens, dtype), measured_bytes(adapted, ids), kernel_device)
    adapted = apply_lora(mixture(dtype=torch.bfloat16), experts())
    memory, count = training_memory(adapted, 16), adapted.num_parameters(only_trainable=True)
    parts = {name: each for name, each in adapted.named_parameters() if ".lora." in name}
    count = sum(each.numel() for each in parts.values())
    assert memory.weights == 4 * count + 2 * sum(
        each.numel() for n, each in adapted.named_parameters() if n not in parts
    )


def test_half_precision_models_have_fp32_adapters():
    model = apply_lora(mixture(dtype=torch.bfloat16), experts())
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert abs(loss - mixture()(IDS, labels=IDS).loss) < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(mixture(config=experts())(IDS, labels=IDS).loss, loss, atol=0.1, rtol=0)


@pytest.mark.matrix
@pytest.mark.compile
def test_blocks_compile():
    model = mixture(MIXTURE | {"num_hidden_layers": 1}, experts())
    assert_blocks_compile(model)


@pytest.mark.parametrize(
    ("targets", "parameters"),
    [
        (["experts.gate_proj", "experts.up_proj", "experts.down_proj"], ()),
        (["experts.gate_up_proj", "mlp.experts.down_proj"], ()),
        ("all-linear", ["gate_up_proj", "mlp.experts.down_proj"]),
    ],
)
def test_names(targets, parameters):
    """What people call the experts' matrices, in the layouts of checkpoints."""
    hf = MIXTURE | {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    model = apply_lora(mixture(hf), LoRAConfig(target_modules=targets, target_parameters=parameters))
    assert [layer.lora.names for layer in routed_layers(model)] == [("gate_up_weight", "down_weight")] * 2


def test_some_layers_are_named_in_full_in_the_file(tmp_path):
    name = "model.layers.1.mlp.experts.down_proj"
    model = apply_lora(mixture(), LoRAConfig(target_modules=["experts.w1", name]))
    assert [layer.lora.names for layer in routed_layers(model)] == [
        ("gate_up_weight",),
        ("gate_up_weight", "down_weight"),
    ]
    model = apply_lora(mixture(), LoRAConfig(target_modules=["q_proj", name]))
    save_adapter(model, tmp_path)
    keys = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (keys["target_modules"], keys["target_parameters"]) == (["q_proj"], [name])
    again = load_adapter(mixture(), tmp_path)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert language_targets(mixture(), [name]) == [name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"target_parameters": ["mlp.gate.weight"]},
            r"must name parameters of routed experts \(experts.down_proj, exp",
        ),
        ({"target_parameters": EXPERTS, "use_dora": True}, "routed experts must have adapters without DoRA"),
        ({"target_parameters": "experts.down_proj"}, "target_parameters must be a list of names"),
        (
            {"target_modules": ["down_proj"]},
            r"got 'down_proj'. Routed experts are named experts.down_proj, experts.gate",
        ),
        ({"target_modules": []}, "must name linear layers"),
    ],
)
def test_what_is_refused(config, message):
    model = mixture()
    with pytest.raises(ValueError, match=message):
        apply_lora(model, LoRAConfig(**config))
    assert all(each.requires_grad for each in model.parameters())


def test_files_that_do_not_fit(tmp_path):
    save_adapter(mixture(config=experts()), tmp_path)
    model = mixture(MIXTURE | {"num_local_experts": 3})
    logits = model(IDS).logits
    message = r"experts\.lora_A\.weight must be floats \[12, 48\], got torch.float32 \[16, 48\]"
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    assert all(each.requires_grad for each in model.parameters())
    assert model(IDS).logits.equal(logits)
    with pytest.raises(ValueError, match=r"must name parameters of routed experts \(none here\)"):
        load_adapter(llama(), tmp_path)


def test_the_training_command_adapts_experts(tmp_path, no_group_is_left):
    mixture().save_pretrained(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "shared"))
    given = {"model": str(tmp_path), "data": ["x.jsonl"], "output": "o", "lora_targets": ["q_proj"], "lora_r": 2}
    for wanted in (True, False):
        model = load_model(TrainOptions(**given, lora_experts=wanted), torch.device("cpu"), mesh, torch.bfloat16)
        assert all((layer.lora is not None) == wanted for layer in routed_layers(model))
        assert adapter_config(model).scaling == 2
    with pytest.raises(ValueError, match="lora_experts needs lora_r"):
        TrainOptions(**given | {"lora_r": 0, "lora_targets": []}, lora_experts=True)


def test_states_of_adapters_without_experts_are_described_as_before():
    assert "adapters.target_parameters" not in describe(mixture(config=LoRAConfig()))
    assert describe(mixture(config=experts()))["adapters.target_parameters"] == str(EXPERTS)


WIDE = MIXTURE | {"hidden_size": 64, "intermediate_size": 64}
QUANTIZED = pytest.mark.parametrize("dtype", ["nf4", "float8"])


def with_dense_weights(model):
    """The same model after `quantize_base`, with the numbers that its codes stand for."""
    for layer in routed_layers(model):
        dense = {name: layer.matrices(name).dense() for name in frozen_parts(layer)}
        layer.stored = None
        for name, weight in dense.items():
            setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
    for layer in adapted_layers(model).values():
        if not isinstance(layer, LoRAExperts):
            layer.weight = torch.nn.Parameter(layer.dense_weight().detach(), requires_grad=False)
            layer.stored = None
    return model


def quantized(config, dtype, hf=WIDE, **options):
    pytest.importorskip("torchao")
    return quantize_base(mixture(hf, config, **options), dtype=dtype)


@pytest.mark.cases(6)
@QUANTIZED
@pytest.mark.parametrize(
    ("arch", "variant"),
    [
        ("mixtral", None),
        ("qwen3_moe", None),
        ("gpt_oss", None),
        ("gemma4", "experts"),
        ("qwen3_5_moe", None),
        ("llama4_text", None),
    ],
)
def test_quantized_experts_of_every_family(arch, variant, dtype, root):
    pytest.importorskip("torchao")
    folder, found = make_folder(arch, variant or next(iter(tiny(arch))), root), []
    for change in (lambda model: model, with_dense_weights):
        torch.manual_seed(0)
        model = stir(apply_lora(load(arch, folder), experts(target_modules=[])))
        plain = get_hf_state_dict(model, merge=False)
        model = change(quantize_base(model, dtype=dtype))
        ids, inputs, _ = with_image(arch, model)
        loss = model(ids, labels=ids, **inputs).loss
        loss.backward()
        found.append((loss, gradients(model), get_hf_state_dict(model, merge=False)))
    (loss, got, stored), (want, expected, dense) = found
    assert error(loss, want) <= LIMIT
    assert all(error(got[name], gradient) <= LIMIT for name, gradient in expected.items())
    assert all(tensor.equal(dense[name]) for name, tensor in stored.items())
    changed = [name for name, tensor in stored.items() if not tensor.equal(plain[name])]
    assert changed
    assert all("experts" in name and error(stored[name], plain[name]) < 0.15 for name in changed)


@pytest.mark.cases(4)
@QUANTIZED
@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[1:], ()], ids=str)
def test_merge_and_unmerge_quantized_experts(parameters, dtype, tmp_path):
    """Frozen experts are quantized with adapters and without; merging makes all of them dense."""
    model = quantized(experts(target_parameters=parameters), dtype)
    assert all(len(frozen_parts(layer)) == 2 for layer in routed_layers(model))
    logits, tensors = model(IDS).logits, get_hf_state_dict(model)
    save_adapter(model, tmp_path / "adapter")
    merge_lora(model, reversible=True)
    assert {type(each) for each in model.parameters()} == {torch.nn.Parameter}
    torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    assert all(tensor.equal(tensors[name]) for name, tensor in get_hf_state_dict(model).items())
    model.save_pretrained(tmp_path / "merged")
    assert unmerge_lora(model)(IDS).logits.equal(logits)
    assert all(len(frozen_parts(layer)) == 2 for layer in routed_layers(model))
    again = load_adapter(mixture(WIDE), tmp_path / "adapter")
    assert quantize_base(again, dtype=dtype)(IDS).logits.equal(logits)


def test_quantized_experts_can_be_loaded_again():
    model = quantized(experts(target_modules=[]), "float8")
    before, dense = get_hf_state_dict(model, merge=False), get_hf_state_dict(mixture(WIDE))
    load_hf_tensors(model, {name: tensor * 0 for name, tensor in dense.items()})
    assert not any(get_hf_state_dict(model, merge=False)[name].any() for name in before if "experts" in name)
    load_hf_tensors(model, dense)
    assert all(tensor.equal(before[name]) for name, tensor in get_hf_state_dict(model, merge=False).items())
    with pytest.raises(ValueError, match="must not be quantized yet"):
        quantize_base(model)


@QUANTIZED
def test_experts_are_quantized_as_they_are_read(dtype, tmp_path):
    """On the meta device before the checkpoint is read, or afterwards."""
    pytest.importorskip("torchao")
    plain = mixture(WIDE)
    plain.save_pretrained(tmp_path)
    prepare = lambda model: quantize_base(apply_lora(model, experts()), dtype=dtype)
    read = type(plain).from_pretrained(tmp_path, shard=prepare)
    assert all(len(frozen_parts(layer)) == 2 for layer in routed_layers(read))
    assert read(IDS).logits.equal(prepare(type(plain).from_pretrained(tmp_path))(IDS).logits)
    assert {each.device.type for each in read.parameters()} == {"cpu"}


@QUANTIZED
def test_decoding_with_quantized_experts(dtype):
    model, prompts = quantized(experts(), dtype).eval(), [[5, 3, 9], [7, 8, 2, 4, 1]]
    options = {"max_new_tokens": 5, "eos_token_id": []}
    got = generate(model, prompts, **options)
    rolled = rollout(model, prompts, batch_size=2, chunk_size=4, **options)
    assert [row.tokens.tolist() for row in rolled] == [row[-5:].tolist() for row in got]
    assert got.equal(generate(with_dense_weights(model), prompts, **options))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("policy", "dtype"), [("none", "nf4"), ("selective", "float8")])
def test_a_block_on_quantized_experts_keeps_what_a_dense_one_does(policy, dtype, kernel_device):
    """Also with dropout, of which two seeds a layer are kept."""

    def measured(tokens, config, dense):
        model = quantized(config, dtype)
        model = (with_dense_weights(model) if dense else model).to(kernel_device)
        model.set_checkpointing(policy)
        return measured_bytes(model, torch.ones(1, tokens, dtype=torch.int64, device=kernel_device))

    dense, plain, dropped = (
        [measured(tokens, experts(target_modules=[], lora_dropout=dropout), each) for tokens in (8, 24)]
        for each, dropout in ((True, 0.0), (False, 0.0), (False, 0.3))
    )
    assert plain[1] - plain[0] == dropped[1] - dropped[0] == dense[1] - dense[0] > 0


@QUANTIZED
def test_memory_of_quantized_experts_is_counted(dtype):
    model = mixture(WIDE, experts(), dtype=torch.bfloat16)
    kinds = {"four_bit": dtype == "nf4", "float8": dtype == "float8"}
    found = estimate(model, 64, **kinds)
    linear = sum(quantized_bytes(each.weight, dtype) for each in quantized_layers(model))
    pytest.importorskip("torchao")
    quantize_base(model, dtype=dtype)
    parts = [layer.matrices(name) for layer in routed_layers(model) for name in frozen_parts(layer)]
    assert sum(each.nbytes for each in parts) == sum(quantized_bytes(each, dtype) for each in quantized_experts(model))
    quantized_ones = {model.get_parameter(name) for name in frozen_weights(model)}
    quantized_ones |= {each for weight in frozen_weights(model).values() for each in weight.parameters()}
    others = sum(each.nbytes for each in model.parameters() if each not in quantized_ones)
    assert found.weights == others + linear + sum(each.nbytes for each in parts)
    assert found.temporary == 2 * 4 * 128 * 64  # gate and up of one layer, in 16 bits
    assert estimate(model, 64, **kinds).weights == found.weights


@pytest.mark.compile
@QUANTIZED
def test_blocks_with_quantized_experts_compile(dtype):
    model = quantized(experts(target_modules=[]), dtype, WIDE | {"num_hidden_layers": 1})
    assert_blocks_compile(model)


@pytest.mark.gpu
@QUANTIZED
@pytest.mark.parametrize("policy", ["none", "selective"])
def test_quantized_experts_on_a_gpu_are_those_of_the_cpu(policy, dtype):
    found = []
    for device in ("cpu", "cuda"):
        model = quantized(experts(), dtype).to(device)
        model.set_checkpointing(policy)
        ids = IDS.to(device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append((loss, gradients(model)))
    (want, expected), (loss, got) = found
    assert error(loss, want) <= LIMIT
    assert all(error(got[name], gradient) <= 1e-4 for name, gradient in expected.items())
