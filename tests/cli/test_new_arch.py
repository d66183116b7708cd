"""`liger-models new-arch`: its module is a copy of the nearest one, and its data is what the tests read."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs typer and rich: pip install 'liger_models[cli]'")

from typer.testing import CliRunner

from liger_models.cli import commands, nearest_arch, new_arch
from liger_models.cli.compare import tensor_differences, where_it_differs
from liger_models.convert import format_of
from liger_models.convert.config_map import read_config

from ..arch.families import LIMIT, error, merged
from ..late import transformers

ROOT = Path(__file__).parents[2]
NAME = "cwm"
"""A Llama with windows by another name, which this package does not have."""

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CONFIG = {
    "architectures": ["CwmForCausalLM"], "model_type": NAME, "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "rope_scaling": LLAMA3, "sliding_window": 8192, "layer_types": ["full_attention", *["sliding_attention"] * 3],
    "mlp_bias": False, "head_gain": None, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "quirk": "none",
}  # fmt: skip
ARCEE = {
    "model_type": "arcee", "architectures": ["ArceeForCausalLM"], "hidden_act": "relu2", "layer_types": ...,
    "sliding_window": ...,
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """The parts of a checkout that the command looks for, as the working directory, and a config.json beside it."""
    (tmp_path / "checkout" / "liger_models" / "arch").mkdir(parents=True)
    (tmp_path / "checkout" / "liger_models" / "arch" / "registry.py").touch()
    (tmp_path / "checkout" / "tests" / "fixtures").mkdir(parents=True)
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path / "checkout")
    return tmp_path / "checkout"


def write_config(folder: Path, **changes) -> None:
    keys = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(keys))


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(commands.app, ["new-arch", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout) if "--json" in arguments else result.output


def make() -> dict:
    return run(NAME, "--from", "../config.json", "--json")


def written(checkout: Path) -> list[str]:
    return sorted(str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file())


def load_module(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{NAME}_of_a_test", checkout / f"liger_models/arch/{NAME}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_what_is_written_and_what_to_do_next(checkout):
    output = run(NAME, "--from", "../config.json", "--model", "cwm-32b")
    data = [f"tests/fixtures/{NAME}/{file}" for file in (
        "cwm-32b.json", "cwm-32b.shapes.json", "rope_oracle.json", "tiny.json"
    )]  # fmt: skip
    assert written(checkout) == [f"liger_models/arch/{NAME}.py", "liger_models/arch/registry.py", *data]
    for line in (
        *data,
        "its tensors and its parts equal transformers'",
        f"make test ARGS=\"-k '{NAME} or cwm-32b'\"",
        "from liger_models.arch.cwm import LigerCwm as LigerCwm",
        "docs/adding-an-architecture.md",
    ):
        assert line in output


def test_the_help_says_which_architectures_are_compared(checkout, monkeypatch):
    """The command compares text models that have a file of their own name, because it copies that file."""
    compared = set()
    compare = nearest_arch._compared

    def record(name, *arguments):
        candidates = compare(name, *arguments)
        compared.update(name for _ in candidates)
        return candidates

    monkeypatch.setattr(nearest_arch, "_compared", record)
    make()
    assert {"llama", "mixtral", "olmo2"} <= compared
    assert compared.isdisjoint({"gemma3_text", "qwen3_5_text", "llava"})
    told = " ".join(run("--help").split())
    assert "each text architecture that has a file of its own name" in told


def test_the_defaults_are_transformers(checkout, own_registry):
    made = make()
    config_class = load_module(checkout).CwmConfig
    theirs = transformers.CwmConfig()
    config = config_class()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "sliding_window", "head_dim"):
        assert getattr(config, name) == getattr(theirs, name), name
    assert "IGNORED_KEYS has head_gain, quirk: make fields of those that change the model." in made["notes"]
    read = read_config(config_class, CONFIG, strict=True)
    assert (read.rope_scaling.factor, read.rope_theta, read.sliding_window) == (8.0, 1e6, 8192)


@pytest.mark.parametrize("bias", [False, True])
def test_a_copy_with_nothing_to_change_equals_transformers(checkout, own_registry, tmp_path, bias):
    assert make()["differences"] == []
    module = load_module(checkout)
    tiny = json.loads((checkout / f"tests/fixtures/{NAME}/tiny.json").read_text())
    sizes = merged(tiny["base"], tiny["variants"]["mlp_bias" if bias else next(iter(tiny["variants"]))])
    config = transformers.AutoConfig.for_model(NAME, **sizes)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "model")
    ours = module.LigerCwm.from_pretrained(tmp_path / "model", progress=False, strict=True).eval()
    ids = torch.randint(3, 100, (2, 20))
    assert error(ours(ids).logits, theirs(ids).logits) <= LIMIT, where_it_differs(ours, theirs, input_ids=ids)
    ours(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_what_the_copy_has_to_change_is_named(checkout, tmp_path):
    """Arcee is a Llama whose MLP has no gate."""
    write_config(tmp_path, **ARCEE)
    made = run("arcee", "--from", "../config.json", "--json")
    assert made["nearest"] == "llama"
    assert made["differences"] == [
        "missing model.layers.0.mlp.gate_proj.weight [88, 64]",
        "unknown hidden_act 'relu2'",
    ]
    source = (checkout / "liger_models/arch/arcee.py").read_text()
    assert "Differs from Llama (``arch/llama.py``): TODO" in source
    assert "Llama" not in source.partition('"""\n\n')[2]


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"model_type": "helium", "architectures": ["HeliumForCausalLM"], "layer_types": ...}, "layers.0 self_attn")],
)
def test_the_part_that_computes_something_else_is_named(checkout, tmp_path, changes, part):
    """Helium rotates pairs of neighbors."""
    write_config(tmp_path, **changes)
    made = run(changes["model_type"], "--from", "../config.json", "--json")
    assert [line.partition(" differs")[0] for line in made["differences"]] == [part]


