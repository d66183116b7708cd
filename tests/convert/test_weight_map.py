import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_models.arch import get_arch
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.convert import format_of
from liger_models.convert.config_map import read_config
from liger_models.convert.load import pick_map
from liger_models.convert.weight_map import (
    Cat,
    Expression,
    Rearrange,
    Stack,
    WeightMap,
    fused_gate_up_rows,
    fused_qkv_rows,
    gate_up_rows,
    qkv_rows,
)

from .conftest import TINY, assert_same_bits


def meta_model(config_file: Path) -> tuple[Any, WeightMap]:
    model_type = config_file.parent.name
    model_class = get_arch(model_type)
    config = read_config(model_class.config_class, json.loads(config_file.read_text()), strict=True)
    with torch.device("meta"):
        return model_class(config), format_of(get_arch(model_type)).weight_map(config)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern, NaNs with their payloads included."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def tiny(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**(TINY | changes))


def hub_shapes(config_file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors; of weights in MXFP4, those of the dense weights."""
    shapes = json.loads(config_file.with_suffix(".shapes.json").read_text())
    dense = {
        name: [*shape[:-2], 32 * shape[-2]] if name.endswith("_blocks") else shape
        for name, shape in shapes.items() if not name.endswith("_scales")
    }  # fmt: skip
    return {name: tuple(shape) for name, shape in dense.items()}


@pytest.mark.cases(40)
def test_maps_onto_the_hub_checkpoint(config_file: Path) -> None:
    model, _ = meta_model(config_file)
    shapes = hub_shapes(config_file)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    maps = format_of(type(model)).file_maps(model.config)
    weights = pick_map(maps, tensors, dict(model.named_parameters()))
    # What is written is the hub's layout, unless that is quantized, or of a model with a tower.
    whole = config_file.parent.name in ("qwen3_5_text", "qwen3_5_moe_text")
    quantized = format_of(type(model)).quantized_maps and "quantization_config" in config_file.read_text()
    assert maps.index(weights) == (len(maps) - 1 if whole or quantized else 0)

    unpacked = weights.shapes(dict(model.named_parameters()))
    assert {name: tuple(tensor.shape) for name, tensor in unpacked.items()} == shapes

    packed = {name: tuple(expression.pack(tensors).shape) for name, expression in weights.entries.items()}
    assert packed == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    index = config_file.with_suffix(".index.json")
    if index.exists():
        names = {name for name in json.loads(index.read_text())["weight_map"] if not name.endswith("_scales")}
        assert shapes.keys() <= names
        assert names - shapes.keys() <= weights.skip


def test_the_hub_indices_are_among_the_data() -> None:
    folder = Path(__file__).parents[1] / "fixtures" / "llama"
    assert len(list(folder.glob("*.index.json"))) >= 3
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert rotary in json.loads((folder / "Llama-2-7b-hf.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biases", [False, True])
def test_round_trip_keeps_every_bit(dtype: torch.dtype, biases: bool) -> None:
    config = tiny(attention_bias=biases, mlp_bias=biases)
    weights = format_of(get_arch("llama")).weight_map(config)
    with torch.device("meta"):
        parameters = dict(LigerLlama(config).to(dtype).named_parameters())
    theirs = {name: random_bits(tuple(t.shape), t.dtype) for name, t in weights.shapes(parameters).items()}

    ours = {name: expression.pack(theirs) for name, expression in weights.entries.items()}
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: p.shape for n, p in parameters.items()}
    back = {name: t for key, expression in weights.entries.items() for name, t in expression.unpack(ours[key]).items()}
    assert_same_bits(back, theirs)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_qkv_rows_are_grouped_by_kv_head(heads: int, kv_heads: int, kind: str) -> None:
    D, C, R = 4, 8, heads // kv_heads
    config = tiny(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=D, hidden_size=C, attention_bias=True
    )
    tail = () if kind == "bias" else (C,)
    prefix = "model.layers.1.self_attn"
    tensors = {
        f"{prefix}.{part}_proj.{kind}": torch.randn(count * D, *tail)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    packed = (
        format_of(get_arch("llama")).weight_map(config).entries[f"layers.1.self_attn.qkv_proj.{kind}"].pack(tensors)
    )

    row = 0
    for group in range(kv_heads):
        for part, head in [*(("q", group * R + r) for r in range(R)), ("k", group), ("v", group)]:
            expected = tensors[f"{prefix}.{part}_proj.{kind}"][head * D : (head + 1) * D]
            assert torch.equal(packed[row : row + D], expected), (group, part, head)
            row += D
    assert row == len(packed)


def test_gate_and_up_rows_alternate() -> None:
    gate, up = torch.randn(48, 32), torch.randn(48, 32)
    prefix = "model.layers.0.mlp"
    packed = (
        format_of(get_arch("llama"))
        .weight_map(tiny())
        .entries["layers.0.mlp.gate_up_proj.weight"]
        .pack({f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up})
    )
    assert torch.equal(packed[0::2], gate)
    assert torch.equal(packed[1::2], up)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_fused_checkpoints_give_the_same_rows(heads: int, kv_heads: int) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 4}
    q, k, v = (random_bits((count * 4, 8), torch.bfloat16) for count in (heads, kv_heads, kv_heads))
    fused = fused_qkv_rows("layers.{i}.qkv", **sizes).expand({"i": 3})
    assert fused.names() == ["layers.3.qkv"]
    packed = fused.pack({"layers.3.qkv": torch.cat([q, k, v])})
    assert_same_bits({"": packed}, {"": qkv_rows("q", "k", "v", **sizes).pack({"q": q, "k": k, "v": v})})
    assert_same_bits(fused.unpack(packed), {"layers.3.qkv": torch.cat([q, k, v])})
    assert str(fused).startswith(f"Split(layers.3.qkv, dim=0, sizes={{'q': {heads * 4}, 'k': {kv_heads * 4},")

    gate, up = random_bits((48, 8), torch.float32), random_bits((48, 8), torch.float32)
    rows = fused_gate_up_rows("gate_up")
    packed = rows.pack({"gate_up": torch.cat([gate, up])})
    assert_same_bits({"": packed}, {"": gate_up_rows("gate", "up").pack({"gate": gate, "up": up})})
    assert_same_bits(rows.unpack(packed), {"gate_up": torch.cat([gate, up])})


def test_a_tied_model_has_no_head_of_its_own() -> None:
    tied, untied = (
        format_of(get_arch("llama")).weight_map(tiny(tie_word_embeddings=True)),
        format_of(get_arch("llama")).weight_map(tiny()),
    )
    assert "lm_head.weight" not in tied.entries
    assert "lm_head.weight" in tied.skip
    assert str(untied.entries["lm_head.weight"]) == "lm_head.weight"
    assert "lm_head.weight" not in untied.skip


def test_the_plan_is_printed_line_by_line() -> None:
    plan = str(
        format_of(get_arch("llama")).weight_map(tiny(num_hidden_layers=1, tie_word_embeddings=True))
    ).splitlines()
    assert "embed_tokens.weight = model.embed_tokens.weight" in plan
    assert (
        "layers.0.mlp.gate_up_proj.weight = Rearrange('f two ... -> (f two) ...', "
        "Stack([model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight], dim=1), two=2)"
    ) in plan
    assert len(plan) == 8


def mixture(experts: int = 3) -> WeightMap:
    """What a mixture of experts needs: two index sets, layers of two kinds, all experts in one parameter."""

    def expert(x: int) -> Expression:
        names = [f"layers.{{m}}.experts.{x}.{part}.weight" for part in ("gate", "up")]
        return Rearrange("f two c -> (f two) c", Stack(names, dim=1), two=2)

    return WeightMap(
        {
            "dense.{d}.weight": "layers.{d}.mlp.weight",
            "moe.{m}.gate_up": Stack([expert(x) for x in range(experts)], dim=0),
            "moe.{m}.both.{k}": Cat(["layers.{m}.a.{k}", "layers.{m}.b.{k}"], dim=1, sizes=[2, 3]),
        },
        over={"d": [0, 2], "m": [1], "k": range(2)},
        skip=["mtp.{k}.weight"],
    )


def test_expressions_cover_mixtures_of_experts() -> None:
    weights = mixture()
    assert list(weights.entries) == [
        "dense.0.weight",
        "dense.2.weight",
        "moe.1.gate_up",
        "moe.1.both.0",
        "moe.1.both.1",
    ]
    assert weights.skip == {"mtp.0.weight", "mtp.1.weight"}
    experts = weights.entries["moe.1.gate_up"]
    tensors = {name: random_bits((5, 4), torch.bfloat16) for name in experts.names()}
    packed = experts.pack(tensors)
    assert packed.shape == (3, 10, 4)
    assert_same_bits({"row": packed[2, 3]}, {"row": tensors["layers.1.experts.2.up.weight"][1]})
    assert_same_bits(experts.unpack(packed), tensors)


def test_one_name_in_two_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="every name must be in one entry only"):
        WeightMap({"a.{i}": "x.{i}", "b": "x.1"}, over={"i": range(2)})
    with pytest.raises(ValueError, match="every name must be in one entry only"):
        WeightMap({"a.{i}": "x.{i}", "a.0": "y"}, over={"i": range(2)})


def test_parts_of_two_dtypes_are_refused() -> None:
    parts = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    for expression in (Stack(["a", "b"], dim=0), Cat(["a", "b"], dim=0, sizes=[2, 2])):
        with pytest.raises(ValueError, match=r"a, b: .* must have one dtype, got torch\.bfloat16, torch\.float32"):
            expression.pack(parts)


def test_map_and_model_must_have_the_same_parameters() -> None:
    with pytest.raises(ValueError, match=r"without one: \['extra'\]; entries without a parameter: \['a'\]"):
        WeightMap({"a": "x"}, over={}).shapes({"extra": torch.ones(1)})


def test_a_class_from_elsewhere_has_no_model_type() -> None:
    assert format_of(LlamaConfig).model_type == "llama"
    assert format_of(type("Mine", (LigerLlama,), {})).model_type == "llama"
    with pytest.raises(ValueError, match=r"Cat: must be registered, or derive from a registered class"):
        format_of(Cat)
