"""Habits from transformers: arguments, attributes and names that work, and errors that name ours."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

import liger_models
from liger_models import AutoLigerModel, LigerLlama, LlamaConfig, Tokenizer
from liger_models.base import causal_lm
from liger_models.common.foreign import FOREIGN, is_hub_name
from liger_models.generation.options import Options
from liger_models.text import ModelInputs
from liger_models.text import tokenizer as tokenizer_module

from ..text.folders import KINDS, MESSAGES, SPECIAL, TEXTS, byte_level, pair

ROOT = Path(__file__).parents[2]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer."""
    backend = byte_level()
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size() + 8, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LigerLlama.from_config(config)
    config = b'{"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}'
    model.assets = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": config}
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return AutoLigerModel.from_pretrained(folder, progress=False).eval()


IDLE = {
    "device_map": "cpu",
    "attn_implementation": "flash_attention_2",
    "load_in_4bit": False,
    "quantization_config": None,
    "trust_remote_code": True,
    "low_cpu_mem_usage": True,
    "use_safetensors": True,
}


def test_a_model_loads_with_the_arguments_of_transformers(folder):
    for load in (AutoLigerModel.from_pretrained, LigerLlama.from_pretrained):
        model = load(str(folder), torch_dtype=torch.float64, progress=False, **IDLE)
        assert type(model) is LigerLlama
        assert (model.dtype, model.device.type) == (torch.float64, "cpu")


@pytest.mark.parametrize("where", ["meta", torch.device("meta"), {"": "meta"}])
def test_the_one_device_of_a_device_map(folder, where):
    assert LigerLlama.from_pretrained(folder, device_map=where, progress=False).device.type == "meta"


def test_an_automatic_device_map_is_the_accelerator(folder, monkeypatch):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert LigerLlama.from_pretrained(folder, device_map="auto", progress=False).device.type == device.type
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("meta"))
    assert LigerLlama.from_pretrained(folder, device_map="auto", progress=False).device.type == "meta"


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (
            "load_in_4bit",
            True,
            "'load_in_4bit' = True. Load the model, add adapters with apply_lora if it is to be trained, "
            "and call quantize_base",
        ),
        ("quantization_config", object(), "'quantization_config'. Load the model, add adapters"),
        ("attn_implementation", "eager", "'attn_implementation' = 'eager'. There is nothing to choose"),
        ("device_map", "balanced", "'device_map' = 'balanced'. Pass device=\"cuda\". To spread a model over GPUs"),
        ("device_map", {"layers.0": 0, "layers.1": 1}, "'device_map'. Pass device"),
        ("use_safetensors", False, "only safetensors are read"),
        (
            "cross_entropy",
            True,
            "'cross_entropy' = True. Pass kernels=KernelOptions(...), which has a field of this name",
        ),
        ("rope", False, "'rope' = False. Pass kernels=KernelOptions(...)"),
        ("kernel", None, "unexpected keyword argument 'kernel'. Did you mean kernels?"),
    ],
)
def test_what_loading_refuses(folder, argument, value, message):
    for name in ("from_pretrained", "from_hub"):
        for cls in (AutoLigerModel, LigerLlama):
            with pytest.raises(TypeError, match=f"^{name}: .*{re.escape(message)}"):
                getattr(cls, name)("some/name", **{argument: value})
    with pytest.raises(TypeError, match="torch_dtype and dtype are the same, got both"):
        LigerLlama.from_pretrained(folder, torch_dtype="auto", dtype=None)


def test_a_name_that_is_no_folder_is_loaded_from_the_hub(folder, monkeypatch):
    asked = []

    def download(repo_id, model_class, **options):
        asked.append((repo_id, options["revision"], options["token"]))
        return folder

    monkeypatch.setattr(causal_lm, "download", download)
    for cls in (AutoLigerModel, LigerLlama):
        model = cls.from_pretrained("owner/some-name.2", revision="v1", use_auth_token="secret", progress=False)
        assert type(model) is LigerLlama
    assert asked == [("owner/some-name.2", "v1", "secret")] * 2
    for name in ("no-folder", "./no/folder", "/no/folder", "a/b/c", Path("owner/name")):
        with pytest.raises(FileNotFoundError):
            AutoLigerModel.from_pretrained(name)
    assert not is_hub_name(str(folder))

    monkeypatch.setattr(tokenizer_module, "snapshot_download", lambda name, **options: str(folder))
    assert Tokenizer.from_pretrained("owner/name", use_fast=True).eos_token == "<|eot_id|>"


