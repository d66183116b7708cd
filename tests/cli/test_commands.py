"""The command line: what each command prints and writes, its JSON, its exit codes, and its errors in one line."""

import base64
import io
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

pytest.importorskip("typer", reason="the command line needs typer and rich: pip install 'liger_models[cli]'")

from typer.testing import CliRunner

import liger_models
from liger_models import AutoLigerModel, LigerLlama, LlamaConfig, list_archs, register
from liger_models.adapters import LoRAConfig, apply_lora, save_adapter
from liger_models.cli import commands
from liger_models.cli.conversation import Conversation
from liger_models.data import PromptDataset
from liger_models.kernels.optimizer.moments import moment_bytes

from ..base.conftest import encoded, picture
from ..base.test_processor_transformers import make
from ..convert.quantized_folders import make_quantized
from ..convert.test_mxfp4 import make as make_mxfp4
from ..data.test_videos import save_clip
from ..data.vision import make_model
from ..processes import environment
from ..text.folders import byte_fallback

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
GIB = 2**30


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A tiny checkpoint with a byte-level tokenizer, in the working directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LigerLlama.from_config(config, dtype=torch.bfloat16)
    keys = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    model.assets = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(keys).encode()}
    model.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


def run(*arguments: str, code: int = 0, input: str | None = None) -> str:
    result = CliRunner().invoke(commands.app, list(arguments), input=input, env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if code == 0 or "--json" in arguments else result.output


def read(*arguments: str, code: int = 0):
    return json.loads(run(*arguments, "--json", code=code))


def test_list():
    rows = {row["model_type"]: row["reads"] for row in read("list")}
    assert [*rows] == sorted([*list_archs(), "gemma3n", "kimi_k25"])
    assert rows["kimi_k25"] == "The language model of Kimi K2.5"
    assert {row["class"] for row in read("list")} >= {"LigerLlama", "LigerMixtral"}
    assert all(text and len(text.splitlines()) == 1 and len(text) < 120 for text in rows.values())
    assert "differ" not in "".join(rows.values())  # what follows the first paragraph
    assert rows["gemma4_text"] == "The language models of Gemma 4 without images."
    assert "Mixtral 8x7B" in run("list")


def test_version():
    assert run("--version").strip() == liger_models.__version__


def test_info(folder):
    (folder / "model.safetensors").unlink()  # not read
    found = read("info", "model", "--tokens", "100")
    model = AutoLigerModel.from_config(json.loads((folder / "config.json").read_text()))
    assert found["class"] == "LigerLlama"
    assert found["parameters"] == model.num_parameters()
    assert found["config"]["num_key_value_heads"] == 2
    assert found["training"]["weights"] == 2 * model.num_parameters()
    assert found["training"]["peak"]["full"] <= found["training"]["peak"]["none"]
    assert "selective" in run("info", "model", "--dtype", "bf16")
    assert "AdamW 0.00 GiB" in run("info", "model")
    assert "Muon 0.00 GiB" in run("info", "model", "--muon")
    planned = read("info", "model", "--memory", "1GB")["training"]["plan"]
    assert (planned["time"], planned["budget"], {*planned["policies"]}) == (1.0, 10**9, {"none"})
    assert "of the fastest step's (expected)" in run("info", "model", "--memory", "1GB")
    moments = [read("info", "model", *more)["training"]["optimizer"] for more in ((), ("--moments-8bit",), ("--muon",))]
    kinds = [(p.shape, torch.int8 if p.dim() > 1 and p.shape[-1] >= 128 else torch.float32) for p in model.parameters()]
    matrices = 2 * sum(p.numel() for p in model.hidden_matrices().values())
    both = 4 * model.num_parameters()
    assert moments == [both, sum(sum(moment_bytes(*each)) for each in kinds), both - matrices]
    full, coded = (read("info", "model", *more)["training"]["activations"] for more in ((), ("--gate-up-8bit",)))
    assert coded["none"] < full["none"]
    assert coded["selective"] == full["selective"]


def test_download(folder, monkeypatch):
    from liger_models.convert import hub

    asked = {}

    def download(repo_id, model_class, **options):
        asked.update(options, repo_id=repo_id)
        return folder

    monkeypatch.setattr(hub, "download", download)
    assert run("download", "owner/name", "--revision", "main").strip() == str(folder)
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "main")
    assert read("download", "owner/name") == {"folder": str(folder)}


