"""Frozen weights in fewer bits under FSDP2: loss, gradients and files are those of one device with the same weights."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion

from liger_models import AutoLigerModel, LigerLlama, LigerMixtral
from liger_models.adapters import LoRAConfig, apply_lora, load_adapter, quantize_base, save_adapter
from liger_models.adapters.lora_config import EXPERTS
from liger_models.adapters.lora_layers import LoRALinear, adapted_layers
from liger_models.arch.mixtral import MixtralConfig
from liger_models.convert import get_hf_state_dict, load_hf_tensors
from liger_models.kernels import dispatch
from liger_models.layers.frozen import frozen_parts, frozen_weights
from liger_models.layers.layer import routed_layers
from liger_models.layers.linear import local
from liger_models.layers.moe import MATRICES
from liger_models.parallel import apply_fsdp, compile_blocks, targets_per_rank, unsharded
from liger_models.train.report import estimate

from ..convert.conftest import assert_same_bits, read_tensors
from ..convert.quantized_folders import make_quantized
from ..convert.test_fp8 import quantized
from ..convert.test_mxfp4 import make as make_mxfp4
from ..late import Late
from .comparison import assert_same
from .models import TINY, batch, gradients, share, stir, tiny
from .test_lora import goes_on, over_experts, run, trained

quantization = Late("torchao.quantization", "quantized weights need torchao")
pytestmark = pytest.mark.filterwarnings("ignore:NF4Tensor does not implement:UserWarning")

CONFIG: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
"""Ranks share 4-bit blocks, and factors of them, unevenly."""

DTYPES = pytest.mark.parametrize("dtype", ["nf4", "float8"])


def adapted(**config: Any) -> LigerLlama:
    return stir(apply_lora(tiny(**SIZES), LoRAConfig(**CONFIG, **config)))


def sharded(dtype: str, config: dict[str, Any], policy: str, compiled: bool, folder: str, **options: Any):
    model = apply_fsdp(quantize_base(adapted(**config), dtype=dtype), **{"param_dtype": None, **options})
    model.set_checkpointing(policy)
    if compiled:
        compile_blocks(model, backend="eager")
    count = model.num_parameters()
    got = run(model, dist.get_rank(), dist.get_world_size())
    save_adapter(model, folder)
    frozen = [each for each in model.parameters() if not each.requires_grad and each.dtype == torch.uint8]
    assert all(each.grad is None for each in frozen)
    return got, [(each.nbytes, local(each).nbytes) for each in frozen], count, get_hf_state_dict(model)


@pytest.mark.cases(2)
@pytest.mark.compile
@pytest.mark.parametrize(
    ("dtype", "config", "policy", "compiled", "options"),
    [
        ("nf4", {}, "none", False, {}),
        ("nf4", {"use_dora": True}, "selective", False, {"reshard_after_forward": False}),
        ("float8", {}, "full", False, {"cpu_offload": True}),
        ("float8", {}, "none", True, {}),
    ],
)
def test_two_ranks_are_one(two, dtype, config, policy, compiled, options, tmp_path):
    one = quantize_base(adapted(**config), dtype=dtype)
    count, want = one.num_parameters(), run(one, 0, 1)
    tensors = get_hf_state_dict(one)
    for got, sizes, counted, merged in two(with_options, (dtype, config, policy, compiled, str(tmp_path)), options):
        assert counted == count
        assert len(sizes) == 2 * 4 * (3 if dtype == "nf4" else 2)
        assert sum(part for _, part in sizes) <= 0.51 * sum(size for size, _ in sizes)
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
        for name, tensor in tensors.items():
            torch.testing.assert_close(merged[name], tensor, rtol=1e-4, atol=1e-5)
    loaded = load_adapter(tiny(**SIZES), tmp_path)
    for name, parameter in one.named_parameters():
        if ".lora." in name:
            torch.testing.assert_close(loaded.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def on_devices(device: str) -> None:
    """One process and two on the same devices, whose sums are in fp32."""
    for dtype in ("nf4", "float8"):
        results = []
        for place, parts in ((0, 1), (dist.get_rank(), 2)):
            model = quantize_base(adapted().to(device), dtype=dtype)
            model = model if parts == 1 else apply_fsdp(model, param_dtype=None)
            rows = {name: value.to(device) for name, value in share(batch(0), place, parts).items()}
            model(**rows, num_items_in_batch=targets_per_rank(rows)).loss.backward()
            results.append(gradients(model))
        assert_same(results[1], results[0], limit=1e-4)


@pytest.mark.gpu
def test_on_gpus(two_gpus):
    two_gpus(on_devices, "cuda")


def test_what_the_gpus_are_to_run(two):
    two(on_devices, "cpu")


def with_options(arguments: tuple[Any, ...], options: dict[str, Any]):
    return sharded(*arguments, **options)


def in_bfloat16(dtype: str, experts: bool, older: bool) -> tuple[Tensor, bool]:
    """Loss of a model in fp32 that computes in bfloat16, and whether gathered codes are bytes."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def init_dtype_attrs(self: Any, policy: Any) -> None:
        """As PyTorch 2.11 has it, for parameters that are not trained."""
        self.orig_dtype = self.sharded_param.dtype
        self.param_dtype = None if policy.param_dtype == self.orig_dtype else policy.param_dtype
        self.reduce_dtype = None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype

    before = FSDPParam.init_dtype_attrs
    try:
        if older:
            FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign]
        model = apply_fsdp(quantize_base(adapted_mixture() if experts else adapted(), dtype=dtype))
        loss = model(**batch(0)).loss.detach()
        with unsharded(model) as gathered:
            codes = [each for name, each in gathered.named_parameters() if ".stored." in name]
            codes += [gathered.get_parameter(name) for name in frozen_weights(model)]
            return loss, all(each.dtype == torch.uint8 for each in codes)
    finally:
        FSDPParam.init_dtype_attrs = before  # type: ignore[method-assign]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_gathered_codes_are_bytes_whatever_the_others_are_cast_to(two, experts, older):
    (loss, are_bytes), (other, _) = two(in_bfloat16, "nf4", experts, older)
    want = quantize_base(adapted_mixture() if experts else adapted())(**batch(0)).loss
    assert are_bytes
    assert loss.equal(other)
    torch.testing.assert_close(loss.float(), want.detach(), rtol=0.02, atol=0)


