"""`liger-models verify --adapter`: a trained adapter passes, and what is wrong with others is named."""

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("typer", reason="needs the extra cli")

from typer.testing import CliRunner

from liger_models import AutoLigerModel, LigerLlama, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora, save_adapter
from liger_models.adapters.check import adapter_line, adapter_parameters, adapter_sums, check_trained
from liger_models.cli import commands
from liger_models.cli.adapter import module_names
from liger_models.cli.served import SERVERS, SGLANG, VLLM, check_served

from ..arch.families import FIRST_CASES, load, make_folder, of_each_kind, tiny
from ..convert.quantized_folders import make_quantized

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
STEM = "base_model.model.model.layers.1"


def write(model, folder, **options) -> None:
    """An adapter whose tensors have all moved."""
    torch.manual_seed(1)
    apply_lora(model, LoRAConfig(r=4, lora_alpha=8, **options))
    for parameter in adapter_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(model, folder)


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """The folders "model" and "adapter"."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    LigerLlama.from_config(LlamaConfig(**SIZES)).save_pretrained("model")
    write(AutoLigerModel.from_pretrained("model", progress=False), "adapter")
    return tmp_path / "adapter"


def verify(*options: str, code: int = 0) -> list[str]:
    arguments = ["verify", "model", "--adapter", "adapter", "--device", "cpu", *options]
    done = CliRunner().invoke(commands.app, arguments)
    assert done.exit_code == code, done.output
    return done.stdout.splitlines()


def change(adapter, edit) -> None:
    """Edit the tensors of an adapter."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(edit(tensors) or tensors, adapter / "adapter_model.safetensors")


def configure(adapter, **keys) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_a_trained_adapter_is_whole(adapter):
    pytest.importorskip("peft")
    lines = verify("--served")
    assert lines[:3] == [
        "ok: every target name matches a module",
        "ok: vLLM 0.33.0 loads all 28 tensors",
        "ok: SGLang 0.5.23 loads all 28 tensors",
    ]
    assert lines[3:5] == [
        "ok: all 28 tensors moved from their initial values",
        "ok: a gradient reaches every tensor",
    ]
    assert lines[5].startswith("ok: logits change by ")
    assert lines[6].startswith("ok: logits equal those of PEFT on transformers (")
    assert lines[7:] == ["the adapter is whole"]


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", of_each_kind(FIRST_CASES), ids="-".join)
def test_adapters_of_every_family(case, tmp_path, monkeypatch):
    """Servers know the names of all tensors of every family's adapters, unless they have no such adapters."""
    pytest.importorskip("transformers")
    folder = make_folder(*case, tmp_path)
    monkeypatch.chdir(tmp_path)
    model = load(case[0], folder)
    modules = module_names(model)
    write(model, "adapter", target_modules="all-linear")
    names = load_file("adapter/adapter_model.safetensors").keys()
    for server in SERVERS:
        told = [str(finding) for finding in check_served(server, tmp_path / "adapter", names, modules)]
        assert not any("the model has no module" in line or "Rename it" in line for line in told), told


@pytest.mark.parametrize(
    ("arch", "told"),
    [
        ("mllama", "logits equal those of PEFT"),
        ("nemotron_h", "logits not compared with PEFT: PEFT refuses the adapter: "),
    ],
)
def test_layers_that_text_does_not_reach_and_layers_that_peft_refuses(arch, told, tmp_path):
    pytest.importorskip("peft")
    folder = make_folder(arch, next(iter(tiny(arch))), tmp_path)
    write(load(arch, folder), tmp_path / "adapter")
    done = CliRunner().invoke(commands.app, ["verify", str(folder), "--adapter", str(tmp_path / "adapter")])
    assert done.exit_code == 0, done.output
    assert f"ok: {told}" in done.stdout


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("mo_tensors", "transformers does not know quant_method 'modelopt'"),
        ("bnb", "transformers can't load the checkpoint: a package is required"),
    ],
)
def test_a_base_that_transformers_cannot_read(form, told, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    codes, dense = make_quantized(form, "qwen3", tmp_path)
    write(AutoLigerModel.from_pretrained(dense, progress=False), tmp_path / "adapter")
    missing = mock.Mock(side_effect=ImportError("a package is required"))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", missing)
    done = CliRunner().invoke(commands.app, ["verify", str(codes), "--adapter", str(tmp_path / "adapter")])
    assert done.exit_code == 0, done.output
    assert f"ok: logits not compared with PEFT: {told}" in done.stdout


def test_tensors_that_did_not_move(adapter):
    names = [f"{STEM}.mlp.up_proj.lora_B.weight", f"{STEM}.mlp.gate_proj.lora_A.weight"]
    change(adapter, lambda tensors: [tensors[name].zero_() for name in names] and None)
    lines = verify(code=commands.DIFFERS)
    assert f"PROBLEM: {names[0]}: B starts at 0 and did not move." in " ".join(lines)
    assert f"PROBLEM: {names[1]}: is 0, so B gets no gradient." in " ".join(lines)
    partner = names[0].replace("lora_B", "lora_A")
    assert any(line.startswith(f"PROBLEM: {partner}: gets no gradient.") for line in lines)
    assert lines[-1] == "4 problems"


def test_an_adapter_without_effect(adapter):
    change(adapter, lambda tensors: [t.zero_() for name, t in tensors.items() if "lora_B" in name] and None)
    assert any("the logits are the same with and without it" in line for line in verify(code=commands.DIFFERS))


def test_a_target_that_matches_nothing(adapter):
    configure(
        adapter, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
    )
    problem = verify(code=commands.DIFFERS)[0]
    assert problem.startswith("PROBLEM: target_modules 'fc': matches no linear layer (down_proj, gate_proj, ")


def renamed(old: str, new: str):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "layers.1.mlp.up_proj",
            "layers.1.mlp.upproj",
            "so vLLM 0.33.0 refuses it. Did you mean model.layers.1.mlp.up_",
        ),
        ("model.model.layers.1.", "model.layers.1.", "so SGLang 0.5.23 ignores it without a word. Did you mean model."),
        ("base_model.model.", "", "vLLM 0.33.0 reads names base_model.model.MODULE.lora_A.weight and lora_B. Rename"),
        ("lora_A.weight", "lora_A.default.weight", "SGLang 0.5.23 reads names base_model.model.MODULE.lora_A.weight"),
    ],
)
def test_a_broken_name_is_told(adapter, old, new, told):
    change(adapter, renamed(old, new))
    lines = verify("--served", code=commands.DIFFERS)
    assert any(line.startswith("PROBLEM: ") and told in line for line in lines), lines
    assert any("must hold exactly the adapters" in line for line in lines)  # nor does the model load it


