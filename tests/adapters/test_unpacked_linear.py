"""Adapters of PEFT in the ops of `LoRALinear`: the results of PEFT's own forward, in the memory of `apply_lora`."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch

from liger_models.adapters import LoRAConfig, apply_lora, unpack_projections
from liger_models.adapters.unpacked_linear import CannotFuse, RowOrder, UnpackedLinear
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation.float8_weights import float8_weights, refusal

from ..arch.families import LIMIT, error, load, make_folder, tiny, tokens
from ..late import Late
from .test_lora import IDS, llama, stir

peft = Late("peft", "it adapts models of this package")
pytestmark = [pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def by_peft(monkeypatch):
    """Return a context in which PEFT computes all layers."""

    @contextmanager
    def context():
        def refuse(*_):
            raise CannotFuse("")

        with monkeypatch.context() as patched:
            patched.setattr(UnpackedLinear, "_weight_and_terms", refuse)
            yield

    return context


def adapt(model, **options):
    config = {"r": 4, "lora_alpha": 6, "target_modules": SEVEN, **options}
    return stir(peft.get_peft_model(unpack_projections(model), peft.LoraConfig(**config))).train()


def step(model, ids=IDS) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {"loss": loss.detach(), **gradients}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], limit: float = 2 * LIMIT) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert error(got[name], value) <= limit, name


FAMILIES = {
    "llama": SEVEN,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "qwen2": SEVEN,
    "qwen3_moe": SEVEN[:4],
    "gemma2": SEVEN,
    "qwen3_5_text": r".*\.(self_attn|mlp|linear_attn)\.\w*proj\w*",
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.filterwarnings("ignore:.* all linear layers have adapters except:UserWarning")
def test_a_step_is_that_of_peft(arch, use_rslora, root, by_peft, recwarn):
    variant = next(iter(tiny(arch)))
    ids, plain = tokens(arch, variant, 2, 12), load(arch, make_folder(arch, variant, root))
    before = plain(ids).logits
    model = adapt(plain, target_modules=FAMILIES[arch], use_rslora=use_rslora)
    layers = [layer for layer in model.base_model.model.causal_lm.modules() if isinstance(layer, UnpackedLinear)]
    assert layers
    assert all(layer.is_low_rank for layer in layers)
    with model.disable_adapter():
        assert error(model.eval()(input_ids=ids).logits, before) <= LIMIT
    got = step(model.train(), ids)
    with by_peft():
        assert not any(layer.is_low_rank for layer in layers)
        want = step(model, ids)
    assert_equal(got, want)
    assert not [each for each in recwarn if "PEFT computes" in str(each.message)]


def saved_bytes(model) -> int:
    """Bytes of the distinct activations that a forward saves, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_memory_is_that_of_apply_lora(dropout, by_peft):
    """Not that of PEFT, which saves the input of each of the seven layers in the dtype of its adapters."""
    model = adapt(llama().to(torch.bfloat16), lora_dropout=dropout)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    native = apply_lora(llama().to(torch.bfloat16), LoRAConfig(r=4, lora_dropout=dropout)).train()
    got, want = saved_bytes(model), saved_bytes(native)
    with by_peft():
        theirs = saved_bytes(model)
    assert got <= 1.03 * want
    assert got < 0.8 * theirs


def test_the_kernels_are_those_of_apply_lora(kernel_device, monkeypatch):
    """With projections in joined rows: the fused MLP runs, and the two ops of the other projections."""
    from liger_models.kernels.linear import projection

    products = []
    forward = projection.Product.forward
    monkeypatch.setattr(
        projection.Product, "forward", lambda own, *rows: products.append(own.low_rank) or forward(own, *rows)
    )
    model = adapt(llama(num_hidden_layers=1)).to(kernel_device)
    ids = IDS.to(kernel_device)
    got = step(model, ids)
    assert [low_rank[0].shape[0] for low_rank in products if low_rank is not None] == [12, 4, 8, 4]
    monkeypatch.undo()
    want = step(copy.deepcopy(model).cpu())
    assert_equal({name: value.cpu() for name, value in got.items()}, want, 1e-4)


def test_under_autocast(by_peft):
    """Weights and adapters in fp32, products in bf16."""
    model = adapt(llama())
    with torch.autocast("cpu", torch.bfloat16):
        got = step(model)
        with by_peft():
            want = step(model)
    assert_equal(got, want, 0.05)


