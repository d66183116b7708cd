"""Frozen weights in fewer bits whose layers are sharded over ranks: codes, loss, gradients and files of one device."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from liger_models import AutoLigerModel, LigerMixtral
from liger_models.adapters import LoRAConfig, apply_lora, load_adapter, quantize_base, save_adapter
from liger_models.adapters.lora_config import EXPERTS
from liger_models.arch.mixtral import MixtralConfig
from liger_models.convert import get_hf_state_dict, load_hf_tensors
from liger_models.kernels import dispatch
from liger_models.kernels.linear import gated_mlp
from liger_models.layers.frozen import FrozenParameters, freeze, frozen_weights
from liger_models.layers.linear import local
from liger_models.layers.moe import MATRICES, LigerMoE
from liger_models.parallel import apply_fsdp, apply_tp, compile_blocks, load_state, save_state, targets_per_rank

from ..convert.conftest import assert_same_bits, read_tensors
from ..convert.quantized_folders import make_quantized
from ..convert.test_fp8 import quantized
from ..kernels.moe.cases import quantize
from ..late import Late
from .comparison import assert_same, batch_for, mesh_of
from .models import TINY, batch, gradients, init_device_mesh, share, stir, tiny, whole
from .test_lora import trained
from .test_quantized import CONFIG
from .test_tensor_lora import CASES as CASES_OF_FAMILIES
from .test_tensor_lora import adapted as of_family

quantization = Late("torchao.quantization", "quantized weights need torchao")
pytestmark = pytest.mark.filterwarnings("ignore:NF4Tensor does not implement:UserWarning")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 2}
"""Two ranks share factors of 4-bit blocks: of successive rows, and of each row."""
DTYPES = pytest.mark.parametrize("dtype", ["nf4", "float8"])
SHAPES = pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.matrix)], ids=str)
"""Ranks of tensor parallelism, and of FSDP with it."""


def plain(experts: bool = False) -> Any:
    torch.manual_seed(7)
    sizes = {**TINY, **SIZES, "initializer_range": 0.1}
    return LigerMixtral.from_config(MixtralConfig(**sizes, num_local_experts=4)) if experts else tiny(**SIZES)


def adapted(**config: Any) -> Any:
    model = plain("target_parameters" in config)
    return stir(apply_lora(model, LoRAConfig(**{**CONFIG, **config})))


def on_ranks(model: Any, shape: tuple[int, ...], sequence_parallel: bool = False) -> Any:
    """The model, sharded over 1 or 2 dimensions if there are any."""
    if shape:
        apply_tp(model, mesh_of(*shape)["tp"], sequence_parallel=sequence_parallel)
    return apply_fsdp(model, mesh_of(*shape)["dp"], param_dtype=None) if len(shape) == 2 else model


def steps(model: Any, shape: tuple[int, ...], count: int = 2) -> dict[str, Tensor]:
    """The gradients of the last of these steps, and the losses of all."""
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, eps=1e-4)
    place = (dist.get_rank() // 2, 2) if len(shape) == 2 else (0, 1)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        rows = share(batch(step), *place)
        loss = model(**rows, num_items_in_batch=targets_per_rank([rows])).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {**gradients(model), "losses": torch.stack(losses)} if place == (0, 1) else gradients(model)


def run(
    dtype: str, config: dict[str, Any], shape: tuple[int, ...], sequence_parallel: bool, policy: str, folder: Path
) -> dict[str, Any]:
    """Two steps of a model, and what is gathered and saved of it."""
    model = on_ranks(quantize_base(adapted(**config), dtype=dtype), shape, sequence_parallel)
    model.set_checkpointing(policy)
    count, base = model.num_parameters(), get_hf_state_dict(model, merge=False)
    got = steps(model, shape)
    save_adapter(model, folder / str(len(shape)))
    stored = bytes_of(model)
    frozen = {name: (each.nbytes, local(each).nbytes) for name, each in model.named_parameters() if name in stored}
    return {"run": got, "base": base, "merged": get_hf_state_dict(model), "count": count, "bytes": frozen}


def bytes_of(model: Any) -> set[str]:
    """The parameters that are sharded as they are stored: codes, scales and factors."""
    modules = {path: module for path, module in model.named_modules() if isinstance(module, FrozenParameters)}
    others = {f"{path}.{name}" for path in modules for name in ("scales", "factors")}
    return {*frozen_weights(model), *others}


EVERYTHING: dict[str, Any] = {"target_parameters": EXPERTS}
CASES: list[tuple[str, dict[str, Any], bool, str]] = [
    ("nf4", {}, True, "none"),
    ("nf4", {"use_dora": True}, False, "selective"),
    ("float8", {"use_dora": True}, True, "full"),
    ("float8", {"target_modules": ["q_proj", "down_proj"]}, False, "none"),
    ("nf4", EVERYTHING, False, "none"),
    ("float8", EVERYTHING, True, "selective"),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES, ids=str)
@SHAPES
def test_ranks_are_one(two, four, shape, case, tmp_path):
    dtype, config, sequence_parallel, policy = case
    want = run(dtype, config, (), False, policy, tmp_path)
    one = load_adapter(plain("target_parameters" in config), tmp_path / "0")
    for got in (two if shape == (2,) else four)(run, dtype, config, shape, sequence_parallel, policy, tmp_path):
        assert got["count"] == want["count"]
        assert_same_bits(got["base"], want["base"])
        assert_same(got["run"], {name: each for name, each in want["run"].items() if name in got["run"]})
        assert got["run"].keys() ^ want["run"].keys() <= {"losses"}
        assert_same(got["merged"], want["merged"])
        halved = [part * 2 == size for name, (size, part) in got["bytes"].items() if shape == (2,)]
        # Every rank has the scales of rows of float8 whose columns are sharded.
        assert halved.count(False) == (0 if dtype == "nf4" or not halved else len(halved) // 4)
    loaded = load_adapter(plain("target_parameters" in config), tmp_path / str(len(shape)))
    assert_same(whole(loaded.named_parameters()), whole(one.named_parameters()))


def slices(dtype: str) -> list[dict[str, Tensor]]:
    """The numbers that this rank multiplies with, and those of one device that they should be."""
    model, results = quantize_base(adapted(**EVERYTHING), dtype=dtype), []
    sharded = on_ranks(quantize_base(adapted(**EVERYTHING), dtype=dtype), (2,))
    rank = dist.get_rank()
    for name, linear in model.named_modules():
        other = sharded.get_submodule(name)
        if isinstance(linear, LigerMoE):
            results += [
                (linear.matrices(each).dense().chunk(2, dim)[rank], other.matrices(each).dense())
                for each, dim in zip(MATRICES, (1, 2), strict=True)
            ]
        elif getattr(linear, "frozen_weight", None) is not None:
            dim = other.weight.placements[0].dim
            results.append((linear.dense_weight().chunk(2, dim)[rank], other.dense_weight()))
    return results


@DTYPES
def test_a_rank_multiplies_with_its_slice(two, dtype):
    for pairs in two(slices, dtype):
        assert len(pairs) == 2 * 4  # qkv, o, and both matrices of the experts
        for want, got in pairs:
            assert got.equal(want)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("dtype", ["nf4", "float8", "blocks", "mxfp4", "nvfp4"])
def test_slices_of_experts(dtype, dim):
    """In which factors begin and end: of 5 blocks a row."""
    quantization.to_nf4  # noqa: B018  skips without torchao
    weight = torch.randn(3, 32, 320, generator=torch.Generator().manual_seed(0))
    experts = quantize(weight, dtype)
    ranks = 5 if dim == 2 else 4
    layer = torch.nn.Module()
    layer.weight = None
    freeze(layer, "weight", experts)
    dims = layer.stored.shard(layer, "layer.weight", dim, ranks)
    for rank, want in enumerate(experts.dense().chunk(ranks, dim)):
        own = copy.deepcopy(layer)
        for name, along in dims.items():
            parameter = own.get_parameter(name.removeprefix("layer."))
            parameter.data = parameter.data.chunk(ranks, along)[rank].clone(memory_format=torch.contiguous_format)
        own.stored.shape = own.stored.local_shape
        part = own.stored.whole(own.weight)
        assert part.shape == want.shape
        assert part.dense().equal(want)
        assert part.codes.untyped_storage().nbytes() * ranks == experts.codes.nbytes


def loaded(folder: Path, dtype: str, experts: bool, shape: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """The base of a model that ranks quantize as they read it, and again of twice its weights."""

    def prepare(model: Any) -> None:
        config = {**CONFIG, "use_dora": not experts}
        on_ranks(quantize_base(apply_lora(model, LoRAConfig(**config)), dtype=dtype), shape)

    model = AutoLigerModel.from_pretrained(folder, progress=False, shard=prepare)
    base = get_hf_state_dict(model, merge=False)
    magnitudes = whole((name, each) for name, each in model.named_parameters() if name.endswith("magnitude_vector"))
    load_hf_tensors(model, {name: tensor * 2 for name, tensor in base.items()})
    return [base, magnitudes, get_hf_state_dict(model, merge=False)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("number", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@DTYPES
@SHAPES
def test_each_rank_quantizes_its_part_to_the_same_weights(two, four, shape, dtype, experts, number, tmp_path):
    quantization.to_nf4  # noqa: B018
    plain(experts).to(number).save_pretrained(tmp_path)
    want = loaded(tmp_path, dtype, experts, ())
    for got in (two if shape == (2,) else four)(loaded, tmp_path, dtype, experts, shape):
        for mine, its in zip(got, want, strict=True):
            assert_same_bits(mine, its)


def step_on_float8(folder: Path, shape: tuple[int, ...], targets: Any, saved: Path | None) -> dict[str, Any]:
    """Loss and gradients of adapters on weights that ranks have read as they are; the base is saved as it was."""

    def read(prepare: Any, dtype: str | None) -> Any:
        return AutoLigerModel.from_pretrained(folder, dtype=dtype, progress=False, keep_quantized=True, shard=prepare)

    if saved is not None:
        read(lambda model: on_ranks(model, shape), None).save_pretrained(saved)
    config = LoRAConfig(r=4, target_modules=targets, target_parameters=EXPERTS if "moe" in str(folder) else ())
    model = read(lambda model: on_ranks(apply_lora(model, config), shape), "float32")
    with torch.no_grad():
        for parameter in trained(model):
            parameter.fill_(0.0625)  # larger ones saturate the attention, whose gradients then cancel
    assert all(each.format.is_kept for each in frozen_weights(model).values())
    ids = torch.arange(2, 14).view(2, 6)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return {"loss": {"": loss.detach()}, "run": gradients(model), "base": get_hf_state_dict(model, merge=False)}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arch", "targets"), [("qwen3", "all-linear"), ("phi3", ["qkv_proj"]), ("qwen3_moe", ["v_proj", "o_proj"])]
)
@SHAPES
def test_float8_of_a_checkpoint_on_ranks(two, four, shape, arch, targets, tmp_path):
    """Blocks are whole in a slice of columns, and not in one of rows. Some layers have no adapters."""
    codes, _ = quantized(arch, tmp_path / arch, (24, 4))
    want = step_on_float8(codes, (), targets, None)
    for got in (two if shape == (2,) else four)(step_on_float8, codes, shape, targets, tmp_path / "saved"):
        assert_same_bits(got["base"], want["base"])
        for part in ("loss", "run"):
            assert_same(got[part], want[part])
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(codes))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "arch"), [("mo_nvfp4", "qwen3"), ("mo_tensors", "qwen3_moe")])
def test_other_formats_of_checkpoints_on_ranks(two, kind, arch, tmp_path):
    """Slices of rows and columns of codes and scales, with the factor of each row."""
    codes, _ = make_quantized(kind, arch, tmp_path / arch)
    targets = ["v_proj", "o_proj"]
    want = step_on_float8(codes, (), targets, None)
    for got in two(step_on_float8, codes, (2,), targets, tmp_path / "saved"):
        assert_same_bits(got["base"], want["base"])
        for part in ("loss", "run"):
            assert_same(got[part], want[part])
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(codes))


FAMILIES = [*CASES_OF_FAMILIES, ("qwen3_next", {}, True)]


def families(cases: list[tuple[str, dict[str, Any], bool]]) -> list[dict[str, Any]]:
    """Losses and gradients on float8, whose slices may end anywhere."""
    results = []
    for name, config, sequence_parallel in cases:
        model = quantize_base(of_family(name, **config), dtype="float8")
        if dist.is_initialized():
            on_ranks(model, (2,), sequence_parallel)
        loss = model(**batch_for(model, 0)).loss
        loss.backward()
        results.append({"loss": {"": loss.detach()}, "run": gradients(model)})
    return results


@pytest.mark.parametrize(
    "cases", [FAMILIES[::2], pytest.param(FAMILIES[1::2], marks=pytest.mark.matrix)], ids=["some", "others"]
)
def test_families(two, cases):
    """With layers of towers that every rank has, and adapters of a rank whose rows do not follow each other."""
    quantization.to_nf4  # noqa: B018
    expected = families(cases)
    for results in two(families, cases):
        for got, right in zip(results, expected, strict=True):
            for part in ("loss", "run"):
                assert_same(got[part], right[part])


def goes_on(folder: Path, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Two steps, or the second one if there is a state of the first, and generated tokens."""
    model = on_ranks(quantize_base(adapted(), dtype=dtype), shape)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, eps=1e-4)
    start = load_state(folder, model, optimizer) or 0
    place = (dist.get_rank() // 2, 2) if len(shape) == 2 else (0, 1)
    for step in range(start, 2):
        rows = share(batch(step), *place)
        model(**rows, num_items_in_batch=targets_per_rank([rows])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            save_state(folder, 1, model, optimizer)
    prompts = [[5, 6, 7], [8, 9]]
    return {
        "start": start,
        "weights": whole((name, each) for name, each in model.named_parameters() if ".lora." in name),
        "ids": model.eval().generate(prompts, max_new_tokens=4, eos_token_id=[]),
    }


@pytest.mark.cases(1)
@DTYPES
@SHAPES
def test_a_run_goes_on_on_any_ranks_and_generates(two, four, shape, dtype, tmp_path):
    quantization.to_nf4  # noqa: B018
    want = goes_on(tmp_path / "one", dtype, ())
    folder = tmp_path / "ranks"
    first = two(goes_on, folder, dtype, (2,))
    again = (two if shape == (2,) else four)(goes_on, folder, dtype, shape)
    results = [*first, *again, goes_on(folder, dtype, ())]
    assert [each["start"] for each in results] == [0, 0, *[1] * (len(again) + 1)]
    for got in results:
        assert_same(got["weights"], want["weights"])
        assert got["ids"].equal(want["ids"])


def on_kernels(dtype: str, sequence_parallel: bool, policy: str, experts: bool) -> None:
    """The fused ops with slices of quantized weights; gate and up are recomputed in several chunks."""
    assert dispatch.INTERPRET
    inputs = {key: value[:2, :6] for key, value in batch(0).items()}
    results = []
    for shape in ((), (2,)):
        config = EVERYTHING if experts else {}
        model = quantize_base(adapted(**config), dtype=dtype)
        model.layers = model.layers[:1]
        model.set_checkpointing(policy)
        on_ranks(model, shape, sequence_parallel)
        with mock.patch.multiple(gated_mlp, WORKSPACE_MIB=0, MIN_CHUNK=4):
            loss = model(**inputs).loss
            loss.backward()
        results.append({"loss": {"": loss.detach()}, "run": gradients(model)})
    for part in ("loss", "run"):
        assert_same(results[1][part], results[0][part])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("dtype", "sequence_parallel", "policy", "experts"),
    [("nf4", True, "selective", False), ("float8", False, "none", False), ("nf4", False, "none", True)],
)
def test_kernels(two_with_kernels, dtype, sequence_parallel, policy, experts):
    quantization.to_nf4  # noqa: B018
    two_with_kernels(on_kernels, dtype, sequence_parallel, policy, experts)


def without_adapters(dtype: str, experts: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The loss of a model without adapters under `apply_tp` and under `apply_fsdp`, and what would be saved."""
    found = []
    for shape in ((2,), ()):
        model = on_ranks(quantize_base(plain(experts), dtype=dtype), shape)
        model = model if shape else apply_fsdp(model, param_dtype=None)
        found.append((model(**batch(0)).loss.detach(), get_hf_state_dict(model)))
    return found


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_model_without_adapters(two, dtype, experts):
    quantization.to_nf4  # noqa: B018
    want = quantize_base(plain(experts), dtype=dtype)
    loss, tensors = want(**batch(0)).loss.detach(), get_hf_state_dict(want)
    for rank, found in enumerate(two(without_adapters, dtype, experts)):
        for got, stored in found:
            torch.testing.assert_close(got, loss)
            assert rank or stored.keys() == tensors.keys()
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in stored.items())


def compiled(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    model = quantize_base(adapted(), dtype=dtype)
    model.layers = model.layers[:1]
    compile_blocks(on_ranks(model, shape, bool(shape)), backend="eager")
    model(**batch(0)).loss.backward()
    return gradients(model)


@pytest.mark.matrix
@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["nf4", pytest.param("float8", marks=pytest.mark.matrix)])
def test_compiled_blocks(two, dtype):
    quantization.to_nf4  # noqa: B018
    want = compiled(dtype, ())
    for got in two(compiled, dtype, (2,)):
        assert_same(got, want)


def on_devices(device: str, dtype: str, sequence_parallel: bool) -> None:
    mesh, results = init_device_mesh(device, (2,), mesh_dim_names=("tp",)), []
    for cut in (False, True):
        model = quantize_base(adapted().to(device), dtype=dtype)
        if cut:
            apply_tp(model, mesh, sequence_parallel=sequence_parallel)
        model(**{name: value.to(device) for name, value in batch(0).items()}).loss.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0], limit=1e-4)


@pytest.mark.gpu
@DTYPES
def test_on_gpus(two_gpus, dtype):
    two_gpus(on_devices, "cuda", dtype, True)


def test_what_the_gpus_are_to_run(two):
    quantization.to_nf4  # noqa: B018
    two(on_devices, "cpu", "nf4", True)


def refused(codes: Path, mixed: Path) -> None:
    mesh = mesh_of(2)
    narrow: list[tuple[dict[str, Any], str]] = [
        ({}, r"64 columns, which share a scale, got 32 of 64 columns of layers\.0\.self_attn\.o_proj on each of 2"),
        (
            {"num_attention_heads": 2, "head_dim": 4, "hidden_size": 40},
            r"64 numbers, which share a scale, got 12 rows of 40 numbers of layers\.0\.self_attn\.qkv_proj on .* 2",
        ),
    ]
    for sizes, message in narrow:
        model = apply_lora(tiny(**{"hidden_size": 64, "intermediate_size": 384, "num_hidden_layers": 1} | sizes))
        with pytest.raises(ValueError, match=rf"apply_tp: .* must have a multiple of {message} ranks.*fewer ranks"):
            apply_tp(quantize_base(model), mesh)
    mixture = LigerMixtral.from_config(MixtralConfig(**{**TINY, **SIZES, "intermediate_size": 64}, num_local_experts=4))
    config = LoRAConfig(target_modules=[], target_parameters=EXPERTS)
    with pytest.raises(ValueError, match=r"got 32 of 64 columns of layers\.0\.mlp\.down_weight on each of 2 ranks"):
        apply_tp(quantize_base(apply_lora(mixture, config)), mesh)
    with pytest.raises(ValueError, match=r"multiple of 20 columns.* layers\.0\..*keep_quantized=False, or apply_fsdp"):
        AutoLigerModel.from_pretrained(
            codes, progress=False, keep_quantized=True, shard=lambda model: apply_tp(model, mesh)
        )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"multiple of 16 columns.* 12 of 24 columns of layers\.0\.mlp\.down_weight .*keep_"
    ):
        AutoLigerModel.from_pretrained(
            mixed, progress=False, keep_quantized=True, shard=lambda model: apply_tp(model, mesh)
        )  # fmt: skip
    for model in (apply_lora(plain()), apply_lora(plain(experts=True), config)):
        with pytest.raises(ValueError, match=r"linear layers must not be sharded yet.*Quantize, then call apply_tp"):
            quantize_base(apply_tp(model, mesh))


def test_bad_input(two, tmp_path):
    quantization.to_nf4  # noqa: B018
    mixed, _ = quantized("qwen3_moe", tmp_path / "moe", (24, 16))
    two(refused, quantized("qwen3", tmp_path, (24, 20))[0], mixed)


def gathered_tower() -> Tensor:
    model = quantize_base(of_family("gemma4"), dtype="float8")
    if dist.is_initialized():
        apply_fsdp(model, param_dtype=None)
    return model(**batch_for(model, 0)).loss.detach()


def test_the_patch_embedding_of_a_tower_is_not_cast_to_bytes(two):
    """The tower is under FSDP alone. The tests above have towers under tensor parallelism."""
    quantization.to_nf4  # noqa: B018
    want = gathered_tower()
    for got in two(gathered_tower):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