@pytest.mark.parametrize(
    ("server", "keys", "told"),
    [
        (VLLM, {"use_dora": True}, "use_dora: vLLM 0.33.0 refuses it, got True."),
        (SGLANG, {"use_dora": True}, "use_dora: SGLang 0.5.23 refuses it, got True."),
        (SGLANG, {"use_rslora": True}, "use_rslora: SGLang 0.5.23 ignores it, got True. It scales by alpha / r."),
        (VLLM, {"r": 32}, "r: vLLM 0.33.0 takes ranks up to 16, got 32. Start it with --max-lora-rank 32."),
        (SGLANG, {"target_modules": ".*q_proj"}, "target_modules: SGLang 0.5.23 takes a list of names"),
    ],
)
def test_settings_that_a_server_does_not_take(adapter, server, keys, told):
    configure(adapter, **keys)
    names = load_file(adapter / "adapter_model.safetensors").keys()
    modules = module_names(AutoLigerModel.from_pretrained("model", progress=False))
    assert any(str(finding).startswith(told) for finding in check_served(server, adapter, names, modules))
    other = VLLM if server is SGLANG else SGLANG
    if "use_dora" not in keys:
        assert [*check_served(other, adapter, names, modules)] == []


def test_modules_that_sglang_stacks(adapter):
    write(AutoLigerModel.from_pretrained("model", progress=False), "adapter", target_modules=["q_proj", "up_proj"])
    lines = verify("--served", code=commands.DIFFERS)
    assert "ok: vLLM 0.33.0 loads all 8 tensors" in lines
    problems = [line for line in lines if line.startswith("PROBLEM")]
    assert len(problems) == 4
    assert problems[1].startswith(
        f"PROBLEM: {STEM.replace('1', '0')}.self_attn.q_proj.lora_A.weight: SGLang 0.5.23 needs"
    )


def test_a_tied_head(adapter):
    LigerLlama.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained("model")
    write(AutoLigerModel.from_pretrained("model", progress=False), "adapter", target_modules=["q_proj", "lm_head"])
    lines = verify(code=commands.DIFFERS)
    assert any(line.startswith("PROBLEM: lm_head: only the head is adapted, not the embedding") for line in lines)


def test_training_tells_which_tensors_did_not_move():
    model = apply_lora(LigerLlama.from_config(LlamaConfig(**SIZES)), LoRAConfig(r=2))
    before = adapter_sums(model)
    assert check_trained(model, before, 1) == []  # a first step may move nothing
    assert adapter_line(model, before, 1).startswith("adapter     0 of 28 tensors moved, after too few steps")
    names = list(adapter_parameters(model))
    assert [finding.name for finding in check_trained(model, before, 3)] == names
    assert [finding.name for finding in check_trained(model, before, 2)] == [n for n in names if ".lora_B" in n]
    for parameter in adapter_parameters(model).values():
        parameter.data += 0.1
    assert adapter_line(model, before, 9) == "adapter     all 28 tensors moved"
    adapter_parameters(model)[names[3]].requires_grad_(False)
    adapter_parameters(model)[names[5]].data[0] = float("nan")
    assert adapter_line(model, before, 9).startswith(f"adapter     PROBLEM: 2 of 28 tensors: {names[3]}: is frozen.")


def test_options_that_exclude_each_other(adapter):
    told = CliRunner().invoke(commands.app, ["verify", "model", "--served"])
    assert (told.exit_code, "--served needs --adapter" in told.output) == (commands.WRONG, True)
    told = CliRunner().invoke(commands.app, ["verify", "model", "--packing", "--adapter", "adapter"])
    assert (told.exit_code, "--packing or --adapter, not both" in told.output) == (commands.WRONG, True)
    (adapter / "adapter_config.json").unlink()
    told = CliRunner().invoke(commands.app, ["verify", "model", "--adapter", "adapter"])
    assert (told.exit_code, "must hold adapter_config.json" in told.output) == (commands.FAILED, True)
