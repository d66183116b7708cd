"""Recipes: the command finds options that fit, and the package's recipes fit the memory in their names."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import recipes as generate
from liger_models.arch import get_arch
from liger_models.convert.config_map import read_config
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.memory.plan import SHARE, SHARE_WITH_IMAGES, parse_memory
from liger_models.train.loop import TrainOptions
from liger_models.train.options import RECIPES, read_options
from liger_models.train.recipe import STEP_TOKENS, Planner, Recipe

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "fixtures"


def small(arch: str, **changes) -> Planner:
    hf = next(iter(json.loads((DATA / arch / "tiny.json").read_text()).values()))
    return Planner(read_config(get_arch(arch).config_class, {"model_type": arch, **hf, **changes}))


def peak(plans: Planner, found: Recipe) -> int:
    options = found.options
    step = plans.step(found.method, getattr(torch, options["dtype"]), options["batch_size"] * options["length"])
    return step.peak(options["checkpointing"], options["accumulate"])


@pytest.fixture(scope="module")
def llama() -> Planner:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 64, "max_position_embeddings": 8192}
    return small("llama", **sizes)


def test_less_memory_trains_less_and_recomputes_more(llama):
    found = []
    for memory in (int(60e9 / 1.1**k) for k in range(80)):
        try:
            found.append(llama.plan(memory))
        except ValueError:
            break
        assert found[-1].peak == peak(llama, found[-1]) <= SHARE * memory
    assert [*dict.fromkeys(each.method for each in found)] == ["full", "lora", "4bit"]
    assert (found[0].options["dtype"], found[0].options["checkpointing"]) == ("float32", "none")
    assert found[0].options["length"] * found[0].options["batch_size"] == 16384
    assert found[0].step_tokens == STEP_TOKENS
    assert (found[-1].options["length"], found[-1].options["checkpointing"]) == (1024, "full")
    lengths = [each.options["length"] for each in found]
    assert lengths == sorted(lengths, reverse=True)
    whole = [each.options["dtype"] for each in found if each.method == "full"]
    assert [*dict.fromkeys(whole)] == ["float32", "bfloat16"]
    for method in ("full", "lora", "4bit"):
        policies = [each.options["checkpointing"] for each in found if each.method == method]
        assert {*policies} <= {*CHECKPOINTING_POLICIES}


def test_what_is_asked_for_is_kept(llama):
    found = llama.plan(10**10, "4bit", 2000)
    assert (found.method, found.options["length"], found.options["lora_4bit"]) == ("4bit", 2000, True)
    assert found.options["lr"] == 2e-4
    assert llama.plan(10**11, length=32768).options["batch_size"] == 1


def test_4_bits_are_smaller_and_adapters_are_smaller_than_all_weights(llama):
    peaks = [llama.step(method, torch.bfloat16, 1024).peak("full", 2) for method in ("full", "lora", "4bit")]
    assert peaks == sorted(peaks, reverse=True)
    model = llama.model("4bit", torch.bfloat16)
    weights = [each.numel() for name, each in model.layers.named_parameters() if name.endswith("_proj.weight")]
    base = sum(weights)
    factors = 2 * (base // 64 // 256 + 17 * len(weights))  # of the scales, and a mean and a table for each weight
    lora, four_bit = (llama.step(method, torch.bfloat16, 1024).weights for method in ("lora", "4bit"))
    assert lora - four_bit == base * 2 - base * (4 + 8 / 64) / 8 - factors


def test_images_get_room():
    plans = small("qwen2_5_vl")
    assert plans.share == SHARE_WITH_IMAGES < SHARE
    assert all(each.requires_grad for each in plans.model("full", torch.float32).parameters())
    trained = [name for name, each in plans.model("lora", torch.bfloat16).named_parameters() if each.requires_grad]
    assert not any("visual" in name for name in trained)
    assert len(trained) > 0


def test_what_does_not_fit_says_how_much_is_needed(llama):
    with pytest.raises(ValueError, match=r"must be at least 17 GB for method full .* got 0.001 GB\. Use a larger"):
        llama.plan(10**6, "full")
    with pytest.raises(ValueError, match="method must be one of full, lora, 4bit, auto, got 'qlora'"):
        llama.plan(10**9, "qlora")
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        llama.plan(10**9, length=1)


def test_sizes():
    sizes = ("24GB", "24 gb", "24", "24000000000", "0.5GiB")
    assert [parse_memory("memory", text) for text in sizes] == [24 * 10**9] * 4 + [2**29]
    for text in ("", "GB", "-1GB", "24MB", "0GB", "24GB!", "%"):
        with pytest.raises(ValueError, match=r"recipe: memory must be a size such as 24GB"):
            parse_memory("recipe: memory", text)
    with pytest.raises(ValueError, match=r"such as 24GB where there is no GPU, got '80%'"):
        parse_memory("memory", "80%", torch.device("cpu"))


def test_a_file_is_read_as_it_was_meant(llama, tmp_path):
    for memory in (10**11, 4 * 10**9):
        found = llama.plan(memory)
        for model in ("org/name", "/some folder/with: colon #1", "true"):
            (tmp_path / "recipe.yaml").write_text(found.yaml(model, "run"), encoding="utf-8")
            options = read_options(TrainOptions, [str(tmp_path / "recipe.yaml"), "--data", "mine.jsonl"])
            assert (options.model, options.data, options.output) == (model, ["mine.jsonl"], "run")
            for name, value in found.options.items():
                assert getattr(options, name) == value, name


def test_the_command(llama, tmp_path):
    cli = pytest.importorskip("liger_models.cli.commands")
    runner = pytest.importorskip("typer.testing").CliRunner()
    hf = next(iter(json.loads((DATA / "llama" / "tiny.json").read_text()).values()))
    (tmp_path / "Mine").mkdir()
    (tmp_path / "Mine" / "config.json").write_text(json.dumps({"model_type": "llama", **hf}))
    model = str(tmp_path / "Mine")
    printed = runner.invoke(cli.app, ["recipe", model, "--memory", "1GB"])
    assert printed.exit_code == 0, printed.output
    values = yaml.safe_load(printed.stdout)
    assert values.keys() <= {each.name for each in fields(TrainOptions)}
    assert (values["model"], values["output"], values["dtype"]) == (model, "mine-full", "float32")
    file = tmp_path / "new" / "recipe.yaml"
    arguments = ["recipe", model, "--memory", "1GB", "--method", "lora", "--output", str(file), "--json"]
    written = json.loads(runner.invoke(cli.app, arguments).stdout)
    assert (written["method"], written["memory"], written["output"]) == ("lora", 10**9, str(file))
    assert read_options(TrainOptions, [str(file)]).lora_r == written["options"]["lora_r"] == 16
    assert [path.name for path in file.parent.iterdir()] == ["recipe.yaml"]
    refused = runner.invoke(cli.app, ["recipe", model, "--memory", "1GB", "--output", str(file / "below.yaml")])
    assert refused.exit_code == 1
    assert "below.yaml: must be writable and have room for the files" in " ".join(refused.output.split())
    refused = runner.invoke(cli.app, ["recipe", model, "--memory", "24"], env={"COLUMNS": "200"})
    assert refused.exit_code == 0
    refused = runner.invoke(cli.app, ["recipe", model, "--memory", "many"], env={"COLUMNS": "200"})
    assert refused.exit_code == 1
    assert "error: recipe: memory must be a size such as 24GB" in refused.output
    if not torch.accelerator.is_available():
        assert runner.invoke(cli.app, ["recipe", model]).exit_code == 2


def test_every_model_has_files_and_every_file_a_model():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    linked = re.findall(r"\(\.\./liger_models/recipes/([^)]+)\)", page)
    assert sorted(linked) == sorted(file.relative_to(RECIPES).as_posix() for file in RECIPES.rglob("*.yaml"))
    for model in generate.MODELS:
        files = [*(RECIPES / model.folder).iterdir()]
        methods = {file.stem.partition("-")[2] for file in files}
        assert methods >= ({"4bit"} if model.folder == "llama-3.1-70b" else {"lora", "4bit"})
        for file in files:
            options = read_options(TrainOptions, [str(file)])
            method = "4bit" if options.lora_4bit else "lora" if options.lora_r else "full"
            assert file.stem.partition("gb-")[2] == method
            assert (options.model, options.output) == (model.name, f"{model.folder}-{method}")
    folders = {file.parent.name for file in RECIPES.rglob("*.yaml")}
    assert folders == {"retrieval", *(model.folder for model in generate.MODELS)}


@pytest.mark.parametrize(("name", "objective"), [("embedding", "embed"), ("reranker", "rerank")])
def test_recipes_of_models_that_search(name, objective):
    options = read_options(TrainOptions, [f"recipes/retrieval/qwen3-{name}-0.6b.yaml", "--data", "mine.jsonl"])
    assert (options.objective, options.data) == (objective, ["mine.jsonl"])
    assert options.model == f"Qwen/Qwen3-{name.title()}-0.6B"


def test_models_without_a_config_have_the_published_number_of_parameters():
    """Their sizes are written in the generator."""
    sizes = {model.folder: model for model in generate.MODELS if not isinstance(model.config, str)}
    published = {"pixtral-12b": 12_682_739_712, "internvl-3.5-8b": 8_528_318_464, "smolvlm2-2.2b": 2_246_784_880}
    published |= {"deepseek-v2-lite": 15_706_484_224, "glm-4.7-flash": 29_943_393_920}
    published |= {"moonlight-16b-a3b": 15_960_110_208}
    counts = {}
    for folder, model in sizes.items():
        counts[folder] = generate.planner(model).model("full", torch.bfloat16).num_parameters()
    assert counts == published


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("model", generate.MODELS, ids=lambda model: model.folder)
def test_the_files_fit(model):
    plans = generate.planner(model)
    for file in (RECIPES / model.folder).glob("*.yaml"):
        memory, method = file.stem.split("gb-")
        options = read_options(TrainOptions, [str(file)])
        found = Recipe(method, vars(options), 0, 0)
        needed = peak(plans, found)
        assert needed <= plans.share * int(memory) * 10**9
        assert f"# Estimated peak: {needed / 2**30:.1f} GiB." in file.read_text()


@pytest.mark.slow
def test_the_files_are_what_the_command_writes():
    model = next(each for each in generate.MODELS if each.folder == "qwen3-0.6b")
    written = generate.files(model, list(generate.plans(generate.planner(model))))
    assert written == {f"{model.folder}/{file.name}": file.read_text() for file in (RECIPES / model.folder).iterdir()}


def test_a_recipe_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = read_options(TrainOptions, ["recipes/llama-3.1-8b/24gb-4bit.yaml", "--output", "run"])
    assert (options.model, options.lora_4bit, options.output) == ("meta-llama/Llama-3.1-8B-Instruct", True, "run")


def test_an_own_file_comes_before_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("model: mine\ndata: [a.jsonl]\noutput: run\n")
    assert read_options(TrainOptions, ["recipes/mine.yaml"]).model == "mine"
