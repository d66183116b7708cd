"""Adapters on a model whose layers are sharded over ranks: the gradients, steps and files of a single process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from liger_models.adapters import LoRAConfig, apply_lora, load_adapter, lora_config, save_adapter
from liger_models.convert import get_hf_state_dict
from liger_models.distributed.collectives import Group
from liger_models.parallel import (
    apply_fsdp,
    apply_tp,
    clip_grad_norm_,
    compile_blocks,
    load_state,
    save_state,
    targets_per_rank,
)

from .comparison import assert_same, assert_same_once, batch_for, build, mesh_of, run_config
from .models import batch, gradients, init_device_mesh, share, stir, tiny, whole
from .test_lora import trained

MATRICES = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]
CASES: list[tuple[str, dict[str, Any], bool]] = [
    *(("llama, tied, biases", {"use_dora": True, "target_modules": MATRICES}, each) for each in (False, True)),
    ("phi3", {"use_dora": True}, False),  # a rank's rows of q, k and v do not follow each other in the file's matrix
    ("deepseek_v2", {}, True),  # with projections to latents that every rank has
    ("gpt_oss", {"target_parameters": lora_config.EXPERTS}, True),
    ("llama4_text", {"target_parameters": lora_config.EXPERTS}, False),
    ("qwen2_5_vl", {"use_rslora": True}, False),  # with layers in the tower that the ranks do not divide
    ("mllama", {}, True),
    ("apertus", {"target_modules": ["up_proj", "down_proj"]}, True),
    ("muse_glimmer", {}, True),
    ("gemma4", {}, True),  # with projections that every rank has
]


def adapted(name: str, **config: Any) -> Any:
    return stir(apply_lora(build(*run_config(name)), LoRAConfig(r=3, **config)))


def each_case(cases: list[tuple[str, dict[str, Any], bool]]) -> list[dict[str, Any]]:
    results = []
    for name, config, sequence_parallel in cases:
        model = adapted(name, **config)
        if dist.is_initialized():
            apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
        out = model(**batch_for(model, 0), return_logits=True)
        out.loss.backward()
        results.append({"loss": out.loss.detach(), "logits": out.logits.detach(), "gradients": gradients(model)})
    return results


@pytest.mark.parametrize(
    "cases", [CASES[::2], pytest.param(CASES[1::2], marks=pytest.mark.matrix)], ids=["some", "others"]
)
def test_gradients_are_those_of_one_process(two, cases):
    expected = each_case(cases)
    for results in two(each_case, cases):
        for got, right in zip(results, expected, strict=True):
            assert_same_once(got, right)


def on_devices(device: str, name: str, config: dict[str, Any], sequence_parallel: bool) -> None:
    mesh, results = init_device_mesh(device, (2,), mesh_dim_names=("tp",)), []
    for cut in (False, True):
        model = adapted(name, **config).to(device)
        if cut:
            apply_tp(model, mesh, sequence_parallel=sequence_parallel)
        model(**batch_for(model, 0)).loss.backward()
        results.append(gradients(model))
    assert_same(results[1], results[0], limit=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_gpus(two_gpus, case):
    two_gpus(on_devices, "cuda", *case)


def test_what_the_gpus_are_to_run(two):
    two(on_devices, "cpu", *CASES[0])


def test_which_adapters_are_sharded():
    """Of q, k and v in one projection and in three tensors of the file, or in one."""
    found = {}
    for name in ("llama", "phi3"):
        arch, config = run_config(name)
        config = dataclasses.replace(config, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
        attention = apply_lora(build(arch, config), LoRAConfig()).layers[0].self_attn
        attention.shard(Group("", 2, 0))
        found[name] = [attention.qkv_proj.shard(Group("", 2, 0)), attention.o_proj.shard(Group("", 2, 0))]
    rows = {f"lora.{each}_proj.lora_B": 0 for each in "qkv"}
    assert found == {name: [of_qkv, {"lora.o_proj.lora_A": 1}] for name, of_qkv in {"llama": rows, "phi3": {}}.items()}


def compiled() -> dict[str, Any]:
    model = stir(apply_lora(tiny(num_hidden_layers=1), LoRAConfig(r=3)))
    if dist.is_initialized():
        compile_blocks(apply_tp(model, mesh_of(2), sequence_parallel=True), backend="eager")
    model(**batch(0)).loss.backward()
    return gradients(model)


@pytest.mark.matrix
@pytest.mark.compile
def test_a_compiled_block(two):
    expected = compiled()
    for got in two(compiled):
        assert_same(got, expected)


def run(folder: Path, shape: tuple[int, ...], sequence_parallel: bool = False) -> dict[str, Any]:
    """Two steps that start from PEFT's files or, if there is a state after the first, from that; then files."""
    model, (rank, ranks) = load_adapter(tiny(), folder / "start"), (0, 1)
    if shape:
        mesh = mesh_of(*shape)
        apply_tp(model, mesh["tp"], sequence_parallel=sequence_parallel)
    if len(shape) == 2:
        apply_fsdp(model, mesh["dp"], param_dtype=None)
        rank, ranks = dist.get_rank() // 2, 2
    model.set_checkpointing("full" if sequence_parallel else "none")
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, eps=1e-4)
    start = load_state(folder / "run", model, optimizer) or 0
    for step in range(start, 2):
        rows = share(batch(step), rank, ranks)
        model(**rows, num_items_in_batch=targets_per_rank([rows])).loss.backward()
        norm = clip_grad_norm_(trained(model), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            save_state(folder / "run", 1, model, optimizer)
    save_adapter(model, folder / "adapter")
    result = {"norm": {"": norm}, "weights": whole(model.named_parameters()), "merged": get_hf_state_dict(model)}
    if not sequence_parallel:
        result["greedy"] = model.generate([[5, 6, 7], [8, 9]], max_new_tokens=4, eos_token_id=[])
    return result


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.matrix)], ids=str)
def test_a_run_goes_on_on_any_ranks_and_writes_the_files_of_one_process(two, four, shape, tmp_path):
    for name in ("one", "ranks"):
        config = LoRAConfig(r=3, target_modules=MATRICES, use_dora=True)
        save_adapter(stir(apply_lora(tiny(), config)), tmp_path / name / "start")
    expected, folder = run(tmp_path / "one", ()), tmp_path / "ranks"
    results = two(run, folder, (2,), True)
    results += two(run, folder, shape) if shape == (2,) else four(run, folder, shape, True)
    files = []
    for each in (tmp_path / "one", folder):
        assert_same(whole(load_adapter(tiny(), each / "adapter").named_parameters()), expected["weights"])
        with safe_open(each / "adapter" / "adapter_model.safetensors", "pt") as file:
            files.append({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    assert files[0] == files[1]
    for got in [*results, run(folder, ())]:
        for part in ("norm", "weights", "merged"):
            assert_same(got[part], expected[part])
        assert "greedy" not in got or torch.equal(got["greedy"], expected["greedy"])


def drop(policy: str) -> dict[str, Any]:
    model = adapted("mixtral", lora_dropout=0.3, target_parameters=lora_config.EXPERTS)
    model.set_checkpointing(policy)
    apply_tp(model, mesh_of(2))
    torch.manual_seed(1)
    loss = model(**batch(0)).loss
    loss.backward()
    return {"loss": {"": loss.detach()}, "gradients": gradients(model)}


def test_dropout(two):
    """Ranks whose generators agree have the same loss and gradients, also where the forward is repeated."""
    with torch.no_grad():
        without = adapted("mixtral", target_parameters=lora_config.EXPERTS)(**batch(0)).loss
    first, *others = two(drop, "none") + two(drop, "full")
    assert abs(first["loss"][""] - without) > 1e-3
    for got in others:
        for part, right in first.items():
            assert_same(got[part], right)
