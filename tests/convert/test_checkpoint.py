import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from liger_models.arch.auto import AutoLigerModel
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.convert import load as load_module
from liger_models.convert import save
from liger_models.convert.files import as_dtype
from liger_models.convert.load import load_pretrained
from liger_models.convert.tensors import get_hf_state_dict
from liger_models.train import TrainOptions

from .. import processes
from ..late import transformers
from .conftest import TINY, assert_same_bits, edit_json, read_tensors

Make = Callable[..., Path]
INDEX = "model.safetensors.index.json"
ASSETS = {
    "generation_config.json": b'{"temperature": 0.6}',
    "tokenizer.json": b'{"not": "read"}',
    "tokenizer.model": bytes(range(256)),
    "chat_template.jinja": "{{ 'ü' }}\r\n".encode(),
    "tekken.json": b"{}",
    "vocab.txt": b"a",
    "README.md": b"# card",
    "LICENSE": b"terms",
}


def load(folder: Path, **options: Any) -> LigerLlama:
    return load_pretrained(LigerLlama, folder, progress=False, **options)


def tiny_model(**changes: Any) -> LigerLlama:
    torch.manual_seed(1)
    return LigerLlama(LlamaConfig(**(TINY | changes)))


def theirs_loaded(folder: Path, dtype: torch.dtype | str) -> Any:
    model, info = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(code: str, *arguments: object) -> str:
    """Standard output of Python code in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_fork(code: str, *arguments: object) -> str:
    """Standard output of Python code in a process that has imported the package already."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "code.py").write_text(code)
        return processes.run(Path(folder, "code.py"), *map(str, arguments), cwd=Path.cwd()).stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ],
    ids=["untied", "tied", "biases"],
)
def test_round_trip_is_bit_exact_and_transformers_loads_it(
    make_checkpoint: Make, tmp_path: Path, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    source = make_checkpoint(dtype=dtype, **config)
    model = load(source)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any(parameter.is_meta for parameter in model.parameters())
    model.save_pretrained(tmp_path / "out")

    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(source))
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        ours, theirs = (theirs_loaded(folder, dtype)(ids).logits for folder in (tmp_path / "out", source))
    assert torch.equal(ours, theirs)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == str(dtype)[6:]


def test_the_loaded_model_computes_what_transformers_does(make_checkpoint: Make) -> None:
    source = make_checkpoint(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3})
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        logits = load(source)(ids).logits
        expected = theirs_loaded(source, torch.float32)(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", ["20KB", 20_000])
def test_sharded_in_and_out(make_checkpoint: Make, tmp_path: Path, size: int | str) -> None:
    source = make_checkpoint(max_shard_size="15KB")
    assert len(list(source.glob("model-*-of-*.safetensors"))) > 2
    load(source).save_pretrained(tmp_path / "out", max_shard_size=size)

    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == shards
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 2
    for name in shards:
        held = load_file(tmp_path / "out" / name)
        assert held.keys() == {key for key, file in index["weight_map"].items() if file == name}
        assert sum(tensor.nbytes for tensor in held.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_tensors(source).values())
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(source))
    theirs_loaded(tmp_path / "out", torch.float32)
    assert_same_bits(dict(load(tmp_path / "out").named_parameters()), dict(load(source).named_parameters()))


def test_dtype_converts_on_the_way_in_and_out(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in read_tensors(source).items()}
    load(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "a")
    load(source, dtype="auto").save_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert_same_bits(read_tensors(folder), expected)
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for dtype in ("int8", torch.int8, "cuda", ""):
        with pytest.raises(ValueError, match=r"load_pretrained: dtype must be one of float64, .* got"):
            load(source, dtype=dtype)


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16", "torch.bfloat16"])
def test_names_of_a_dtype(make_checkpoint: Make, tmp_path: Path, name: str) -> None:
    model = load(make_checkpoint(), dtype=name)
    assert model.dtype == torch.bfloat16
    assert type(model).from_config(model.config, dtype=name).dtype == torch.bfloat16
    load(make_checkpoint()).save_pretrained(tmp_path, dtype=name)
    assert {tensor.dtype for tensor in read_tensors(tmp_path).values()} == {torch.bfloat16}
    options = TrainOptions(model="m", data=["d"], output="o", dtype=name, export_dtype="fp32")
    assert (options.dtype, options.export_dtype) == ("bfloat16", "float32")
    assert as_dtype("dtype", "half") == as_dtype("dtype", "fp16") == torch.float16


