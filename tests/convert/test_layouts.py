"""Mixtures of experts: one tensor per expert, or a layer's experts in one; both are read, the first is written.

Models with images: the prefixes that the hub has had; all are read, the hub's own are written.
"""

import copy
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from liger_models.arch import get_arch
from liger_models.arch.auto import AutoLigerModel
from liger_models.arch.llama import LlamaConfig
from liger_models.base.causal_lm import CausalLM
from liger_models.convert import format_of
from liger_models.convert.config_map import read_config
from liger_models.convert.files import INDEX
from liger_models.convert.load import pick_map
from liger_models.convert.weight_map import Stack, WeightMap, expert_rows, fused_expert_rows

from ..arch.families import FIRST_CASES, VISION_CASES, tiny
from ..late import transformers
from .conftest import CONFIGS, TINY, assert_same_bits, read_tensors
from .test_checkpoint import listing, run
from .test_weight_map import meta_model, random_bits

LAYERS = 5
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [4]},
}
both = pytest.mark.parametrize("arch", SIZES)
Tensors = dict[str, Tensor]


@cache
def theirs(arch: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(arch, **TINY | SIZES[arch] | {"num_hidden_layers": LAYERS})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def folders(arch: str, tmp_path: Path) -> tuple[Path, Path]:
    """The hub's layout and the fused one."""
    theirs(arch).save_pretrained(tmp_path / "hub")
    theirs(arch).save_pretrained(tmp_path / "fused", save_original_format=False)
    return tmp_path / "hub", tmp_path / "fused"


def load(arch: str, folder: Path, **options: Any) -> CausalLM:
    return get_arch(arch).from_pretrained(folder, strict=True, progress=False, **options)


def parameters(model: CausalLM) -> Tensors:
    return dict(model.named_parameters())


def rewrite(folder: Path, tensors: Tensors) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@both
def test_transformers_writes_both_layouts(arch: str, folders: tuple[Path, Path]) -> None:
    hub, fused = (read_tensors(folder).keys() for folder in folders)
    sparse = LAYERS - len(SIZES[arch].get("mlp_only_layers", []))
    assert sum(".experts." in name for name in hub - fused) == sparse * 3 * 3
    assert sum(".experts." in name for name in fused - hub) == sparse * 2


@pytest.mark.cases(4)
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard", ["5GB", "15KB"])
def test_both_give_one_model_and_one_export(arch: str, tmp_path: Path, dtype: torch.dtype, shard: str) -> None:
    reference = copy.deepcopy(theirs(arch)).to(dtype)
    reference.save_pretrained(tmp_path / "hub", max_shard_size=shard)
    reference.save_pretrained(tmp_path / "fused", max_shard_size=shard, save_original_format=False)
    hub, fused = (load(arch, tmp_path / name) for name in ("hub", "fused"))
    assert_same_bits(parameters(fused), parameters(hub))

    for name, model in (("a", hub), ("b", fused)):
        model.save_pretrained(tmp_path / name, max_shard_size=shard)
    assert listing(tmp_path / "a") == listing(tmp_path / "b")
    assert_same_bits(read_tensors(tmp_path / "b"), read_tensors(tmp_path / "hub"))

    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        logits = fused(ids).logits
        assert torch.equal(logits, hub(ids).logits)
        if dtype == torch.float32:
            torch.testing.assert_close(logits, reference(ids).logits, rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("layout", [0, 1], ids=["hub", "fused"])
def test_parts_of_one_layer_in_different_files(arch: str, folders: tuple[Path, Path], layout: int) -> None:
    """Tensors dealt out to three files one by one."""
    folder = folders[layout]
    want = parameters(load(arch, folder))
    tensors = read_tensors(folder)
    place = {name: f"model-{1 + k % 3:05d}-of-00003.safetensors" for k, name in enumerate(tensors)}
    for file in sorted(set(place.values())):
        save_file({name: tensor for name, tensor in tensors.items() if place[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": place}))
    assert_same_bits(parameters(load(arch, folder)), want)


@pytest.mark.parametrize("arch", ["mixtral"])
def test_what_transformers_reads_under_either_name_is_read(arch: str, folders: tuple[Path, Path]) -> None:
    """It calls the layer mlp, the hub block_sparse_moe: it reads both names in both layouts."""
    want = parameters(load(arch, folders[0]))
    for folder, old, new in zip(folders, ("block_sparse_moe", "mlp"), ("mlp", "block_sparse_moe"), strict=True):
        rewrite(folder, {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in read_tensors(folder).items()})
        _, info = transformers.MixtralForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert_same_bits(parameters(load(arch, folder)), want)


def test_fused_rows_are_the_experts_rows() -> None:
    gate, up, down = (
        {f"{part}.{x}": random_bits(shape, torch.bfloat16) for x in range(3)}
        for part, shape in (("gate", (5, 4)), ("up", (5, 4)), ("down", (4, 5)))
    )
    fused = {
        "gate_up": torch.stack([torch.cat(pair) for pair in zip(gate.values(), up.values(), strict=True)]),
        "down": torch.stack(list(down.values())),
    }
    separate = expert_rows("gate.{x}", "up.{x}", "down.{x}", 3)
    for ours, one in zip(fused_expert_rows("gate_up", "down"), separate, strict=True):
        packed = ours.pack(fused)
        assert_same_bits({"": packed}, {"": one.pack(gate | up | down)})
        assert_same_bits(ours.unpack(packed), {ours.names()[0]: fused[ours.names()[0]]})


@pytest.mark.parametrize(
    "config_file", [path for path in CONFIGS if path.parent.name in SIZES], ids=lambda path: path.stem
)
def test_every_map_is_of_the_whole_model(config_file: Path) -> None:
    model, weights = meta_model(config_file)
    _, *others = format_of(get_arch(config_file.parent.name)).weight_maps(model.config)
    assert others
    count = sum(tensor.numel() for tensor in model.parameters())
    for other in others:
        shapes = other.shapes(dict(model.named_parameters()))
        assert sum(tensor.numel() for tensor in shapes.values()) == count
        assert other.skip == weights.skip


def test_the_map_with_most_of_the_parameters_is_picked() -> None:
    def weights(*, fused: bool) -> WeightMap:
        parts = ("x", "y") if fused else (Stack([f"{part}.{x}" for x in range(9)], dim=0) for part in "xy")
        return WeightMap({"norm": "norm", **dict(zip("ab", parts, strict=True))}, over={})

    hub, fused = weights(fused=False), weights(fused=True)
    experts = [f"{part}.{x}" for part in "xy" for x in range(9)]
    for names, want in [
        (["norm", *experts], hub),
        (["norm", "x", "y"], fused),
        (["norm", *experts[1:-1]], hub),
        (["norm", "y"], fused),
        (["norm", *experts, "x", "y"], hub),
        (["norm", *experts[:8], "y"], fused),
        (["norm"], hub),
        ([], hub),
    ]:
        assert pick_map([hub, fused], dict.fromkeys(names), {}) is want, names
    assert pick_map([hub], dict.fromkeys("xy"), {}) is hub
    assert len(format_of(get_arch("llama")).weight_maps(LlamaConfig())) == 1


GATE_UP, DOWN = (f"model.layers.2.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
BROKEN: dict[str, tuple[Callable[[Tensors, Tensors], Tensors], str]] = {
    "transposed": (
        lambda hub, fused: fused | {GATE_UP: fused[GATE_UP].mT},
        rf"{GATE_UP} must have shape \(3, \d+, 32\) by config.json, got \(3, 32, \d+\)",
    ),
    "an expert less": (
        lambda hub, fused: fused | {DOWN: fused[DOWN][:2]},
        rf"{DOWN} must have shape \(3, 32, \d+\) by config.json, got \(2, 32, \d+\)",
    ),
    "flat": (
        lambda hub, fused: fused | {GATE_UP: fused[GATE_UP].flatten(0, 1)},
        rf"{GATE_UP} must have shape \(3, \d+, 32\) by config.json, got \(\d+, 32\)",
    ),
    "fused, a tensor missing": (
        lambda hub, fused: {name: tensor for name, tensor in fused.items() if name != DOWN},
        rf"Missing: {DOWN}\. Check",
    ),
    "fused, a tensor renamed": (
        lambda hub, fused: {name.replace(DOWN, f"{DOWN}.weight"): tensor for name, tensor in fused.items()},
        rf"Missing: {DOWN} \(the file has {DOWN}\.weight\)\. Unexpected: {DOWN}\.weight\. Check",
    ),
    "hub, an expert missing": (
        lambda hub, fused: {name: tensor for name, tensor in hub.items() if ".2.mlp.experts.1." not in old(name)},
        r"Missing: model\.layers\.2\.\w+\.experts\.1\.\w+\.weight, [^ ]*, [^ ]*\. Check",
    ),
    "hub, no experts": (
        lambda hub, fused: {name: tensor for name, tensor in hub.items() if "experts" not in name},
        r"Missing: model\.layers\.0\.\w+\.experts\.0\.\w+\.weight, .* and \d+ more\. Check",
    ),
    "half of each": (
        lambda hub, fused: pick(hub, [0, 1, 4]) | pick(fused, [2, 3]),
        rf"Missing: model\.layers\.2\.\w+\.experts\.0\..* Unexpected: .*{DOWN}, {GATE_UP}",
    ),
    "most of it fused": (
        lambda hub, fused: pick(fused, [0, 1, 3, 4]) | pick(hub, [2]),
        rf"Missing: .*{GATE_UP}.* Unexpected: .*model\.layers\.2\.\w+\.experts\.0\.",
    ),
    "both": (
        lambda hub, fused: hub | fused,
        r"describes\. Unexpected: model\.layers\.0\.mlp\.experts\.down_proj, model\.layers\.0\.mlp\.experts\.gate",
    ),
}


def old(name: str) -> str:
    return name.replace("block_sparse_moe", "mlp")


def pick(tensors: Tensors, layers: list[int]) -> Tensors:
    """Without the MLPs of the other layers."""
    others = tuple(f"model.layers.{i}.mlp." for i in range(LAYERS) if i not in layers)
    return {name: tensor for name, tensor in tensors.items() if not old(name).startswith(others)}


@both
@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_named(
    arch: str, folders: tuple[Path, Path], damage: Callable[[Tensors, Tensors], Tensors], message: str
) -> None:
    hub, fused = map(read_tensors, folders)
    rewrite(folders[1], damage(hub, fused))
    with pytest.raises(ValueError, match=message):
        load(arch, folders[1])


MEMORY = """
import sys
from liger_models.arch.mixtral import LigerMixtral

def memory(key):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

LigerMixtral.from_pretrained(sys.argv[1], progress=False)  # what is imported on first use counts as well
before = memory("VmRSS")
model = LigerMixtral.from_pretrained(sys.argv[2], progress=False)
print(sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters()), memory("VmHWM") - before)
"""


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("fused", "copies"), [(False, 2), (True, 1)], ids=["hub", "fused"])
def test_experts_are_read_layer_by_layer(tmp_path: Path, fused: bool, copies: int) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 16, "num_hidden_layers": 5}
    for name, changes in (("small", {}), ("big", sizes)):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY | changes))
        model.save_pretrained(tmp_path / name, save_original_format=not fused, max_shard_size="60MB")
    for _ in range(3):  # the system's own pages, of files that are mapped for example, add to what is measured
        size, largest, peak = map(int, run(MEMORY, tmp_path / "small", tmp_path / "big").split())
        assert size > 200e6 > 5 * largest
        if peak < size + copies * largest + 16e6:
            return
    pytest.fail(f"{peak} bytes for {size} of weights, the largest {largest}")


@pytest.mark.cases(22)
@pytest.mark.parametrize(("arch", "variant"), FIRST_CASES, ids=str)
def test_every_family_is_read_without_the_prefix_of_its_body(arch: str, variant: str, tmp_path: Path) -> None:
    """As transformers saves a body without its head."""
    model = AutoLigerModel.from_config({"model_type": arch, **tiny(arch)[variant]})
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, {name.removeprefix("model."): tensor for name, tensor in read_tensors(tmp_path).items()})
    assert not any(name.startswith("model.") for name in read_tensors(tmp_path))
    again = AutoLigerModel.from_pretrained(tmp_path, progress=False)
    assert_same_bits(parameters(again), parameters(model))


ONE_LAYOUT = ("gemma4", "llama4", "muse_glimmer", "idefics3", "smolvlm")


@pytest.mark.cases(11)
@pytest.mark.parametrize(("arch", "variant"), [case for case in VISION_CASES if case[0] not in ONE_LAYOUT], ids=str)
def test_every_layout_of_towers_gives_one_model_and_one_export(arch: str, variant: str, tmp_path: Path) -> None:
    theirs = transformers.AutoConfig.for_model(arch, **tiny(arch)[variant]).to_dict()
    model_class = get_arch(arch)
    model = model_class.from_config(read_config(model_class.config_class, theirs, strict=True))
    model.save_pretrained(tmp_path / "hub")
    hub = read_tensors(tmp_path / "hub")
    _, *maps = format_of(get_arch(arch)).weight_maps(model.config)
    assert maps
    for number, weights in enumerate(maps):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "hub", folder)
        named = {n: t for name, p in parameters(model).items() for n, t in weights.entries[name].unpack(p.data).items()}
        if arch == "qwen3_vl_moe":  # the one whose layouts have the same names
            assert {n: t.shape for n, t in named.items()} != {n: t.shape for n, t in hub.items()}
        else:
            assert named.keys() != hub.keys()
        rewrite(folder, named)
        again = load(arch, folder)
        assert_same_bits(parameters(again), parameters(model))
        again.save_pretrained(tmp_path / f"{number}-again")
        assert_same_bits(read_tensors(tmp_path / f"{number}-again"), hub)
