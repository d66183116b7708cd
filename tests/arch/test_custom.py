"""Architectures of other packages: that of `examples/custom.py` has all that those of this package have, by name."""

import dataclasses
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_models import AutoLigerModel, KernelOptions, LigerLlama, LlamaConfig, arch, list_archs, register
from liger_models.adapters import LoRAConfig, apply_lora, load_adapter, merge_lora, save_adapter
from liger_models.arch import get_arch
from liger_models.arch.llama import LlamaBlock
from liger_models.arch.registry import MODEL_CLASSES
from liger_models.base import CausalLM
from liger_models.convert import format_of
from liger_models.convert.files import read_headers
from liger_models.convert.weight_map import WeightMap, decoder_map, expert_rows, gate_up_rows
from liger_models.kernels.moe import Routing
from liger_models.layers import LigerEmbedding, LigerLayerNorm, LigerLMHead, LigerMoE, LigerRMSNorm, RotaryEmbedding
from liger_models.layers.config import DecoderConfig
from liger_models.layers.gated_delta_net import LigerGatedDeltaNet
from liger_models.parallel import compile_blocks

from ..convert.conftest import assert_same_bits, edit_json, read_tensors
from ..processes import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "sliding_window": 5, "num_experts": 4, "moe_intermediate_size": 24,
    "initializer_range": 0.1,
}  # fmt: skip
IDS = torch.arange(2, 2 + 2 * 16).view(2, 16)


def make(*, dtype: torch.dtype = torch.float32, kernels: KernelOptions | None = None, **changes: Any) -> Any:
    """The example's model, with norms that are not all ones."""
    from examples.custom import SideBySide, SideBySideConfig  # not before pytest_configure: it defines kernels

    torch.manual_seed(3)
    model = SideBySide.from_config(SideBySideConfig(**SIZES | changes), dtype=dtype, kernels=kernels)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
    return model


def gradients(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    """Of the loss of a batch, and the loss itself."""
    model.zero_grad()
    loss = model(labels=inputs["input_ids"], **inputs).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def same_parameters(one: nn.Module, other: nn.Module) -> None:
    assert_same_bits(dict(other.named_parameters()), dict(one.named_parameters()))


def test_the_loss_is_that_of_the_formulas():
    """The example's block in plain torch, from the same weights."""
    model = make(dtype=torch.float64)
    config = model.config
    h = model.embed_tokens.weight[IDS]
    position = torch.arange(16)
    causal = position[:, None] >= position
    near = causal & (position[:, None] - position < config.sliding_window)
    rms = lambda x, norm: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = (position[:, None] * frequencies).repeat(1, 2)[:, None]
    chosen, probabilities = [], []

    def rotate(x):
        return x * angles.cos() + torch.cat([-x[..., 4:], x[..., :4]], -1) * angles.sin()

    def experts(layer, x):
        logits = layer.gate(x)
        probability, expert = logits.softmax(-1).topk(2)
        chosen.append(F.one_hot(expert, 4).double().flatten(0, 1))
        probabilities.append(logits.softmax(-1).flatten(0, 1))
        weight = torch.zeros_like(logits).scatter(-1, expert, probability / probability.sum(-1, keepdim=True))
        gate_up = torch.einsum("btc,xfc->btxf", x, layer.gate_up_weight)
        gated = F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]
        return torch.einsum("btxf,xcf,btx->btc", gated, layer.down_weight, weight)

    for index, block in enumerate(model.layers):
        normed = rms(h, block.input_layernorm)
        groups = block.self_attn.qkv_proj(normed).view(2, 16, 2, 4, 8)  # for each KV head two queries, key, value
        q = rotate(rms(groups[:, :, :, :2].flatten(2, 3), block.self_attn.q_norm))
        k = rotate(rms(groups[:, :, :, 2], block.self_attn.k_norm))
        v = groups[:, :, :, 3]
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * 8**-0.5
        weights = scores.masked_fill(~(causal if index == 3 else near), float("-inf")).softmax(-1)
        attended = block.self_attn.o_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))
        if index % 2:
            added = experts(block.mlp, normed)
        else:
            gate_up = block.mlp.gate_up_proj(normed)
            added = block.mlp.down_proj(F.silu(gate_up[..., ::2]) * gate_up[..., 1::2])
        h = h + attended + added
    logits = model.lm_head(rms(h, model.norm))
    torch.testing.assert_close(model(IDS).logits, logits)

    output = model(IDS, labels=IDS)
    assert output.logits is None
    share, mean = torch.cat(chosen).mean(0), torch.cat(probabilities).mean(0)
    balance = 0.01 * 4 * (share * mean).sum()
    torch.testing.assert_close(output.aux_loss.double(), balance, rtol=1e-6, atol=0)
    cross_entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(output.loss.double(), cross_entropy + balance, rtol=1e-6, atol=0)