@pytest.mark.parametrize("odd", ["lm_head", "embed_tokens", "layers.0", "up_proj", "model.norm"])
def test_tensors_of_several_dtypes_get_that_of_the_config(make_checkpoint: Make, odd: str) -> None:
    source = make_checkpoint(dtype=torch.bfloat16)
    tensors = {name: x.float() * 1.001 if odd in name else x for name, x in read_tensors(source).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    model, ids = load(source), torch.arange(12).reshape(2, 6)
    assert_same_bits(get_hf_state_dict(model), dict(theirs_loaded(source, "auto").state_dict()))
    assert model(ids).logits.dtype == torch.bfloat16
    assert {p.dtype for p in load(source, dtype="float16").parameters()} == {torch.float16}
    for declared, want in ((None, torch.bfloat16), ("float32", torch.float32), ("int8", torch.bfloat16)):
        edit_json(source / "config.json", dtype=declared)
        assert {p.dtype for p in load(source).parameters()} == {want}


def test_a_dtype_that_all_tensors_have_is_kept(make_checkpoint: Make) -> None:
    source = make_checkpoint(dtype=torch.bfloat16)
    edit_json(source / "config.json", dtype="float32")
    assert load(source).dtype == torch.bfloat16


@pytest.mark.parametrize("size", ["5GB", "15KB"])
def test_a_model_that_was_saved_without_its_head(make_checkpoint: Make, tmp_path: Path, size: str) -> None:
    """As Qwen3-Embedding: transformers' names of a body lack the prefix."""
    source = make_checkpoint(tie_word_embeddings=True)
    theirs = theirs_loaded(source, torch.float32)
    theirs.model.save_pretrained(tmp_path / "body", max_shard_size=size)
    assert "norm.weight" in read_tensors(tmp_path / "body")
    model = load(tmp_path / "body")
    assert_same_bits(dict(model.named_parameters()), dict(load(source).named_parameters()))
    ids = torch.arange(12).reshape(2, 6)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "body", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, again(ids).logits, rtol=1e-5, atol=1e-5)
    tensors = read_tensors(source)
    save_file(tensors | {"norm.weight": torch.ones(32)}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"Unexpected: norm\.weight"):
        load(source)