def loaded(folder: str, dtype: str, shard: bool) -> dict[str, Tensor]:
    """The dequantized weights."""

    def prepare(model: LigerLlama) -> None:
        quantize_base(apply_lora(model, LoRAConfig(**CONFIG)), dtype=dtype)
        if shard:
            apply_fsdp(model, param_dtype=None)

    model = LigerLlama.from_pretrained(folder, progress=False, shard=prepare)
    assert len(frozen_weights(model)) == 8
    weights = dense(model)
    tensors = {name: tensor * 2 for name, tensor in get_hf_state_dict(model, merge=False).items()}
    load_hf_tensors(model, tensors)
    return weights | {f"twice {name}": each for name, each in dense(model).items()}


def dense(model: LigerLlama) -> dict[str, Tensor]:
    found = {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, LoRALinear)}
    return {name: layer.dense_weight().detach().clone() for name, layer in found.items()}


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("number", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, SIZES | {"hidden_size": 40, "intermediate_size": 56}], ids=str)
def test_each_rank_quantizes_its_part_to_the_same_weights(two, dtype, number, sizes, tmp_path):
    """Also where blocks of 64 go over the ends of rows."""
    quantization.to_nf4  # noqa: B018  skips without torchao
    model = tiny(**sizes).to(number)
    model.save_pretrained(tmp_path)
    want = dense(quantize_base(apply_lora(model, LoRAConfig(**CONFIG)), dtype=dtype))
    assert len(want) == 8
    for found in [*two(loaded, str(tmp_path), dtype, True), loaded(str(tmp_path), dtype, False)]:
        for name, weight in want.items():
            assert found[name].equal(weight), name
            assert found[f"twice {name}"].equal(2 * weight) or dtype == "nf4", name


def resumed(folder: str, dtype: str, experts: bool) -> bool:
    make = adapted_mixture if experts else adapted
    return goes_on(folder, lambda: apply_fsdp(quantize_base(make(), dtype=dtype), param_dtype=None))


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_run_goes_on_from_its_state(two, dtype, experts, tmp_path):
    quantization.to_nf4  # noqa: B018
    assert all(two(resumed, str(tmp_path), dtype, experts))


def generated(dtype: str) -> tuple[Tensor, Tensor]:
    model = apply_fsdp(quantize_base(adapted(), dtype=dtype), param_dtype=None).eval()
    ids = batch(0)["input_ids"][:1, :5]
    whole = model.generate(ids, max_new_tokens=4, eos_token_id=[])
    with unsharded(model) as gathered:
        return whole, gathered.generate(ids, max_new_tokens=4, eos_token_id=[])