def test_the_kernels_compute_what_plain_torch_does(kernel_device):
    plain = KernelOptions(rms_norm=False, rope=False, swiglu=False, fused_linear_cross_entropy=False)
    ids = IDS[:, :9].to(kernel_device)
    want = gradients(make(kernels=plain).to(kernel_device), input_ids=ids)
    got = gradients(make().to(kernel_device), input_ids=ids)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("policy", ["selective", "full", ["full", "none", "selective", "full"]], ids=str)
def test_checkpointing_policies(policy):
    model = make()
    want = gradients(model, input_ids=IDS)
    model.set_checkpointing(policy)
    torch.testing.assert_close(gradients(model, input_ids=IDS), want, rtol=0, atol=0)


def test_packed_documents_are_apart():
    model = make(router_aux_loss_coef=0.0)
    bounds = [0, 7, 16, 32]
    packed = gradients(model, input_ids=IDS.view(1, 32), cu_seqlens=torch.tensor(bounds), num_items_in_batch=29)
    parts = [
        gradients(model, input_ids=IDS.view(1, 32)[:, start:end], num_items_in_batch=29)
        for start, end in pairwise(bounds)
    ]
    torch.testing.assert_close(packed, {name: sum(part[name] for part in parts) for name in packed})


@pytest.mark.compile
def test_blocks_compile_without_a_break():
    want = gradients(make(), input_ids=IDS)
    torch.testing.assert_close(gradients(compile_blocks(make(), backend="eager"), input_ids=IDS), want)