def test_a_file_that_an_earlier_save_left_behind_is_not_read(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    stale = (source / "model.safetensors").read_bytes()
    rewrite(source, lambda tensors: tensors["model.norm.weight"].zero_())
    want = read_tensors(source)
    theirs_loaded(source, torch.float32).save_pretrained(tmp_path / "new", max_shard_size="15KB")
    (tmp_path / "new" / "model.safetensors").write_bytes(stale)
    with pytest.warns(UserWarning, match=r"transformers reads model\.safetensors\. Remove what is left"):
        assert_same_bits(get_hf_state_dict(load(tmp_path / "new")), want)

    # A download that was broken off is not completed by the old file.
    shards = sorted((tmp_path / "new").glob("model-*.safetensors"))
    shards[0].unlink()
    with pytest.raises(FileNotFoundError, match="missing model-00001-of"):
        load(tmp_path / "new")
    # Without any of its files it is the index that is old: transformers leaves it behind when it saves one file.
    for shard in shards[1:]:
        shard.unlink()
    save_file(want, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    assert_same_bits(get_hf_state_dict(load(tmp_path / "new")), want)


@pytest.mark.parametrize("stored", [False, True])
def test_tied_weights_load_with_and_without_a_stored_head(make_checkpoint: Make, tmp_path: Path, stored: bool) -> None:
    source = make_checkpoint(tie_word_embeddings=True)
    tensors = read_tensors(source)
    assert "lm_head.weight" not in tensors
    if stored:
        both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(both, source / "model.safetensors")
    model = load(source)
    assert model.lm_head.weight is model.embed_tokens.weight
    model.save_pretrained(tmp_path / "out")
    assert_same_bits(read_tensors(tmp_path / "out"), tensors)


@pytest.mark.parametrize("other", ["values", "shape", "dtype"])
def test_a_stored_head_that_is_not_the_embedding_is_refused(make_checkpoint: Make, other: str) -> None:
    source = make_checkpoint(tie_word_embeddings=True)
    tensors = read_tensors(source)
    head = tensors["model.embed_tokens.weight"].clone()
    if other == "dtype":  # rounded, it is the embedding
        save_file(tensors | {"lm_head.weight": head.half()}, source / "model.safetensors")
        load(source)
    head[-1] += 1
    head = {"values": head, "shape": head[:-1], "dtype": head.half()}[other]
    save_file(tensors | {"lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lm_head.weight must be equal to model.embed_tokens.weight by tie_word_embeddings"
    ):
        load(source)
    if other == "values":  # transformers takes both, as this package does when it is told to
        edit_json(source / "config.json", tie_word_embeddings=False)
        ids = torch.arange(12).reshape(2, 6)
        with torch.no_grad():
            theirs = theirs_loaded(source, torch.float32)(ids).logits
            torch.testing.assert_close(load(source)(ids).logits, theirs, rtol=1e-5, atol=1e-5)


def test_a_head_that_is_missing_may_be_the_embedding(make_checkpoint: Make) -> None:
    source = make_checkpoint(tie_word_embeddings=True)
    edit_json(source / "config.json", tie_word_embeddings=False)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight\. If the head is the embedding, set tie_word_embeddings to true"
    ):
        load(source)


def test_weights_that_came_apart_are_saved_as_two(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    with pytest.warns(UserWarning, match="tie_word_embeddings is True in the config, but .* two tensors"):
        model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.config.tie_word_embeddings is False
    assert_same_bits(dict(again.named_parameters()), dict(model.named_parameters()))
    theirs_loaded(tmp_path / "out", torch.float32)


def test_weights_that_were_tied_by_hand_are_saved_as_one(tmp_path: Path) -> None:
    model = tiny_model()
    model.lm_head.weight = model.embed_tokens.weight
    with pytest.warns(UserWarning, match="tie_word_embeddings is False in the config, but .* one tensor"):
        model.save_pretrained(tmp_path / "out")
    assert "lm_head.weight" not in read_tensors(tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.lm_head.weight is again.embed_tokens.weight


def test_rotary_frequencies_in_the_file_are_not_read(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    tensors = read_tensors(source)
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((8,), -1.0) for i in range(2)}
    save_file(tensors | frequencies, source / "model.safetensors")
    load(source).save_pretrained(tmp_path / "out")
    assert_same_bits(read_tensors(tmp_path / "out"), tensors)


def test_several_chat_templates_are_carried(make_checkpoint: Make, tmp_path: Path) -> None:
    """They are in the tokenizer's configuration, where transformers reads them too: a subfolder can't be exchanged."""
    source = make_checkpoint()
    edit = {"chat_template.jinja": b"plain", "tokenizer_config.json": b'{"a": 1}', "tokenizer.json": b"{}"}
    for name, content in edit.items():
        (source / name).write_bytes(content)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("größer", encoding="utf-8")
    load(source).save_pretrained(tmp_path / "out")
    written = listing(tmp_path / "out")
    assert not any("template" in name for name in written)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "größer"}]
    assert json.loads(written["tokenizer_config.json"]) == {"a": 1, "chat_template": named}


def test_config_and_assets_are_carried(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    for name, content in ASSETS.items():
        (source / name).write_bytes(content)
    (source / "other.txt").write_text("not carried")
    (source / "other.py").write_text("not carried: config.json names no code")
    edit_json(source / "config.json", house="blue")
    with pytest.warns(UserWarning, match="house"):
        model = load(source)
    assert model.assets == ASSETS
    assert model.hf_config["house"] == "blue"
    model.save_pretrained(tmp_path / "out")
    written = listing(tmp_path / "out")
    assert written.keys() == ASSETS.keys() | {"config.json", "model.safetensors"}
    assert {name: written[name] for name in ASSETS} == ASSETS
    assert json.loads(written["config.json"])["house"] == "blue"
    with pytest.raises(ValueError, match="house"):
        load(source, strict=True)


def test_code_that_the_config_names_is_carried_and_not_run(make_checkpoint: Make, tmp_path: Path) -> None:
    source, code = make_checkpoint(), {"modeling_house.py": b"from .blue import x", "blue.py": b"raise SystemExit"}
    for name, content in code.items():
        (source / name).write_bytes(content)
    edit_json(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_house.House"})
    load(source).save_pretrained(tmp_path / "out")
    written = listing(tmp_path / "out")
    assert {name: written[name] for name in code} == code
    assert json.loads(written["config.json"])["auto_map"] == {"AutoModelForCausalLM": "modeling_house.House"}


def test_a_fresh_model_is_saved_for_transformers(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "new" / "out")
    assert_same_bits(dict(load(tmp_path / "new" / "out").named_parameters()), dict(model.named_parameters()))
    theirs_loaded(tmp_path / "new" / "out", torch.float32)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_the_loaded_model_does_not_depend_on_its_files(make_checkpoint: Make) -> None:
    source = make_checkpoint()
    model = load(source)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    size = (source / "model.safetensors").stat().st_size
    with (source / "model.safetensors").open("r+b") as file:
        file.write(bytes(size))
    assert_same_bits(dict(model.named_parameters()), before)


def test_progress_can_be_switched_off(make_checkpoint: Make, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint()
    LigerLlama.from_pretrained(source, progress=True)
    assert "Loading weights" in capsys.readouterr().err
    LigerLlama.from_pretrained(source, progress=False)
    assert capsys.readouterr().err == ""


def test_frozen_parameters_and_other_devices(make_checkpoint: Make) -> None:
    source = make_checkpoint()
    model = load_pretrained(Frozen, source, progress=False, device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["norm.weight"]


class Frozen(LigerLlama):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm.weight.requires_grad_(False)


def test_a_class_that_loading_will_not_choose(make_checkpoint: Make, tmp_path: Path) -> None:
    model = load_pretrained(Frozen, make_checkpoint(), progress=False)
    with pytest.warns(UserWarning, match="Frozen is not registered, so the checkpoint will be loaded as LigerLlama"):
        model.save_pretrained(tmp_path / "saved")


def test_auto_picks_the_class(make_checkpoint: Make) -> None:
    source = make_checkpoint()
    model = AutoLigerModel.from_pretrained(source, dtype=torch.bfloat16, progress=False)
    assert type(model) is LigerLlama
    assert model.dtype == torch.bfloat16
    config = json.loads((source / "config.json").read_text())
    for described in (config, model.config):
        fresh = AutoLigerModel.from_config(described, dtype=torch.float16)
        assert type(fresh) is LigerLlama
        assert fresh.config == model.config
        assert fresh.dtype == torch.float16
    with pytest.raises(TypeError, match="has no instances"):
        AutoLigerModel()
    with pytest.raises(ValueError, match=r"model_type 'lama' is not supported\. Did you mean 'llama'"):
        AutoLigerModel.from_config(config | {"model_type": "lama"})
    with pytest.raises(ValueError, match=r"config\.json: must have model_type"):
        AutoLigerModel.from_config(TINY)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = read_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def rename_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.query.weight"] = tensors.pop("model.layers.1.self_attn.q_proj.weight")


def drop_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20_000)


BROKEN: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "missing folder": (shutil.rmtree, FileNotFoundError, r"must be a folder .*got nothing there.*from_hub"),
    "config missing": (
        lambda f: (f / "config.json").unlink(),
        FileNotFoundError,
        r"must hold config.json, got .*model.safetensors",
    ),
    "a run in place of its model": (
        lambda f: (shutil.copytree(f, f / "model"), (f / "config.json").unlink()),
        FileNotFoundError,
        r"must hold config.json, got .* Pass its folder model\.",
    ),
    "adapters in place of a model": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        FileNotFoundError,
        r"must hold config.json, got .* These are adapters: pass the model under them as the model",
    ),
    "config cut off": (lambda f: (f / "config.json").write_text("{"), ValueError, r"config.json: must be JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), ValueError, r"must be a JSON object, got list"),
    "other model": (
        lambda f: edit_json(f / "config.json", model_type="mistral"),
        ValueError,
        r"LigerLlama: model_type in config.json must be 'llama', got 'mistral'. AutoLigerModel",
    ),
    "quantized": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "awq"}),
        ValueError,
        r"must not be quantized, got .*awq",
    ),
    "weights missing": (
        lambda f: (f / "model.safetensors").unlink(),
        FileNotFoundError,
        r"must hold model.safetensors or model.safetensors.index.json, got config.json, gen.*Only safetensors are read",
    ),
    "pickled weights": (to_pickle, FileNotFoundError, r"Convert pytorch_model.bin with transformers"),
    "cut off": (cut, ValueError, r"model.safetensors: must be a whole safetensors file, got 20000 bytes.*Download it"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), ValueError, r"got 0 bytes"),
    "pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ValueError,
        r"git lfs pull",
    ),
    "renamed tensor": (
        lambda f: rewrite(f, rename_tensor),
        ValueError,
        r"Missing: model.layers.1.self_attn.q_proj.weight \(the file has model.layers.1.self_attn.query.weight\). "
        r"Unexpected: model.layers.1.self_attn.query.weight",
    ),
    "no head": (lambda f: rewrite(f, lambda t: t.pop("lm_head.weight")), ValueError, r"Missing: lm_head.weight\."),
    "many missing": (
        lambda f: rewrite(f, lambda t: [t.pop(name) for name in list(t) if "proj" in name]),
        ValueError,
        r"Missing: model\.layers\.0.* and 9 more\.",
    ),
    "extra tensor": (
        lambda f: rewrite(f, lambda t: t.update({"score.weight": torch.ones(2, 32)})),
        ValueError,
        r"Unexpected: score.weight\.",
    ),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({"model.norm.weight": torch.ones(31)})),
        ValueError,
        r"model.norm.weight must have shape \(32,\) by config.json, got \(31,\)",
    ),
    "other sizes": (
        lambda f: edit_json(f / "config.json", num_key_value_heads=4),
        ValueError,
        r"model.layers.0.self_attn.k_proj.weight must have shape \(64, 32\) by config.json, got \(32, 32\)",
    ),
    "integers": (
        lambda f: rewrite(f, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
        ValueError,
        r"model.norm.weight must have one of the dtypes F64, F32, F16, BF16, got I8",
    ),
    "fp8": (
        lambda f: rewrite(f, lambda t: t.update({"lm_head.weight": torch.ones(96, 32).to(torch.float8_e4m3fn)})),
        ValueError,
        r"lm_head.weight must have one of the dtypes .* got F8_E4M3. If the checkpoint is quantized",
    ),
}
BROKEN_SHARDED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "shard missing": (drop_shard, FileNotFoundError, r"files that .*index.json names, got \d+: missing model-00002-of"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), ValueError, r"must have a weight_map.*got None"),
    "index without a file": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"lm_head.weight": null}}'),
        ValueError,
        r"must have a weight_map, tensor name to file name, got .*None",
    ),
    "index cut off": (lambda f: (f / INDEX).write_text('{"weight_map": {"a'), ValueError, r"must be JSON"),
}