@pytest.mark.cases(1)
@DTYPES
def test_generates_as_one(two, dtype):
    quantization.to_nf4  # noqa: B018
    want = quantize_base(adapted(), dtype=dtype).eval()
    ids = want.generate(batch(0)["input_ids"][:1, :5], max_new_tokens=4, eos_token_id=[])
    for found in two(generated, dtype):
        assert all(each.equal(ids) for each in found)


def step_on_float8(folder: str, saved: str, experts: bool, parallel: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of adapters on weights that ranks have read as they are; the base is saved as it was."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    over_ranks = partial(over_experts, ranks=ranks) if parallel else partial(apply_fsdp, param_dtype=None)
    shard = lambda model: over_ranks(model) if ranks > 1 else model
    read = lambda prepare, dtype: AutoLigerModel.from_pretrained(
        folder, dtype=dtype, progress=False, keep_quantized=True, shard=prepare
    )
    if saved:
        read(shard, None).save_pretrained(saved)
    config = LoRAConfig(r=4, target_parameters=EXPERTS if experts else ())
    model = stir_sharded(read(lambda model: shard(apply_lora(model, config)), "float32" if experts else None))
    assert len(frozen_weights(model)) > 0
    assert all(len(frozen_parts(layer)) == 2 for layer in routed_layers(model))
    if experts and ranks > 1:
        assert local(routed_layers(model)[0].down_weight).numel() * ranks == routed_layers(model)[0].down_weight.numel()
    ids = torch.arange(2, 14).view(2, 6)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), gradients(model)


def stir_sharded(model: Any) -> Any:
    """Adapters of 1 / 8, on every rank."""
    with torch.no_grad():
        for parameter in trained(model):
            parameter.fill_(0.125)
    return model


@pytest.mark.parametrize(
    ("arch", "ranks", "parallel"),
    [
        ("qwen3", 2, False),
        ("qwen3_moe", 2, True),
        pytest.param("phi3", 2, False, marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", 2, False, marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", 4, False, marks=pytest.mark.matrix),
    ],
)
def test_float8_of_a_checkpoint_on_ranks(two, four, arch, ranks, parallel, tmp_path):
    """Shards end within blocks, whose scales are those of their rows; experts may be distributed by `apply_ep`.

    The six experts are too few for four ranks, which have a part of each.
    """
    codes, _ = quantized(arch, tmp_path, (24, 20))
    experts = arch == "qwen3_moe"
    want, expected = step_on_float8(str(codes), "", experts, parallel)
    for loss, found in (two if ranks == 2 else four)(
        step_on_float8, str(codes), str(tmp_path / "saved"), experts, parallel
    ):
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(codes))


@pytest.mark.parametrize(
    ("kind", "arch", "parallel"),
    [
        ("mo_nvfp4", "qwen3", False),
        ("ct_int4", "qwen3_moe", False),
        ("mxfp4", "gpt_oss", True),
        pytest.param("mo_tensors", "qwen3_moe", False, marks=pytest.mark.matrix),
        pytest.param("mo_nvfp4", "qwen3_moe", True, marks=pytest.mark.matrix),
        pytest.param("mxfp4", "gpt_oss", False, marks=pytest.mark.matrix),
    ],
)
def test_other_formats_of_checkpoints_on_ranks(two, kind, arch, parallel, tmp_path):
    """Rows of codes and scales on ranks, or whole experts; the ranks write the files that they have read."""
    codes = make_mxfp4(tmp_path / "codes") if kind == "mxfp4" else make_quantized(kind, arch, tmp_path)[0]
    experts = arch != "qwen3"
    want, expected = step_on_float8(str(codes), "", experts, parallel)
    for loss, found in two(step_on_float8, str(codes), str(tmp_path / "saved"), experts, parallel):
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert_same_bits(read_tensors(tmp_path / "saved"), read_tensors(codes))


OF_EXPERTS: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}


def mixed(experts: int = 3) -> LigerMixtral:
    """A mixture whose experts ranks share unevenly if their number is odd."""
    torch.manual_seed(7)
    sizes = {**TINY, **SIZES, "intermediate_size": 64, "initializer_range": 0.1}
    return LigerMixtral.from_config(
        MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=min(experts, 2))
    )