def test_the_forward(model):
    ids = torch.arange(2, 20)[None]
    want = model(ids, labels=ids)
    got = model(ids, labels=ids, use_cache=False, return_dict=True, past_key_values=None, output_attentions=False)
    assert torch.equal(got["loss"], want.loss)
    assert got["logits"] is got.logits is None
    assert got[0] is got.loss
    assert torch.equal(model(ids, num_logits_to_keep=2)["logits"], model(ids, logits_to_keep=2).logits)
    with pytest.raises(KeyError):
        got["count"]
    for argument, message in (
        ({"use_cache": True}, "Pass cache=DecodeCache"),
        ({"return_dict": False}, "use out.loss"),
        ({"past_key_values": ids}, "'past_key_values'. Pass cache=DecodeCache"),
        ({"label": ids}, "Did you mean labels?"),
    ):
        with pytest.raises(TypeError, match=f"^forward: .*{re.escape(message)}"):
            model(ids, **argument)


def test_a_compiled_forward_takes_them(model):
    ids = torch.arange(2, 20)[None]
    compiled = torch.compile(lambda: model(ids, labels=ids, use_cache=False)["loss"], backend="eager", fullgraph=True)
    assert torch.equal(compiled(), model(ids, labels=ids).loss)


def test_parameters_are_counted(model, capsys):
    adapted = liger_models.apply_lora(LigerLlama.from_config(model.config), liger_models.LoRAConfig(r=2))
    trained = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    total = sum(each.numel() for each in adapted.parameters())
    assert adapted.num_parameters(only_trainable=True) == trained < total == adapted.num_parameters()
    adapted.print_trainable_parameters()
    assert capsys.readouterr().out == f"{trained:,} of {total:,} parameters are trainable ({trained / total:.3%})\n"


def test_a_model_continues_a_text(model):
    want = model.generate(model.tokenizer.encode("a few"), max_new_tokens=3)
    assert torch.equal(model.generate("a few", max_new_tokens=3, num_beams=1), want)
    rows = model.generate(["a few", "b"], max_new_tokens=3)
    assert torch.equal(
        rows, model.generate([model.tokenizer.encode(text) for text in ("a few", "b")], max_new_tokens=3)
    )
    steps = list(model.stream("a few", max_new_tokens=3))
    assert torch.equal(torch.stack(steps, 1), want[:, -len(steps) :])
    for argument, message in (
        ({"num_beams": 4}, "all arguments of transformers' generate"),
        ({"streamer": object()}, "Iterate over model.stream"),
        ({"max_length": 9}, "Pass max_new_tokens, which does not count the prompt"),
    ):
        with pytest.raises(TypeError, match=f"^generate: .*{re.escape(message)}"):
            model.generate("a", max_new_tokens=1, **argument)


def test_signatures_show_the_arguments():
    for cls in (LigerLlama, AutoLigerModel):
        for name in ("from_pretrained", "from_hub"):
            shown = inspect.signature(getattr(cls, name)).parameters
            assert {"dtype", "device", "kernels", "shard", "revision", "token"} <= shown.keys()
    for function in (LigerLlama.generate, LigerLlama.stream, liger_models.generation.generate):
        shown = inspect.signature(function).parameters
        assert Options.__annotations__.keys() < shown.keys()
    for function in (
        LigerLlama.generate,
        LigerLlama.from_pretrained,
        AutoLigerModel.from_pretrained,
        Tokenizer.__call__,
    ):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert function.__doc__