def test_decoding_with_the_cache_is_decoding_without():
    model = make().eval()
    options = {"max_new_tokens": 12, "eos_token_id": []}
    prompt, padding = IDS[:, :4], torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for mask in (None, padding):
        cached = model.generate(prompt, attention_mask=mask, **options)
        assert torch.equal(cached, model.generate(prompt, attention_mask=mask, use_cache=False, **options))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_comes_back_by_name(tied, dtype, tmp_path):
    model = make(dtype=dtype, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size=20_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("side_by_side", ["SideBySide"])
    for folder in ("whole", "shards"):
        for cls in (AutoLigerModel, type(model)):
            again = cls.from_pretrained(tmp_path / folder, progress=False, strict=True)
            assert type(again) is type(model)
            assert again.config == model.config
            same_parameters(again, model)
            assert torch.equal(again(IDS).logits, model(IDS).logits)
        again.save_pretrained(tmp_path / f"{folder} again", max_shard_size=20_000)
    written = read_tensors(tmp_path / "whole")
    assert written.keys() == dict(model.named_parameters()).keys()
    for folder in ("shards", "whole again", "shards again"):
        assert_same_bits(read_tensors(tmp_path / folder), written)
    assert type(AutoLigerModel.from_config(config)) is type(AutoLigerModel.from_config(model.config)) is type(model)
    assert model.num_parameters() == sum(tensor.numel() for tensor in written.values())


def names_of_others(config: Any) -> WeightMap:
    """The layout in which other libraries expect such a model."""
    theirs = "model.layers.{%s}.mlp"
    expert = f"{theirs % 'sparse'}.experts.{{x}}"
    gate_up, down = expert_rows(
        f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight", f"{expert}.down_proj.weight", config.num_experts
    )
    layers = range(config.num_hidden_layers)
    return decoder_map(
        config,
        norms=("input_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
        instead={"mlp.gate_up_proj.weight": None, "mlp.down_proj.weight": None},
        also={
            "layers.{sparse}.mlp.gate.weight": f"{theirs % 'sparse'}.gate.weight",
            "layers.{sparse}.mlp.gate_up_weight": gate_up,
            "layers.{sparse}.mlp.down_weight": down,
            "layers.{dense}.mlp.gate_up_proj.weight": gate_up_rows(
                f"{theirs % 'dense'}.gate_proj.weight", f"{theirs % 'dense'}.up_proj.weight"
            ),
            "layers.{dense}.mlp.down_proj.weight": f"{theirs % 'dense'}.down_proj.weight",
        },
        over={"sparse": layers[1::2], "dense": layers[::2]},
    )


def test_a_weight_map_of_ones_own(own_registry, tmp_path):
    model = make()
    register("side_by_side", type(model))
    model.save_pretrained(tmp_path / "own names")
    own_names = format_of(get_arch("side_by_side")).weight_map
    register(
        "side_by_side",
        type(model),
        names_of_others,
        other_maps=lambda config: [own_names(config)],
        from_json=lambda hf: {"num_experts" if key == "experts" else key: value for key, value in hf.items()},
        to_json=lambda keys: {"experts" if key == "num_experts" else key: value for key, value in keys.items()},
        hf_class="SideBySideForCausalLM",
    )
    model.save_pretrained(tmp_path / "theirs")
    names = read_headers(tmp_path / "theirs").keys()
    assert {"model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"} < names
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["experts"], config["architectures"]) == (4, ["SideBySideForCausalLM"])
    edit_json(tmp_path / "own names" / "config.json", experts=4, num_experts=None)
    for folder in ("theirs", "own names"):
        same_parameters(AutoLigerModel.from_pretrained(tmp_path / folder, progress=False, strict=True), model)


@pytest.mark.parametrize(
    "named", ["all-linear", ["qkv_proj", "layers.0.mlp.down_proj", "lm_head"]], ids=["all", "some"]
)
def test_adapters(named, tmp_path):
    model = make()
    before = model(IDS).logits
    apply_lora(model, LoRAConfig(r=4, target_modules=named))
    assert torch.equal(model(IDS).logits, before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    assert any("layers.1.self_attn.qkv_proj" in name for name in trained)
    assert not any("mlp.gate." in name for name in trained)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        losses.append(gradients(model, input_ids=IDS)["loss"])
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2
    adapted = model(IDS).logits
    save_adapter(model, tmp_path)
    assert torch.equal(load_adapter(make(), tmp_path)(IDS).logits, adapted)
    torch.testing.assert_close(merge_lora(model)(IDS).logits, adapted)


def test_adapters_have_the_names_of_the_map(own_registry, tmp_path):
    model = make()
    register("side_by_side", type(model), names_of_others)
    apply_lora(model, LoRAConfig(target_modules=["q_proj"]))
    save_adapter(model, tmp_path)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert prefix in read_tensors(tmp_path)


def test_a_class_that_is_derived_from_one_of_this_package(own_registry, tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Config(LlamaConfig):
        factor: float = 2.0

    class Scaled(LigerLlama):
        config_class = Config

    register("scaled", Scaled, format_of(get_arch("llama")).weight_map)
    tiny = {key: value for key, value in SIZES.items() if key in {field.name for field in dataclasses.fields(Config)}}
    model = Scaled.from_config(Config(**tiny, factor=3.0))
    model.save_pretrained(tmp_path)
    again = AutoLigerModel.from_pretrained(tmp_path, progress=False, strict=True)
    assert type(again) is Scaled
    assert again.config == Config(**tiny, factor=3.0)
    assert "model.layers.0.self_attn.q_proj.weight" in read_headers(tmp_path)
    with pytest.raises(ValueError, match=r"model_type in config\.json must be 'llama', got 'scaled'"):
        LigerLlama.from_pretrained(tmp_path, progress=False)


def test_a_cell_of_a_notebook_may_run_again(own_registry, tmp_path):
    def cell():
        @dataclass(frozen=True, kw_only=True)
        class Config(LlamaConfig):
            pass

        class Mine(LigerLlama):
            config_class = Config

        register("mine", Mine)
        return Mine

    first = cell()
    second = cell()
    tiny = {
        key: value for key, value in SIZES.items() if key in {field.name for field in dataclasses.fields(LlamaConfig)}
    }
    first.from_config(first.config_class(**tiny)).save_pretrained(tmp_path)
    assert type(AutoLigerModel.from_pretrained(tmp_path, progress=False)) is second


PACKAGE = """
import sys

from liger_models import AutoLigerModel, list_archs
from liger_models.cli import main

assert "side_by_side" in list_archs()
assert "my_package" not in sys.modules
model = AutoLigerModel.from_pretrained(sys.argv[2], progress=False)
assert type(model).__module__ == "my_package.side_by_side"
main()
"""


@pytest.fixture
def my_package(tmp_path):
    """A place where the example is installed as a package, with the entry point of docs/custom.md."""
    place = tmp_path / "site"
    (place / "my_package").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "custom.py", place / "my_package" / "side_by_side.py")
    info = place / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    page = (ROOT / "docs" / "custom.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ((group, names),) = tomllib.loads(block)["project"]["entry-points"].items()
    lines = [f"{name} = {module}\n" for name, module in names.items()]
    (info / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}")
    return place


@pytest.mark.slow
def test_an_installed_package_is_found_without_an_import(my_package, tmp_path):
    pytest.importorskip("typer", reason="the command line needs typer and rich: pip install 'liger_models[cli]'")
    model = make()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "run.py").write_text(PACKAGE)
    path = os.pathsep.join([str(my_package), str(ROOT)])
    done = run(tmp_path / "run.py", "info", str(tmp_path / "model"), "--json", cwd=my_package, PYTHONPATH=path)
    found = json.loads(done.stdout)
    assert (found["class"], found["parameters"]) == ("SideBySide", model.num_parameters())
    assert found["config"]["num_experts"] == 4
    assert 0 < found["training"]["activations"]["full"] < found["training"]["activations"]["none"]


def test_an_entry_point_that_keeps_no_promise(tmp_path, monkeypatch):
    (tmp_path / "promising").mkdir()
    (tmp_path / "promising" / "__init__.py").write_text("")
    (tmp_path / "promising-1.0.dist-info").mkdir()
    entry = "[liger_models.architectures]\npromised = promising\n"
    (tmp_path / "promising-1.0.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    assert "promised" in list_archs()
    with pytest.raises(ValueError, match=r"promising: must call liger_models\.register\('promised', \.\.\.\)"):
        AutoLigerModel.from_config({"model_type": "promised"})


def test_a_name_that_is_not_registered_says_how(own_registry, tmp_path):
    model = make()
    register("side_by_side", type(model))
    model.save_pretrained(tmp_path)
    del MODEL_CLASSES["side_by_side"]
    message = r"model_type 'side_by_side' is not supported\..*import the module that calls liger_models\.register"
    with pytest.raises(ValueError, match=message):
        AutoLigerModel.from_pretrained(tmp_path, progress=False)
    register("side_by_side_2", type("Other", (LigerLlama,), {"config_class": make_config()}))
    with pytest.raises(ValueError, match=r"Did you mean 'side_by_side_2'\?"):
        AutoLigerModel.from_pretrained(tmp_path, progress=False)


def test_a_class_that_is_not_registered_says_how(own_registry, tmp_path):
    with pytest.raises(ValueError, match=r"SideBySide: must be registered.*Call liger_models\.register"):
        make().save_pretrained(tmp_path)


def make_config(*, fields: dict[str, Any] | None = None, base: type = DecoderConfig, decorate: bool = True) -> type:
    config = type("Config", (base,), {"__annotations__": fields or {}, **dict.fromkeys(fields or {})})
    return dataclass(frozen=True, kw_only=True)(config) if decorate else config


def model_of(config_class: type) -> type:
    return type("Mine", (LigerLlama,), {"config_class": config_class})


def test_what_can_not_be_registered(own_registry):
    mine = model_of(make_config())
    no_sizes = dataclass(frozen=True, kw_only=True)(type("Config", (), {"__annotations__": {"vocab_size": int}}))
    cases: list[tuple[Any, Any, str]] = [
        ("llama", mine, r"got 'llama', which is taken by an architecture of liger_models\. Choose another"),
        ("", mine, "model_type must be a non-empty string"),
        (mine, "mine", "model_type must be a non-empty string"),
        ("mine", nn.Linear, r"must be a class that derives from .*CausalLM, got <class .*Linear"),
        ("mine", LigerLlama(LlamaConfig(**TINY)), "must be a class that derives from"),
        ("mine", LigerLlama, "must be classes of their own, got LigerLlama, registered as 'llama'"),
        ("mine", model_of(LlamaConfig), "must be classes of their own, got LlamaConfig, registered as 'llama'"),
        ("mine", type("Mine", (LigerLlama,), {}), "got LlamaConfig, registered as 'llama'. Derive"),
        ("mine", model_of(dict), r"Mine\.config_class must be a dataclass, got <class 'dict'>\. Derive it"),
        ("mine", model_of(make_config(decorate=False)), "must be a dataclass, got .*with @dataclass"),
        ("mine", model_of(no_sizes), "must have the fields .*, but lacks hidden_size, initializer_range"),
        ("mine", model_of(make_config(fields={"sizes": dict[str, int] | None})), r"Config\.sizes must have a type"),
        ("mine", model_of(make_config(fields={"sizes": tuple[int, ...]})), r"Config\.sizes must have a type"),
        ("mine", model_of(make_config(fields={"part": LlamaConfig | None})), r"Config\.part must have a type"),
        *(
            ("mine", model_of(make_config(fields={name: str})), f"must not have the field {name}, which")
            for name in ("model_type", "rope_parameters", "quantization_config", "text_config")
        ),
    ]
    for model_type, model_class, message in cases:
        with pytest.raises(ValueError, match=message):
            register(model_type, model_class)
    assert "mine" not in MODEL_CLASSES

    register("mine", mine)
    register("mine", mine)
    other = type("Other", (LigerLlama,), {"config_class": make_config()})
    with pytest.raises(ValueError, match=r"got 'mine', which is .*Mine\. Choose another"):
        register("mine", other)
    with pytest.raises(ValueError, match="must be classes of their own, got Mine, registered as 'mine'"):
        register("yours", mine)
    other.config_class = mine.config_class
    with pytest.raises(ValueError, match="must be classes of their own, got Config, registered as 'mine'"):
        register("yours", other)
    assert list_archs() == sorted([*arch.built_in(), "mine"])


TINY = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


class Scale(nn.Module):
    """A module with a parameter that no layer of this package has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class DrawnScale(Scale):
    """The same, drawn by itself; it has a linear layer that is to start from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)
        nn.init.zeros_(self.linear.weight)


class Changed(LigerLlama):
    """Llama with a change behind the first line of its constructor, and before the last."""

    def __init__(self, config: LlamaConfig, kernels: KernelOptions | None = None, *, change: Any) -> None:
        self.change = change
        super().__init__(config, kernels)

    def post_init(self) -> None:
        self.change(self)
        super().post_init()


def put(name: str, module: Any) -> Any:
    return lambda model: setattr(model.layers[1], name, module())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            put("extra", Scale),
            r"Scale must have a method reset_parameters that initializes layers\.1\.extra\.scale, got none",
        ),
        (lambda model: setattr(model, "scale", nn.Parameter(torch.ones(1))), "Changed must have a method reset_param"),
        (put("norm", lambda: nn.BatchNorm1d(3)), r"must have no buffers.* layers\.1\.norm\.running_mean"),
        (
            lambda model: setattr(model.layers[1].self_attn, "layer", 0),
            r"slot of its own .*layer=0 for layers\.0\.self",
        ),
        (
            lambda model: setattr(model.layers[1].self_attn, "rotary", "slow"),
            "embedding 'slow' that layers.1.self_attn",
        ),
        (lambda model: delattr(model, "norm"), "must have norm when it calls post_init"),
    ],
    ids=["no method", "no method of the model", "buffers", "places", "rotary", "parts"],
)
@pytest.mark.parametrize("meta", [False, True])
def test_a_model_that_lacks_something(change, message, meta):
    make = partial(Changed, change=change)
    with pytest.raises(ValueError, match=message), torch.device("meta" if meta else "cpu"):
        make(LlamaConfig(**TINY)).reset_parameters()