def test_the_data_is_transformers(checkout, own_registry):
    make()
    module, data = load_module(checkout), checkout / "tests/fixtures" / NAME
    hf = json.loads((data / f"{NAME}.json").read_text())
    assert hf == CONFIG
    config = read_config(module.CwmConfig, hf)
    with torch.device("meta"):
        model = module.LigerCwm(config)
    shapes = format_of(module.LigerCwm).weight_map(config).shapes(dict(model.named_parameters()))
    stored = json.loads((data / f"{NAME}.shapes.json").read_text())
    assert [*map(str, tensor_differences(shapes, stored))] == []
    oracle = json.loads((data / "rope_oracle.json").read_text())[NAME]["model.rotary_emb"]
    torch.testing.assert_close(model.rotary["default"].inv_freq, torch.tensor(oracle["inv_freq"]), rtol=2e-7, atol=0)
    tiny = json.loads((data / "tiny.json").read_text())
    assert (tiny["base"]["hidden_size"], tiny["base"]["attention_dropout"], tiny["base"]["pad_token_id"]) == (64, 0, 0)
    assert [*tiny["variants"]] == ["released", "tied", "one-kv-head", "mlp_bias", "llama3"]
    assert tiny["variants"]["llama3"]["rope_parameters"]["original_max_position_embeddings"] == 8


def test_shapes_of_safetensors_beside_config_json(checkout, tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    config = transformers.LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    write_config(tmp_path, **sizes, layer_types=...)
    made = make()
    assert not any("Compare them with the headers" in note for note in made["notes"])
    shapes = json.loads((checkout / f"tests/fixtures/{NAME}/{NAME}.shapes.json").read_text())
    assert shapes["model.layers.0.mlp.up_proj.weight"] == [48, 32]


def test_it_needs_the_oracle(checkout, tmp_path, monkeypatch):
    write_config(tmp_path, model_type="unheard_of", architectures=...)
    told = run("unheard_of", "--from", "../config.json", code=1)
    assert "transformers must know unheard_of" in " ".join(told.split())
    write_config(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers must be installed" in " ".join(run(NAME, "--from", "../config.json", code=1).split())


def test_the_source_passes_the_linter(checkout, tmp_path):
    pytest.importorskip("ruff")
    make()
    file = f"liger_models/arch/{NAME}.py"
    config = ["--config", str(ROOT / "pyproject.toml")]
    first_party = ["--config", 'lint.isort.known-first-party=["liger_models"]']
    for command in (["format", *config], ["check", *config, *first_party]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "there", [f"liger_models/arch/{NAME}.py", f"liger_models/arch/{NAME}", f"tests/fixtures/{NAME}"]
)
def test_nothing_is_overwritten(checkout, there):
    path = checkout / there
    path.touch() if path.suffix else path.mkdir()
    before = written(checkout)
    assert f"{there}: must not exist" in " ".join(run(NAME, "--from", "../config.json", code=1).split())
    assert written(checkout) == before


def test_a_failure_leaves_nothing_behind(checkout, monkeypatch):
    before = written(checkout)
    rename = Path.rename

    def fail(path, target):
        if Path(target).suffix == ".py":
            raise OSError("disk full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert "disk full" in run(NAME, "--from", "../config.json", code=1)
    assert written(checkout) == before
    assert not [*(checkout / "tests/fixtures").iterdir()]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("C-WM", {}, "NAME must be model_type, a Python name in lower case, got 'C-WM'"),
        ("llama", {}, "NAME must be new, got 'llama'"),
        ("cw", {}, "NAME must be config.json's model_type, 'cwm', got 'cw'"),
        (NAME, {"hidden_size": ..., "vocab_size": ...}, "got none of the keys vocab_size, hidden_size"),
    ],
)
def test_what_is_refused(checkout, tmp_path, name, changes, message):
    write_config(tmp_path, **changes)
    assert message in " ".join(run(name, "--from", "../config.json", code=1).split())


def test_outside_of_a_checkout(checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run(NAME, "--from", "config.json", code=1)
    assert "must be the root of a checkout" in " ".join(output.split())


def test_the_folders_are_those_of_this_repository():
    assert (ROOT / new_arch.ARCH / "registry.py").is_file()
    assert (ROOT / new_arch.DATA / "llama" / "tiny.json").is_file()
    assert (ROOT / new_arch.PUBLIC).is_file()