@pytest.mark.parametrize("kind", ["byte_level", "word_piece"])
@pytest.mark.parametrize("most", [3, 6, 1000])
def test_a_tokenizer_truncates_as_transformers(tmp_path, kind, most):
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, "pad_token": SPECIAL["eos_token"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = pair(tmp_path)
    arguments = {
        "padding": True,
        "truncation": True,
        "max_length": most,
        "return_tensors": "pt",
        "padding_side": "left",
    }
    for add in (True, False):
        want = theirs(TEXTS, add_special_tokens=add, **arguments)
        got = ours(TEXTS, add_special_tokens=add, **arguments)
        assert torch.equal(got["input_ids"], want["input_ids"])
        assert torch.equal(got.attention_mask, want["attention_mask"])
    assert ours.batch_decode(got.input_ids) == [ours.decode(row) for row in got.input_ids]
    assert torch.equal(ours.encode(TEXTS[0], return_tensors="pt"), theirs.encode(TEXTS[0], return_tensors="pt"))


def test_inputs_move_to_a_device(model):
    inputs = model.tokenizer("a few", return_tensors="pt", padding=True).to("cpu", non_blocking=True)
    assert isinstance(inputs, ModelInputs)
    assert torch.equal(model.generate(**inputs, max_new_tokens=2)[:, :-2], inputs.input_ids)
    assert inputs.to("meta").attention_mask.device.type == "meta"
    with pytest.raises(AttributeError, match=r"has no labels\. It has: input_ids, attention_mask"):
        _ = inputs.labels


def test_what_a_tokenizer_refuses(model):
    tokenizer = model.tokenizer
    for argument, message in (
        ({"padding": "max_length"}, "'padding' = 'max_length'. Batches are always padded to the longest text"),
        ({"return_tensors": "np"}, "'return_tensors' = 'np'. Batches are always tensors of PyTorch"),
        ({"trucation": True}, "Did you mean truncation?"),
    ):
        with pytest.raises(TypeError, match=f"^Tokenizer: .*{re.escape(message)}"):
            tokenizer(["a"], **argument)
    for argument in ({"truncation": True}, {"max_length": 4}):
        with pytest.raises(ValueError, match="truncation and max_length must be given together"):
            tokenizer(["a"], **argument)
    with pytest.raises(ValueError, match="max_length must be more than the 1 special tokens around a text, got 1"):
        tokenizer(["a"], truncation=True, max_length=1)
    with pytest.raises(ValueError, match="return_tensors must be None, or 'pt' for one text"):
        tokenizer.encode(["a", "bc"], return_tensors="pt")


def test_roles_are_assigned_and_saved(folder, tmp_path):
    tokenizer = Tokenizer.from_pretrained(folder, padding_side="right")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.add_tokens(["<tool>"])
    tokenizer.bos_token_id = tokenizer.backend.token_to_id("<tool>")
    with pytest.raises(ValueError, match="pad_token must be a token of the vocabulary, got 'none'"):
        tokenizer.pad_token = "none"
    with pytest.raises(ValueError, match="eos_token must be a token of the vocabulary, got None"):
        tokenizer.eos_token_id = 10**6
    assert (tokenizer.pad_token_id, tokenizer.bos_token, tokenizer.padding_side) == (1, "<tool>", "right")
    assert repr(tokenizer) == (
        f"Tokenizer({len(tokenizer):,} tokens, {tokenizer.special_tokens}, no chat template, padding on the right)"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "new" / "one")
    made = Tokenizer(byte_level(), {"eos_token": "<|eot_id|>"})
    made.save_pretrained(tmp_path / "made")
    assert Tokenizer.from_pretrained(tmp_path / "made", pad_token="<|eot_id|>").pad_token_id == 1
    again, theirs = pair(tmp_path / "new" / "one")
    assert again.encode("a<tool>") == tokenizer.encode("a<tool>") == theirs.encode("a<tool>")
    assert again.special_tokens == tokenizer.special_tokens
    assert again.chat_template == TEMPLATE
    inputs = again.apply_chat_template(MESSAGES, return_tensors="pt", return_dict=True)
    want = theirs.apply_chat_template(MESSAGES, return_tensors="pt", return_dict=True)
    assert all(torch.equal(inputs[name], want[name]) for name in ("input_ids", "attention_mask"))
    with pytest.raises(ValueError, match="return_dict must be False, or True with return_tensors='pt'"):
        again.apply_chat_template(MESSAGES, return_dict=True)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("AutoLigerKernelForCausalLM", "AutoLigerModel"),
        ("AutoModelForCausalLM", "AutoLigerModel"),
        ("AutoTokenizer", "Tokenizer"),
        ("LoraConfig", "LoRAConfig"),
    ],
)
def test_names_of_others(name, ours):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. Did you mean {ours}\?"):
        getattr(liger_models, name)
    with pytest.raises(ImportError, match=rf"cannot import name '{name}' .* Did you mean {ours}\?"):
        exec(f"from liger_models import {name}")


@pytest.mark.parametrize("config", ["folder", Path("folder"), LlamaConfig, None, 3])
def test_a_config_that_is_none(config):
    for cls in (AutoLigerModel, LigerLlama):
        with pytest.raises(TypeError, match=r"^from_config: config must be .*, got .* call from_pretrained"):
            cls.from_config(config)


def test_every_argument_is_on_the_page():
    page = (ROOT / "docs" / "from-transformers.md").read_text(encoding="utf-8")
    for name in FOREIGN:
        assert f"`{name}" in page, name