@pytest.mark.parametrize(("damage", "error", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_named(
    make_checkpoint: Make, damage: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    source = make_checkpoint()
    damage(source)
    with pytest.raises(error, match=message):
        load(source)


@pytest.mark.parametrize(("damage", "error", "message"), BROKEN_SHARDED.values(), ids=BROKEN_SHARDED)
def test_a_broken_sharded_checkpoint_is_named(
    make_checkpoint: Make, damage: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    source = make_checkpoint(max_shard_size="15KB")
    damage(source)
    with pytest.raises(error, match=message):
        load(source)


def test_a_file_or_a_repository_is_no_folder(make_checkpoint: Make) -> None:
    with pytest.raises(FileNotFoundError, match=r"must be a folder .* got a file"):
        load(make_checkpoint() / "config.json")
    with pytest.raises(FileNotFoundError, match=r"meta-llama/Llama-3.2-1B: must be a folder .*from_hub"):
        load(Path("meta-llama/Llama-3.2-1B"))


@pytest.mark.parametrize("norm", [1.0, 0.0])
def test_a_tensor_in_two_shards_must_be_the_same(make_checkpoint: Make, norm: float) -> None:
    source = make_checkpoint(max_shard_size="15KB")
    expected = read_tensors(source)["model.norm.weight"]
    place = json.loads((source / INDEX).read_text())["weight_map"]["model.norm.weight"]
    for other in source.glob("*.safetensors"):
        if other.name != place:
            save_file(load_file(other) | {"model.norm.weight": expected * norm}, other)
    if norm == 1:
        assert torch.equal(load(source).norm.weight, expected)
        return
    with pytest.raises(ValueError, match=r"model.norm.weight must be one tensor, got different ones in model-00001-of"):
        load(source)


def change_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_an_index_that_lacks_a_tensor_or_names_a_wrong_file(make_checkpoint: Make) -> None:
    source = make_checkpoint(max_shard_size="15KB")
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    before = (source / INDEX).read_bytes()
    change_index(source, lambda place: place.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"must name all tensors of its files, got none of the name model.norm.weight"):
        load(source)
    (source / INDEX).write_bytes(before)
    change_index(source, lambda place: place.update({"model.norm.weight": shards[0]}))
    with pytest.raises(ValueError, match=r"must name the file of each tensor, got model-00001-of-.* for model.norm.w"):
        load(source)


@pytest.mark.parametrize("kind", ["absolute", "..", "a/../..", "backslash", "drive", "pickle"])
def test_an_index_names_no_file_elsewhere(make_checkpoint: Make, tmp_path: Path, kind: str) -> None:
    """A repository of the hub would otherwise decide which file of this machine is loaded."""
    source, secret = make_checkpoint(max_shard_size="15KB"), tmp_path / "secret.safetensors"
    place = json.loads((source / INDEX).read_text())["weight_map"]["model.norm.weight"]
    (source / place).rename(secret)
    (source / "a").mkdir()
    (source / "weights.bin").write_bytes(secret.read_bytes())
    name = {
        "absolute": str(secret), "..": "../secret.safetensors", "a/../..": "a/../../secret.safetensors",
        "backslash": "..\\secret.safetensors", "drive": "C:secret.safetensors", "pickle": "weights.bin",
    }[kind]  # fmt: skip
    change_index(source, lambda files: files.update({key: name for key, file in files.items() if file == place}))
    with pytest.raises(ValueError, match=r"must name safetensors files in its folder, got .*unless you know who wrote"):
        load(source)


def test_a_folder_of_links_and_shards_in_a_folder_below(make_checkpoint: Make, tmp_path: Path) -> None:
    """The client's cache holds links to ../../blobs."""
    source, cache = make_checkpoint(max_shard_size="15KB"), tmp_path / "snapshots" / "commit"
    (cache / "below").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for path in source.iterdir():
        path.rename(tmp_path / "blobs" / path.name)
        place = cache / ("below" if path.suffix == ".safetensors" else "") / path.name
        place.symlink_to(Path(*[".."] * (len(place.relative_to(tmp_path).parts) - 1), "blobs", path.name))
    change_index(cache, lambda place: place.update({key: f"below/{file}" for key, file in place.items()}))
    assert load(cache).norm.weight.shape == (32,)


@pytest.mark.parametrize("layers", [10**6, 10**30])
def test_a_number_of_layers_that_no_checkpoint_has_is_refused_at_once(make_checkpoint: Make, layers: int) -> None:
    source = make_checkpoint()
    edit_json(source / "config.json", num_hidden_layers=layers)
    for call in (load, lambda folder: AutoLigerModel.from_config(json.loads((folder / "config.json").read_text()))):
        with pytest.raises(ValueError, match=rf"num_hidden_layers must be at most 1000, got {layers}"):
            call(source)


MEMORY = """
import sys
from pathlib import Path
from liger_models.arch.llama import LigerLlama
from liger_models.convert import load as load_module
from liger_models.convert import save
from liger_models.convert.load import load_pretrained
from liger_models.convert.save import save_pretrained

def memory(key):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

LigerLlama.from_pretrained(sys.argv[3], progress=False)  # what is imported on first use counts as well
before = memory("VmRSS")
model = load_pretrained(LigerLlama, sys.argv[1], progress=False)
loaded = memory("VmHWM") - before
save_pretrained(model, sys.argv[2], max_shard_size="60MB")
print(sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters()), loaded,
      memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_weights_are_in_memory_once(make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # glibc's allocator would keep tensors of up to 32 MB that were freed: sometimes two of them, sometimes none.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    config = LlamaConfig(
        vocab_size=12800, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8
    )
    LigerLlama.from_config(config).save_pretrained(tmp_path / "big", max_shard_size="150MB")
    assert len(list((tmp_path / "big").glob("*.safetensors"))) > 2
    arguments = (tmp_path / "big", tmp_path / "out", make_checkpoint())
    size, largest, load_peak, save_peak = map(int, run(MEMORY, *arguments).split())
    assert size > 350e6
    # The peak counts pages of the file that are mapped while one parameter is read, and some of the allocator's.
    assert load_peak < size + largest + 16e6
    assert save_peak < size + 60e6 + 16e6


@pytest.mark.gpu
def test_weights_go_straight_to_the_accelerator(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(dtype=torch.bfloat16, vocab_size=40_000, tie_word_embeddings=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(source, device="cuda", dtype=torch.float32)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.cuda.max_memory_allocated() - before < sum(sizes) + 2 * max(sizes) + 1e6
    model.save_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(source))


def test_saving_replaces_an_earlier_checkpoint(tmp_path: Path) -> None:
    old, new = tiny_model(), tiny_model(num_hidden_layers=3)
    folder = tmp_path / "out"
    old.assets = {"tokenizer.json": b"old"}
    old.save_pretrained(folder, max_shard_size="15KB")
    (folder / "notes.txt").write_text("mine")
    (folder / "adapter_model.safetensors").write_bytes(b"mine")
    new.assets = {"tokenizer.json": b"new"}
    new.save_pretrained(folder)
    assert sorted(listing(folder)) == [
        "adapter_model.safetensors", "config.json", "model.safetensors", "notes.txt", "tokenizer.json",
    ]  # fmt: skip
    assert (folder / "tokenizer.json").read_bytes() == b"new"
    assert_same_bits(dict(load(folder).named_parameters()), dict(new.named_parameters()))
    old.save_pretrained(folder, max_shard_size="15KB")
    assert not (folder / "model.safetensors").exists()
    assert_same_bits(dict(load(folder).named_parameters()), dict(old.named_parameters()))


def test_files_get_the_users_permissions(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        tiny_model().save_pretrained(tmp_path / "out", max_shard_size="15KB")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {0o640}


def test_saving_over_the_folder_it_came_from(make_checkpoint: Make) -> None:
    source = make_checkpoint(dtype=torch.bfloat16)
    expected = read_tensors(source)
    model = load(source)
    model.save_pretrained(source)
    assert_same_bits(read_tensors(source), expected)
    assert not list(source.glob(".*"))


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_save_leaves_everything_as_it_was(
    tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "out"
    if exists:
        tiny_model().save_pretrained(folder)
    before = listing(tmp_path)
    written: list[str] = []

    def fail_on_the_third(tensors: Any, path: Path, **options: Any) -> None:
        if len(written) == 2:
            raise OSError(errno.EIO, "the cable came out")
        written.append(path.name)
        save_file(tensors, path, **options)

    monkeypatch.setattr(save, "save_file", fail_on_the_third)
    with pytest.raises(OSError, match=r"out: must be writable .* the cable came out. Nothing was changed"):
        tiny_model(num_hidden_layers=3).save_pretrained(folder, max_shard_size="15KB")
    assert len(written) == 2
    assert listing(tmp_path) == before
    assert not exists or not list(folder.glob(".*"))
    assert exists or not list(tmp_path.iterdir())


def test_the_target_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file: must be a folder, got a file"):
        tiny_model().save_pretrained(tmp_path / "file")
    with pytest.raises(OSError, match=r"file/out: must be writable .* File exists: .*file'"):
        tiny_model().save_pretrained(tmp_path / "file" / "out")
    (tmp_path / "out" / "config.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"config\.json: must be a file, got a folder"):
        tiny_model().save_pretrained(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    assert (tmp_path / "file").read_text() == "mine"


NO_SPACE = """
import resource, signal, sys
from pathlib import Path
from liger_models.arch.llama import LigerLlama, LlamaConfig

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = LigerLlama.from_config(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128,
                                           num_hidden_layers=2, num_attention_heads=4))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    model.save_pretrained(sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk(tmp_path: Path, exists: bool) -> None:
    if exists:
        tiny_model().save_pretrained(tmp_path / "out")
    before = listing(tmp_path)
    message = run_fork(NO_SPACE, tmp_path / "out")
    assert f"{tmp_path / 'out'}: must be writable and have room for the files, got" in message
    assert "File too large" in message
    assert listing(tmp_path) == before
    assert len(list(tmp_path.rglob("*"))) == len(before) + exists


READ_ONLY = """
import os, sys
from liger_models.arch.llama import LigerLlama, LlamaConfig

model = LigerLlama.from_config(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                           num_attention_heads=2))
if os.geteuid() == 0:
    os.setuid(65534)  # root may write everywhere
for place in sys.argv[1:]:
    try:
        model.save_pretrained(place)
    except PermissionError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_read_only_target() -> None:
    with tempfile.TemporaryDirectory() as name:  # outside of pytest's folders, which only their owner can enter
        folder = Path(name)
        folder.chmod(0o755)
        tiny_model().save_pretrained(folder / "out")
        for path in (folder / "out", folder):
            path.chmod(0o555)
        before = listing(folder)
        lines = run_fork(READ_ONLY, folder / "out", folder / "new").splitlines()
        assert len(lines) == 2
        for line, place in zip(lines, ("out", "new"), strict=True):
            assert f"{folder / place}: must be writable" in line
            assert "Permission denied" in line
        assert listing(folder) == before
        folder.chmod(0o755)


def test_a_model_without_weights_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = LigerLlama(LlamaConfig(**TINY))
    with pytest.raises(ValueError, match=r"parameters must hold weights, got embed_tokens.weight, .* and 10 more"):
        model.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_parameters_that_the_format_has_no_place_for_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.layers[0].self_attn.register_parameter("lora", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"checkpoint of LigerLlama, got layers.0.self_attn.lora. Save .* merge_lora"):
        model.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_the_size_of_a_shard_is_checked(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match=f"max_shard_size must be a positive number of bytes .*, got {size}"):
        tiny_model().save_pretrained(tmp_path / "out", max_shard_size=size)
    assert not list(tmp_path.iterdir())


def test_a_save_while_the_folder_is_loaded_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path / "out")
    headers = load_module.read_headers

    def saved_over(folder: Path) -> Any:
        found = headers(folder)
        tiny_model().save_pretrained(tmp_path / "out")
        return found

    monkeypatch.setattr(load_module, "read_headers", saved_over)
    with pytest.raises(OSError, match=r"out: must not be written to while it is loaded"):
        load(tmp_path / "out")


def test_links_out_of_the_folder_are_not_carried_on(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    tiny_model().save_pretrained(tmp_path / "out")
    link = tmp_path / "out" / "merges.txt"
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"merges.txt: must not be a link to a file of another name .*/secret\. Copy"):
        load(tmp_path / "out")
    (tmp_path / "blobs").mkdir()
    for target in (tmp_path / "blobs" / "0a1b", tmp_path / "out" / "other", tmp_path / "merges.txt"):
        target.write_text("a b")
        link.unlink()
        link.symlink_to(target)
        assert load(tmp_path / "out").assets["merges.txt"] == b"a b"