def test_adapters_are_switched(by_peft):
    """Several at once and of other ranks, none, merged ones; each state as PEFT computes it."""
    model = adapt(llama())
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], use_rslora=True))
    for name, parameter in model.eval().named_parameters():
        if "lora_B.other" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    logits = lambda: model(input_ids=IDS).logits
    seen = []

    def check():
        with torch.no_grad():
            seen.append(logits())
            with by_peft():
                assert error(seen[-1], logits()) <= LIMIT

    check()
    for names in ("other", ["default", "other"]):
        model.base_model.set_adapter(names)
        check()
    with model.disable_adapter():
        check()
    model.base_model.set_adapter("default")
    model.merge_adapter()
    check()
    model.unmerge_adapter()
    check()
    assert len({round(float(each.sum()), 4) for each in seen[:4]}) == 4
    assert error(seen[4], seen[0]) <= LIMIT
    assert error(seen[5], seen[0]) <= LIMIT


def test_the_reference_does_not_change_what_is_recomputed():
    """A forward without adapters comes between the forward and the backward, as in DPO."""
    model = adapt(llama())
    model.set_checkpointing("full")
    want = step(model)
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad(), model.disable_adapter():
        model(input_ids=IDS)
    loss.backward()
    got = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert_equal({"loss": loss.detach(), **got}, want, 1e-6)


def test_weights_stay_joined(by_peft):
    """They share memory, also after they were moved, replaced or written to."""
    model = adapt(llama())
    block = model.base_model.model.causal_lm.layers[0]
    for layer, names in ((block.self_attn.qkv_proj, "qkv"), (block.mlp.gate_up_proj, ("gate", "up"))):
        assert [*layer.names] == [f"{name}_proj" for name in names]
        assert {base.weight.untyped_storage().data_ptr() for base in layer.bases()} == {
            layer.weight.untyped_storage().data_ptr()
        }
    model.to(torch.float64)
    model.base_model.model.get_submodule("model.layers.0.mlp.up_proj").base_layer.weight.data = torch.randn(
        96, 32, dtype=torch.float64
    )[: block.mlp.gate_up_proj.bases()[1].out_features]
    copied = copy.deepcopy(model)
    for each in (model, copied):
        got = step(each)
        with by_peft():
            assert_equal(got, step(each), 1e-12)
    assert block.mlp.gate_up_proj._shares(block.mlp.gate_up_proj.joined)
    assert copied.base_model.model.causal_lm.layers[0].mlp.gate_up_proj.joined is not block.mlp.gate_up_proj.joined


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "the adapter default has Dora"),
        ({"lora_bias": True}, "the adapter default has lora_bias"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["v_proj"]}, "a layer is a ModulesToSaveWrapper"),
    ],
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_what_the_ops_lack_is_said_once(options, reason):
    model = adapt(llama(), **options)
    with pytest.warns(UserWarning, match=f"PEFT computes some projections itself, without fused ops: {reason}") as seen:
        step(model)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)


def test_an_adapter_for_each_row_is_said():
    model = adapt(llama()).eval()
    with pytest.warns(UserWarning, match="layers have hooks, as for adapter_names"):
        mixed = model(input_ids=IDS, adapter_names=["default", "__base__"]).logits
    with model.disable_adapter():
        assert error(mixed[1], model(input_ids=IDS).logits[1]) <= LIMIT
    assert error(mixed[0], model(input_ids=IDS).logits[0]) <= LIMIT


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        ([0, 1, 2, 3, 6, 7, 8, 9, 4, 10, 5, 11], 2),  # two groups of four rows, one and one
        ([0, 2, 4, 1, 3, 5], 3),  # in turn
        ([3, 1, 0, 2, 5, 4], 0),  # irregular
        ([0, 1, 2], 1),
    ],
)
def test_row_order(rows, groups):
    order = RowOrder(torch.tensor(rows))
    assert order.groups == groups
    y = torch.randn(2, 3, len(rows), requires_grad=True, dtype=torch.float64)
    want = torch.empty_like(y)
    want[..., rows] = y
    assert torch.equal(order(y), want)
    assert torch.autograd.gradcheck(order, y)


@pytest.mark.parametrize("bias", [False, True])
def test_float8_rollouts_merge_the_adapters(bias):
    """The matrices of an unpacked projection may be in another order than the rows of the packed projection."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=bias, initializer_range=0.2,
    )  # fmt: skip
    model = LigerLlama.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    plain = copy.deepcopy(model)
    adapted = adapt(model).eval()
    ids = torch.tensor([[5, 9, 3, 14, 2, 7]])
    assert refusal(model) is None
    with torch.no_grad():
        exact = model(ids).logits
        with float8_weights(model):
            got = model(ids).logits
        assert torch.equal(model(ids).logits, exact)
    merged = adapted.merge_and_unload().pack()
    with torch.no_grad(), float8_weights(merged):
        want = merged(ids).logits
    assert error(got, want) < 0.02
    with torch.no_grad(), float8_weights(plain):
        assert error(plain(ids).logits, want) > 0.1