def test_modules_draw_their_own_parameters(own_registry):
    class Mine(LigerLlama):
        config_class = make_config(base=LlamaConfig)

        def __init__(self, config: Any, kernels: KernelOptions | None = None) -> None:
            super().__init__(config, kernels)
            self.layers[0].extra = DrawnScale()
            self.post_init()

    model = Mine.from_config(Mine.config_class(**TINY))
    assert torch.equal(model.layers[0].extra.scale, torch.full((3,), 2.0))
    assert torch.equal(model.layers[0].extra.linear.weight, torch.zeros(3, 3))


def test_a_list_whose_name_ends_like_that_of_an_object(own_registry, tmp_path):
    mine = model_of(make_config(fields={"layer_config": list[int]}, base=LlamaConfig))
    register("mine", mine)
    mine.from_config(mine.config_class(layer_config=[1, 2], **TINY)).save_pretrained(tmp_path)
    assert AutoLigerModel.from_pretrained(tmp_path).config.layer_config == [1, 2]


class GainLinear(nn.Linear):
    """A linear layer with one more parameter, which has no values of its own in a new model."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.gain = nn.Parameter(torch.ones(3))


class BiasedRMSNorm(LigerRMSNorm):
    """The same for a layer of this package."""

    def __init__(self) -> None:
        super().__init__(3)
        self.gain = nn.Parameter(torch.ones(3))


class BiasedLayerNorm(LigerLayerNorm):
    def __init__(self) -> None:
        super().__init__(3)
        self.gain = nn.Parameter(torch.ones(3))


class ScaledMoE(LigerMoE):
    def __init__(self) -> None:
        super().__init__(4, 4, 2, Routing(1))
        self.gain = nn.Parameter(torch.ones(3))


class ScaledDeltaNet(LigerGatedDeltaNet):
    def __init__(self) -> None:
        super().__init__(8, 2, 2, 4, 4, 2, layer=None)
        self.gain = nn.Parameter(torch.ones(3))


EXTENDED = [GainLinear, BiasedRMSNorm, BiasedLayerNorm, ScaledMoE, ScaledDeltaNet]


def with_extra(extra: type[nn.Module]) -> Any:
    """A model whose second block has a module of the given class."""

    class Mine(LigerLlama):
        config_class = make_config(base=LlamaConfig)

        def build_block(self, config: Any, layer: int) -> nn.Module:
            block = super().build_block(config, layer)
            if layer == 1:
                block.extra = extra()
            return block

    return Mine.from_config(Mine.config_class(**TINY))


@pytest.mark.parametrize("extended", EXTENDED)
def test_a_parameter_that_a_subclass_adds_and_does_not_initialize_is_refused(extended):
    message = rf"{extended.__name__} must have a method reset_parameters that initializes layers\.1\.extra\.gain"
    with pytest.raises(ValueError, match=message):
        with_extra(extended)


@pytest.mark.parametrize("extended", EXTENDED)
@pytest.mark.parametrize("through_data", [False, True])
def test_a_parameter_that_a_subclass_adds_has_the_values_of_its_reset_parameters(extended, through_data):
    class Mine(extended):  # type: ignore[misc]
        def reset_parameters(self, *std: float) -> None:
            if hasattr(extended, "reset_parameters"):
                super().reset_parameters(*std)
            if hasattr(self, "gain"):
                self.gain.data.fill_(2.0) if through_data else nn.init.constant_(self.gain, 2.0)

    assert torch.equal(with_extra(Mine).layers[1].extra.gain, torch.full((3,), 2.0))


def test_a_constructor_that_sets_the_parts_itself():
    """A class without `block_class` builds what the ``build_`` methods build for one with it."""

    class Mine(CausalLM):
        config_class = LlamaConfig

        def __init__(self, config: Any, kernels: KernelOptions | None = None) -> None:
            super().__init__(config, kernels)
            self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(LlamaBlock(config, i, self.kernels) for i in range(config.num_hidden_layers))
            self.norm = LigerRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
            self.rotary = nn.ModuleDict({"default": RotaryEmbedding(config.head_size, config.rope_theta)})
            self.post_init()

    class Replaced(LigerLlama):
        def __init__(self, config: Any, kernels: KernelOptions | None = None) -> None:
            super().__init__(config, kernels)
            self.layers = nn.ModuleList(LlamaBlock(config, i, self.kernels) for i in range(config.num_hidden_layers))
            self.post_init()

    models = []
    for model_class in (LigerLlama, Mine, Replaced):
        torch.manual_seed(0)
        models.append(model_class.from_config(LlamaConfig(**TINY)))
    built, *others = models
    ids = torch.arange(2, 8)[None]
    for model in others:
        assert sorted(model.state_dict()) == sorted(built.state_dict())
        assert torch.equal(model(ids).logits, built(ids).logits)


def test_a_constructor_without_post_init():
    class Mine(LigerLlama):
        def post_init(self) -> None:
            pass

    with pytest.raises(ValueError, match=r"Mine: the constructor must end with self\.post_init\(\)"):
        Mine.from_config(LlamaConfig(**TINY))(torch.zeros(1, 2, dtype=torch.int64))