def test_verify(folder):
    pytest.importorskip("transformers")
    found = read("verify", "model")
    assert found["same"]
    assert 0 < found["logits_error"] < 1e-5
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors | {"other": torch.zeros(1)}, folder / "model.safetensors")
    found = read("verify", "model", code=3)
    assert (found["missing"], found["extra"], found["same"]) == (["model.norm.weight"], ["other"], False)
    printed = run("verify", "model", code=3)
    assert f"missing model.norm.weight {[*tensors['model.embed_tokens.weight'].shape[1:]]}" in printed
    assert "extra other [1]" in printed


STRANGE = "[/red] :smile: \x1b]0;title\x07\r"
"""What a stranger may call a tensor: markup, and characters that a terminal obeys."""
SHOWN = r"[/red] :smile: \x1b]0;title\x07\r"


def test_names_of_strangers_are_shown_as_they_are(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {STRANGE: torch.zeros(1)}, folder / "model.safetensors")
    assert f"extra {SHOWN} [1]\n" in run("verify", "model", code=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": STRANGE}))
    shown = run("info", "model", code=1)
    assert "[/red] :smile: " in shown
    assert "\x1b" not in shown
    (folder / "config.json").write_text(json.dumps(config | {"model_type": STRANGE}))
    shown = run("info", "model", code=1)
    assert "[/red] :smile: " in shown
    assert "\x1b" not in shown


def test_tables_show_strings_as_they_are():
    table = commands.Table("name", title=STRANGE)
    table.add_row(STRANGE)
    with commands.screen.capture() as printed:
        commands.screen.print(table, STRANGE)
    assert printed.get().count(SHOWN) == 3
    assert "\x1b" not in printed.get()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_does_not_obey_generated_text(is_terminal, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    commands._print_pieces(["a\tb\n", "\x1b", "[2J"])
    assert out.getvalue() == ("a\tb\n\\x1b[2J\n" if is_terminal else "a\tb\n\x1b[2J\n")


def test_a_warning_shows_what_a_stranger_wrote():
    code = "import sys, warnings, liger_models.cli as cli; sys.argv = ['liger-models', '--version']\n"
    code += "try: cli.main()\nexcept SystemExit: warnings.warn('\\x1b[2J')"
    assert shell("-c", code).stderr == "warning: \\x1b[2J\n"


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    "arch", ["qwen2_vl", "gemma3", "gemma4", "mllama", "mistral3", "muse_glimmer", "llava", "lfm2_vl", "paligemma"]
)
def test_models_with_images(arch, tmp_path):
    """Random tokens would hit placeholders of images, of which the small vocabularies have many."""
    pytest.importorskip("transformers")
    from ..arch.families import make_folder, tiny

    place = str(make_folder(arch, next(iter(tiny(arch))), tmp_path))
    found = read("verify", place, "--length", "100")
    assert found["same"]
    assert 0 < found["logits_error"] < 1e-5
    assert read("bench", place, "--length", "300", "--steps", "1", "--device", "cpu")["tokens_per_second"] > 0


def test_verify_of_a_model_that_transformers_does_not_know(tmp_path, own_registry):
    pytest.importorskip("transformers")

    @dataclass(frozen=True, kw_only=True)
    class NewConfig(LlamaConfig):
        """As Llama's."""

    class New(LigerLlama):
        """Llama by another name."""

        config_class = NewConfig

    register("new_to_all", New)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    New.from_config(NewConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    assert read("verify", str(tmp_path))["logits_error"] is None
    assert "logits not compared: transformers does not know new_to_all" in run("verify", str(tmp_path))


def test_verify_says_where_logits_differ(folder, monkeypatch):
    from liger_models.layers.norm import LigerRMSNorm

    forward = LigerRMSNorm.add
    monkeypatch.setattr(LigerRMSNorm, "add", lambda self, x, residual: forward(self, x, residual * 1.01))
    found = read("verify", "model", code=3)
    assert found["logits_error"] > 1e-4
    assert found["place"].startswith("layers.0: ")
    assert f"first difference at {found['place']}" in run("verify", "model", code=3)


def test_verify_of_formats_that_transformers_cannot_read(tmp_path, monkeypatch):
    """It takes codes of an unknown format for numbers, and other formats need further packages."""
    transformers = pytest.importorskip("transformers")
    codes, _ = make_quantized("mo_tensors", "qwen3", tmp_path)
    assert read("verify", str(codes))["same"]
    assert "logits not compared: transformers does not know quant_method 'modelopt'" in run("verify", str(codes))
    (tmp_path / "other").mkdir()
    codes, _ = make_quantized("bnb", "qwen3", tmp_path / "other")
    missing = mock.Mock(side_effect=ImportError("a package is required"))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", missing)
    assert "not compared: transformers can't load the checkpoint: a package" in run("verify", str(codes))


def test_verify_of_weights_that_are_no_numbers_prints_json(folder):
    pytest.importorskip("transformers")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    found = json.loads(run("verify", "model", "--json", code=3), parse_constant=pytest.fail)
    assert (found["logits_error"], found["same"]) == ("nan", False)
    assert "by nan of their norm" in run("verify", "model", code=3)


def test_convert(folder):
    found = read("convert", "model", "new", "--dtype", "float16", "--max-shard-size", "40KB")
    assert len([name for name in found["files"] if name.endswith(".safetensors")]) > 1
    new = LigerLlama.from_pretrained("new", progress=False)
    assert new.dtype == torch.float16
    for (name, ours), theirs in zip(
        LigerLlama.from_pretrained("model").named_parameters(), new.parameters(), strict=True
    ):
        assert theirs.equal(ours.half()), name


def test_convert_does_not_load_for_a_place_that_is_a_file(folder):
    folder.with_name("file").touch()
    assert "'file' is a file" in run("convert", "not/loaded", "file", code=2)


@pytest.mark.parametrize("name", ["chat_template.jinja", "modules.json", "adapter_config.json"])
def test_convert_mixes_no_files_of_two_checkpoints(folder, name):
    """A template of another checkpoint would replace the model's own, whose config has it elsewhere."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    (other / name).write_text("{}")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    assert f"does not replace, got {name} in 'other'" in run("convert", "model", "other", code=1)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before
    (other / name).unlink()
    (other / "README.md").touch()
    run("convert", "model", "other", "--dtype", "float16")
    assert LigerLlama.from_pretrained("other", progress=False).dtype == torch.float16


def test_convert_writes_a_gguf_file(folder):
    gguf = pytest.importorskip("gguf", reason="pip install 'liger_models[gguf]'")
    assert read("convert", "model", "new/model.gguf", "--gguf", "q8_0") == {"file": "new/model.gguf"}
    reader = gguf.GGUFReader("new/model.gguf")
    assert reader.get_field("general.name").contents() == "model"
    assert reader.get_field("tokenizer.chat_template").contents() == TEMPLATE
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "F16", "Q8_0"}  # rows of 48 are in F16
    assert "one of q8_0, f16, bf16, got 'q4_k'" in run("convert", "not/loaded", "a.gguf", "--gguf", "q4_k", code=1)
    assert "ends in .gguf, got" in run("convert", "not/loaded", "new", "--gguf", "f16", code=1)
    assert "--mxfp4 and --gguf must not" in run("convert", "a", "a.gguf", "--gguf", "f16", "--mxfp4", "model", code=2)


def test_convert_merges_adapters(folder):
    model = apply_lora(LigerLlama.from_pretrained("model", dtype=torch.float32, progress=False), LoRAConfig(r=4))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(model, "adapter")
    run("convert", "model", "merged", "--adapter", "adapter", "--dtype", "float32")
    ids = torch.arange(20)[None]
    merged = LigerLlama.from_pretrained("merged", progress=False)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert read("merge", "model", "adapter", "again", "--dtype", "float32")["folder"] == "again"
    again = LigerLlama.from_pretrained("again", progress=False)
    assert all(map(torch.equal, again.parameters(), merged.parameters()))
    before = Path("model/model.safetensors").read_bytes()
    assert "OUTPUT must be another folder than MODEL" in run("merge", "model", "adapter", "./model", code=2)
    assert Path("model/model.safetensors").read_bytes() == before


def test_merge_writes_experts_in_mxfp4_again(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    make_mxfp4(tmp_path / "model")
    lora = LoRAConfig(r=2, target_modules=["q_proj"])
    model = apply_lora(AutoLigerModel.from_pretrained("model", progress=False), lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    save_adapter(model, "adapter")
    read("merge", "model", "adapter", "merged", "--mxfp4", "model")
    stored, merged = (load_file(f"{name}/model.safetensors") for name in ("model", "merged"))
    assert merged.keys() == stored.keys()
    changed = {name for name, tensor in stored.items() if not torch.equal(merged[name], tensor)}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    read("merge", "model", "adapter", "plain")
    assert "must be the folder of" in run("merge", "model", "adapter", "again", "--mxfp4", "plain", code=1)


def test_generate(folder):
    model = LigerLlama.from_pretrained("model", progress=False)
    ids = model.generate(model.tokenizer.encode("Hello"), max_new_tokens=12, do_sample=False)
    want = model.tokenizer.decode(ids[0, len(model.tokenizer.encode("Hello")) :])
    options = ["--max-new-tokens", "12", "--no-sample", "--device", "cpu"]
    assert run("generate", "model", "Hello", *options) == want + "\n"
    assert read("generate", "model", "Hello", *options) == {"prompt": "Hello", "text": want}
    stopped = want[: want.index(want[3]) + 1]
    assert run("generate", "model", "Hello", *options, "--stop", want[3]).startswith(stopped)
    assert len(run("generate", "model", "Hello", *options, "--stop", want[3])) < len(want)
    drawn = [run("generate", "model", "Hello", "--sample", "--seed", seed, "--device", "cpu") for seed in "778"]
    assert drawn[0] == drawn[1] != drawn[2]
    assert run("generate", "model", "Hello", *options, "--draft-model", "model") == want + "\n"
    shutil.copytree("model", "other")
    words = models.WordLevel({"Hello": 0, "<unk>": 1}, unk_token="<unk>")
    Tokenizer(words).save("other/tokenizer.json")
    message = run("generate", "model", "Hello", *options, "--draft-model", "other", code=2)
    assert "--draft-model must have the tokenizer of model, got another vocabulary in other" in message
    sampled = run("generate", "model", "Hello", "--sample", "--seed", "7", "--draft-model", "model", "--device", "cpu")
    assert sampled != drawn[0]  # from `seed`, which drafts need
    ids = model.generate("Hello", max_new_tokens=256, do_sample=True, seed=7)
    assert sampled == model.tokenizer.decode(ids[0, len(model.tokenizer.encode("Hello")) :]) + "\n"
    for option, flags in (
        ({"do_sample": True, "top_k": 2}, ["--sample", "--top-k", "2", "--seed", "7"]),
        ({"do_sample": False, "repetition_penalty": 9.0}, ["--repetition-penalty", "9"]),
    ):
        torch.manual_seed(7)
        ids = model.generate("Hello", max_new_tokens=12, **option)
        text = model.tokenizer.decode(ids[0, len(model.tokenizer.encode("Hello")) :])
        assert text != want
        assert run("generate", "model", "Hello", *options, *flags) == text + "\n"


def test_text_that_ends_in_the_middle_of_a_character(folder, monkeypatch):
    """This tokenizer makes a replacement character of each byte then, also of those that are shown already."""
    backend = byte_fallback()
    model = LigerLlama.from_pretrained("model", progress=False)
    model.assets["tokenizer.json"] = backend.to_str().encode()
    model.save_pretrained("model")
    said = backend.encode("so 世界🦙", add_special_tokens=False).ids[:-1]
    monkeypatch.setattr(LigerLlama, "stream", lambda self, ids, **options: map(torch.tensor, [[each] for each in said]))
    assert read("generate", "model", "Hi", "--device", "cpu")["text"] == "so 世界" + 3 * "\N{REPLACEMENT CHARACTER}"


def test_chat(folder):
    options = ["generate", "model", "--chat", "--system", "Be short.", "--max-new-tokens", "4", "--device", "cpu"]
    lines = run(*options, input="Hi\nAnd?\n")
    assert lines.count("> ") >= 3
    assert read(*options[:2], "Hi", *options[2:])["text"] in lines
    lines = run(*options, input=b"\xff Hi\nAnd?\n")  # not UTF-8
    assert lines.count("> ") >= 3
    run("generate", "model", code=2)


def test_commands_of_a_chat(folder):
    options = ["generate", "model", "--chat", "--max-new-tokens", "4", "--device", "cpu"]
    lines = "/help\n/think about it\n/exit\nnever read\n"
    done = CliRunner().invoke(commands.app, options, input=lines, env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert done.stdout == "> > > "  # nothing is sent to the model
    shown = [line for line in done.stderr.splitlines() if "Commands: /image PATH" in line]
    assert [line.partition("Commands")[0] for line in shown] == ["", "/think is no command. "]
    done = CliRunner().invoke(commands.app, options, input="/usr/bin is full\n /think\n")
    assert done.stdout.count("> ") == 3
    assert "Commands" not in done.stderr


def test_errors_do_not_end_a_chat(folder):
    """A template that refuses a message, and an empty line. The refused message does not stay in the history."""
    options = ["generate", "model", "--chat", "--max-new-tokens", "4", "--device", "cpu"]
    template = "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('refused') }}{% endif %}"
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"chat_template": template + "{{ m.content }}{% endfor %}"})
    )
    done = CliRunner().invoke(commands.app, options, input="bad\n\nHi\n", env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert done.stderr.count("the chat template must accept the messages, got: refused") == 1
    assert done.stdout.count("> ") == 4
    done = CliRunner().invoke(commands.app, ["generate", "model", "", "--device", "cpu"])
    assert done.exit_code == 1
    assert "must have at least one token, got ''" in done.stderr


@pytest.fixture
def seeing(tmp_path, monkeypatch):
    """A tiny Qwen2-VL and an image, in the working directory."""
    model = make("qwen2_vl")
    with torch.no_grad():
        for parameter in model.visual.parameters():
            parameter.mul_(4)  # so that the answers of random weights depend on what is seen
    model.save_pretrained(tmp_path / "seeing")
    picture(20, 12).save(tmp_path / "a b.png")
    monkeypatch.chdir(tmp_path)
    return model


def test_generate_with_images(seeing):
    data = "data:image/png;base64," + base64.b64encode(encoded(picture(9, 40))).decode()
    parts = [{"type": "image", "image": "a b.png"}, {"type": "image", "image": data}, {"type": "text", "text": "What?"}]
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    options = ["--max-new-tokens", "5", "--no-sample", "--device", "cpu", "--system", "Be short."]

    def answer(messages):
        batch = seeing.processor.apply_chat_template(messages, add_generation_prompt=True)
        ids = seeing.generate(**batch, max_new_tokens=5, do_sample=False)[0, batch["input_ids"].shape[1] :]
        return seeing.tokenizer.decode(ids)

    both = ["--image", (Path("a b.png").absolute()).as_uri(), "--image", data]
    want = answer(asked)
    assert want != answer([asked[0], {"role": "user", "content": [parts[0], parts[2]]}])
    assert read("generate", "seeing", "What?", *both, *options) == {"prompt": "What?", "text": want}
    # the first message has the images of the command line, the second its own
    more = [
        *asked,
        {"role": "assistant", "content": want},
        {"role": "user", "content": [parts[0], {**parts[2], "text": "And?"}]},
    ]
    lines = run("generate", "seeing", "--chat", *both, *options, input="What?\n/image a b.png\nAnd?\n")
    assert lines.replace("> ", "") == f"{want}\n{answer(more)}\n"
    heard = CliRunner().invoke(
        commands.app, ["generate", "seeing", "--chat", *options], input="/image nowhere.png\n/image\nHi\n"
    )
    assert "nowhere.png" in heard.stderr
    assert "/image must be followed by the path of the file, got none" in heard.stderr
    plain = answer([asked[0], {"role": "user", "content": "Hi"}])
    assert heard.stdout == f"> > > {plain}\n> "
    assert "image must be a file, got nowhere.png" in run("generate", "seeing", "Hi", "--image", "nowhere.png", code=1)


def test_images_stay_attached_if_an_answer_fails(seeing, monkeypatch):
    conversation = Conversation(seeing, {"max_new_tokens": 2, "do_sample": False}, [], True, None)
    conversation.attach("/image", "a b.png")
    with monkeypatch.context() as patch:
        patch.setattr(type(seeing), "stream", mock.Mock(side_effect=ValueError("no answer")))
        with pytest.raises(ValueError, match="no answer"):
            list(conversation.answer("What?"))
    assert conversation.history == []
    assert len(conversation.media) == 1
    assert "".join(conversation.answer("What?"))
    assert [part["type"] for part in conversation.history[0]["content"]] == ["image", "text"]
    assert conversation.media == []


def test_generate_with_videos(tmp_path, monkeypatch):
    """As rows of data with the same video."""
    monkeypatch.chdir(tmp_path)
    model = make_model("qwen3_vl")
    model.save_pretrained("seeing")
    save_clip("clip.mp4", frames=9)
    options = ["--max-new-tokens", "5", "--no-sample", "--device", "cpu"]
    content = [{"type": "video", "video": "clip.mp4"}, {"type": "text", "text": "What?"}]
    asked = [{"prompt": [{"role": "user", "content": content}]}]
    row = PromptDataset(asked, model.processor, length=256, progress=False).rows[0]
    assert row["pixels"].keys() == {"pixel_values_videos", "video_grid_thw"}
    want = model.generate([row["ids"]], max_new_tokens=5, do_sample=False, **row["pixels"])[0, len(row["ids"]) :]
    text = model.tokenizer.decode(want)
    assert read("generate", "seeing", "What?", "--video", "clip.mp4", *options) == {"prompt": "What?", "text": text}
    heard = run("generate", "seeing", "--chat", *options, input="/video clip.mp4\nWhat?\n")
    assert heard.replace("> ", "") == f"{text}\n"
    assert "nowhere.mp4" in run("generate", "seeing", "Hi", "--video", "nowhere.mp4", code=1)


def test_images_for_a_model_of_texts(folder):
    picture(9, 9).save("a.png")
    output = run("generate", "model", "Hi", "--image", "a.png", "--device", "cpu", code=1)
    assert "--image needs a model with images, got LigerLlama. Leave it out" in output
    heard = CliRunner().invoke(
        commands.app,
        ["generate", "model", "--chat", "--max-new-tokens", "2", "--device", "cpu"],
        input="/image a.png\n",
    )
    assert "/image needs a model with images, got LigerLlama" in heard.stderr


def test_train(folder):
    (folder.parent / "train.jsonl").write_text("\n".join(json.dumps({"text": f"Text {i}."}) for i in range(40)))
    (folder.parent / "config.yaml").write_text("model: model\ndata: train.jsonl\noutput: run\nlength: 32\nworkers: 0\n")
    run("train", "config.yaml", "--steps", "2", "--export-dtype", "float32")
    assert LigerLlama.from_pretrained("run/model", progress=False).dtype == torch.float32
    shown = " ".join(run("train", "--help").split())
    assert shown.startswith("usage: ")
    assert "train [-h]" in shown
    assert "--export-dtype" in shown


@pytest.fixture
def cuda_build_without_gpu(monkeypatch):
    """What a CUDA build of PyTorch answers on a machine without a GPU, which is what pip installs on Linux."""
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.mark.usefixtures("cuda_build_without_gpu")
def test_a_cuda_build_without_a_gpu_runs_on_the_cpu(folder):
    (folder.parent / "train.jsonl").write_text("\n".join(json.dumps({"text": f"Text {i}."}) for i in range(40)))
    run("train", "--model", "model", "--data", "train.jsonl", "--output", "run", "--length", "32", "--steps", "2")
    assert LigerLlama.from_pretrained("run/model", device_map="auto", progress=False).device.type == "cpu"
    assert run("generate", "run/model", "Hi", "--max-new-tokens", "2")
    assert read("bench", "model", "--length", "16", "--steps", "1")["device"] == "cpu"


def test_bench(folder):
    found = read("bench", "model", "--length", "16", "--steps", "2", "--device", "cpu", "--dtype", "float32")
    assert found["tokens_per_second"] == pytest.approx(16 / found["seconds_per_step"])
    assert "tokens per second" in run("bench", "model", "--length", "16", "--steps", "1", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "./nowhere"], 1, "must be a folder, or owner/name on the hub"),
        (["info", "model/config.json"], 1, "must be a folder with config.json and safetensors, got a file"),
        (["generate", "model/config.json", "Hi"], 1, "must be a folder with config.json and safetensors, got a file"),
        (["verify", "nowhere"], 1, "nowhere: must be a folder"),
        (["info", "nowhere"], 1, "nowhere: must be a folder, on the hub or in the client's cache"),
        (["generate", "nowhere", "Hi"], 1, "nowhere: must be a folder, on the hub or in the client's cache"),
        (
            ["download", "model"],
            2,
            "model must be a name on the hub, got the folder model. There is nothing to download",
        ),
        (["download", "./nowhere"], 1, "./nowhere: must be a folder, or owner/name on the hub"),
        (["convert", "model", "new", "--dtype", "int8"], 2, "dtype must be one of float64, float32"),
        (["convert", "model", "new", "--dtype", "float8_e4m3fn"], 2, "dtype must be one of float64, float32"),
        (["generate", "model", "Hi", "--device", "cuda:99"], 2, "device must be one of this machine"),
        (["generate", "model", "Hi", "--system", "Short."], 2, "--system needs --chat"),
        (["generate", "model", "Hi", "--sample", "--temperature", "-1"], 1, "temperature"),
        (["generate", "model", "Hi", "--seed", str(2**64)], 2, "seed"),
        (["bench", "model", "--checkpointing", "some"], 1, "policy must be one of"),
        (["info", ""], 2, "a path must have a name, got ''"),
        (["convert", "model", ""], 2, "a path must have a name, got ''"),
        (["merge", "model", "adapter", ""], 2, "a path must have a name, got ''"),
        (["generate", "model", "Hi", "--adapter", ""], 2, "a path must have a name, got ''"),
        (["convert", "model", "new", "--revision", "main"], 2, "--revision must be given with a name on the hub"),
        (["info", "model", "--revision", "main"], 2, "--revision must be given with a name on the hub"),
        (["convert", "model", "a.gguf", "--gguf", "f16", "--max-shard-size", "1GB"], 2, "--max-shard-size has no"),
        (["verify", "model", "--packing", "--length", "8"], 2, "--length has no effect with --packing or --adapter"),
        (["verify", "model", "--adapter", "a", "--length", "8"], 2, "--length has no effect with --packing"),
        (["convert", "model", "new", "--adapter", "model"], 1, "adapter_config.json"),
        (["train", "nowhere.yaml"], 2, ""),
        (["train", "--learn", "1"], 2, "train: error: TrainOptions: an option must be known, got --learn."),
        (["inf"], 2, "info"),
    ],
)
def test_mistakes_are_told_without_a_traceback(folder, monkeypatch, arguments, code, message):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    output = run(*arguments, code=code)
    assert message in " ".join(output.split())
    assert "Traceback" not in output


def test_hints_are_whole_lines_in_a_narrow_window(folder):
    done = CliRunner().invoke(commands.app, ["generate", "model", "Hi", "--device", "cuda:99"], env={"COLUMNS": "40"})
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: device must be one of this machine and this PyTorch (cpu")
    assert line.endswith("got 'cuda:99'. Use one of these.")


def test_python_m(folder):
    assert shell("-m", "liger_models", "--version").stdout.strip() == liger_models.__version__


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_mistake(folder):
    command = f"{sys.executable} -m liger_models generate model Hi --max-new-tokens 200 | head -c 1"
    done = shell("-c", f"import subprocess; subprocess.run({command!r}, shell=True)")
    assert "Loading weights" in done.stderr
    assert "error" not in done.stderr


def test_help_fills_the_lines_of_a_narrow_window():
    told = CliRunner().invoke(commands.app, ["verify", "--help"], env={"COLUMNS": "80"}).stdout
    lines = told.partition("With --adapter,")[2].partition("Arguments")[0].splitlines()
    assert all(len(line.rstrip()) > 50 for line in lines[:-3]), told


def test_debug_shows_the_traceback(folder):
    result = CliRunner().invoke(commands.app, ["--debug", "verify", "nowhere"])
    assert isinstance(result.exception, FileNotFoundError)


def shell(*command: str) -> subprocess.CompletedProcess:
    variables = environment(COLUMNS="120")
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=variables, timeout=60)


def test_the_command():
    done = shell("-X", "importtime", "-m", "liger_models", "--help")
    assert done.returncode == 0, done.stderr
    for name in ("list", "info", "download", "verify", "convert", "train", "generate", "bench", "new-arch"):
        assert f" {name} " in done.stdout
    assert "--install-completion" in done.stdout
    assert "| torch\n" not in done.stderr  # --help answers at once


def test_without_the_extra():
    code = "import sys; sys.modules['typer'] = None; from liger_models.cli import main; main()"
    done = shell("-c", code)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("Run: pip install 'liger_models[cli]'")


def test_the_page_describes_every_command():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in commands.app.registered_commands:
        assert f"liger-models {command.name or command.callback.__name__}" in page