def adapted_mixture(experts: int = 3) -> LigerMixtral:
    return stir(apply_lora(mixed(experts), LoRAConfig(**OF_EXPERTS)))


def mixture_on_ranks(
    dtype: str, experts: int, policy: str, compiled: bool, folder: str, options: dict[str, Any]
) -> dict[str, Any]:
    model = quantize_base(adapted_mixture(experts), dtype=dtype)
    if dist.is_initialized():
        apply_fsdp(model, **{"param_dtype": None, **options})
    model.set_checkpointing(policy)
    if compiled:
        compile_blocks(model, backend="eager")
    names = [f"mlp.{each}" for each in MATRICES] + [f"mlp.stored.{each}." for each in MATRICES]
    frozen = [each for name, each in model.named_parameters() if any(part in name for part in names)]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    counted = estimate(model, 64, **{"four_bit" if dtype == "nf4" else "float8": True})
    if ranks > 1:
        assert counted.weights == sum(local(each).nbytes for each in model.parameters())
    found = {"run": run(model, rank, ranks), "count": model.num_parameters()}
    save_adapter(model, folder)
    found |= {"base": get_hf_state_dict(model, merge=False), "merged": get_hf_state_dict(model)}
    if ranks > 1:
        found["base of rank 1"] = get_hf_state_dict(model, merge=False, rank=1)
    assert all(each.grad is None for each in frozen)
    return found | {"sizes": [(len(each), len(local(each)), each.dtype) for each in frozen]}


@pytest.mark.cases(2)
@pytest.mark.compile
@pytest.mark.parametrize(
    ("dtype", "experts", "policy", "compiled", "options"),
    [
        ("nf4", 3, "none", False, {}),
        ("nf4", 4, "full", False, {"reshard_after_forward": False}),
        ("float8", 3, "selective", False, {"cpu_offload": True}),
        # A compiled block of linear layers is in the test above.
        pytest.param("float8", 2, "none", True, {"prefetch": 2}, marks=pytest.mark.matrix),
        pytest.param("nf4", 3, "none", True, {}, marks=pytest.mark.matrix),
    ],
)
def test_experts_on_two_ranks_are_one(two, dtype, experts, policy, compiled, options, tmp_path):
    """Shared by experts, in 4 bits or in float8, gathered as codes: gradients, base and files of one process."""
    quantization.to_nf4  # noqa: B018
    want = mixture_on_ranks(dtype, experts, "none", False, str(tmp_path / "one"), {})
    one = load_adapter(mixed(experts), tmp_path / "one")
    found = two(mixture_on_ranks, dtype, experts, policy, compiled, str(tmp_path / "two"), options)
    for rank, got in enumerate(found):
        own = len(torch.arange(experts).chunk(2)[rank])
        table = [(16, 8, torch.uint8)] if dtype == "nf4" else []
        counts = [(experts, own, torch.uint8)] * (4 if dtype == "nf4" else 2) + table
        assert sorted(got["sizes"], key=str) == sorted(counts * 2 * 2, key=str)  # two matrices of two layers
        assert got["count"] == want["count"]
        assert got["run"].keys() == want["run"].keys()
        for name, gradient in want["run"].items():
            torch.testing.assert_close(got["run"][name], gradient, rtol=1e-4, atol=1e-6)
        assert_same_bits(got["base"], want["base"])
        assert_same_bits(got["base of rank 1"], want["base"] if rank == 1 else {})
        for name, tensor in want["merged"].items():
            torch.testing.assert_close(got["merged"][name], tensor, rtol=1e-4, atol=1e-5)
    loaded = load_adapter(mixed(experts), tmp_path / "two")
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.matrix  # as on two ranks
@DTYPES
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 2}], ids=["parts", "whole"])
def test_experts_on_four_ranks_are_one(four, dtype, options, tmp_path):
    """Each has a part of all three; or one has none, and in between they are resharded over two ranks."""
    quantization.to_nf4  # noqa: B018
    want = mixture_on_ranks(dtype, 3, "none", False, str(tmp_path / "one"), {})
    for got in four(mixture_on_ranks, dtype, 3, "none", False, str(tmp_path / "four"), options):
        assert any(held == 3 for _, held, _ in got["sizes"]) == (not options)  # a part of each, or one
        assert got["run"].keys() == want["run"].keys()
        for name, gradient in want["run"].items():
            torch.testing.assert_close(got["run"][name], gradient, rtol=1e-4, atol=1e-6)
        assert_same_bits(got["base"], want["base"])


def experts_on_kernels(dtype: str) -> None:
    """The fused ops with gathered codes."""
    assert dispatch.INTERPRET
    inputs, results = {key: value[:2, :6] for key, value in batch(0).items()}, []
    for shard in (False, True):
        model = quantize_base(adapted_mixture(), dtype=dtype)
        model.layers = model.layers[:1]
        if shard:
            apply_fsdp(model, param_dtype=None)
        model(**inputs).loss.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0], limit=1e-4)


@pytest.mark.cases(1)
@DTYPES
def test_experts_on_kernels(two_with_kernels, dtype):
    quantization.to_nf4  # noqa: B018
    two_with_kernels(experts_on_kernels, dtype)


def experts_loaded(folder: str, dtype: str, shard: bool) -> list[Any]:
    """The base as it is read and quantized, twice that, tokens, and an adapted step of the latter."""

    def prepare(model: Any) -> None:
        quantize_base(apply_lora(model, LoRAConfig(**OF_EXPERTS)), dtype=dtype)
        if shard:
            apply_fsdp(model, param_dtype=None)

    model = AutoLigerModel.from_pretrained(folder, progress=False, shard=prepare)
    base = get_hf_state_dict(model, merge=False)
    load_hf_tensors(model, {name: tensor * 2 for name, tensor in base.items()})
    results = [base, get_hf_state_dict(model, merge=False)]
    ids = batch(0)["input_ids"][:1, :5]
    results.append({"ids": model.generate(ids, max_new_tokens=4, eos_token_id=[])})
    with unsharded(model) as gathered:
        results.append({"ids": gathered.generate(ids, max_new_tokens=4, eos_token_id=[])})
    return results


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("number", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize("experts", [1, 3])
def test_each_rank_quantizes_its_experts_to_the_same_weights(two, dtype, number, experts, tmp_path):
    """Also a rank that has none."""
    quantization.to_nf4  # noqa: B018
    model = mixed(experts).to(number)
    model.save_pretrained(tmp_path)
    want = experts_loaded(str(tmp_path), dtype, False)
    whole = quantize_base(apply_lora(model, LoRAConfig(**OF_EXPERTS)), dtype=dtype)
    assert_same_bits(want[0], get_hf_state_dict(whole, merge=False))
    for found in two(experts_loaded, str(tmp_path), dtype, True):
        for mine, its in zip(found, want, strict=True):
            assert_same_bits(mine, its)


def by_hand(dtype: str, experts: bool, expected: dict[str, Tensor]) -> None:
    model = quantize_base(adapted_mixture() if experts else stir(apply_lora(tiny(), LoRAConfig(**CONFIG))), dtype=dtype)
    warnings.filterwarnings(
        "ignore", r"FSDP2-wrapped module \(.*\) returned a view", UserWarning
    )  # see docs/training.md
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    inputs = share(batch(0), dist.get_rank(), 2)
    model(**inputs, num_items_in_batch=targets_per_rank(inputs)).loss.backward()
    assert_same(gradients(model), expected)


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="FSDP of PyTorch gives bytes a gradient")
def test_fully_shard_by_hand(two, dtype, experts):
    """Without `apply_fsdp`, on small weights, too."""
    quantization.to_nf4  # noqa: B018
    model = quantize_base(adapted_mixture() if experts else stir(apply_lora(tiny(), LoRAConfig(**CONFIG))), dtype=dtype)
    model(**batch(0)).loss.backward()
    two(by_hand, dtype, experts, gradients(model))


def under_ddp(dtype: str, with_adapters: bool) -> None:
    """DistributedDataParallel broadcasts neither codes nor scales, and trains the adapters."""
    model = apply_lora(tiny(**SIZES), LoRAConfig(**CONFIG)) if with_adapters else tiny(**SIZES)
    model = quantize_base(model, dtype=dtype)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())
    inputs = share(batch(0), dist.get_rank(), 2)
    wrapped(**inputs, num_items_in_batch=targets_per_rank(inputs)).loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            mine = parameter.grad.clone()
            dist.broadcast(mine, 0)
            assert mine.equal(parameter.grad)


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("with_adapters", [True, False])
def test_distributed_data_parallel(two, dtype, with_adapters):
    two(under_ddp, dtype, with_adapters)
