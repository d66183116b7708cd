"""Ways in: auto classes of transformers, code in a checkpoint, arguments of from_pretrained."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import liger_models
import liger_models.hf
from liger_models.adapters import unpack_projections
from liger_models.arch import get_arch
from liger_models.convert.config_map import read_config

from ..arch.families import FIRST_CASES, VISION_CASES, make_folder
from ..late import Late, transformers
from ..processes import run

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
hf_auto = Late("liger_models.hf.auto")
hf_config = Late("liger_models.hf.config")
ROOT = Path(__file__).parents[2]
OURS, THEIRS = "liger_models.hf", "transformers.models.llama.modeling_llama"


@pytest.fixture
def folder(root, tmp_path):
    shutil.copytree(make_folder("llama", "gqa", root), tmp_path / "model")
    return tmp_path / "model"


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def test_register_and_unregister(folder, tmp_path):
    assert type(load(folder)).__module__ == THEIRS
    with liger_models.hf.registered():
        liger_models.hf.register()
        model = load(folder)
        assert type(model) is liger_models.hf.LlamaForCausalLM
        assert type(transformers.LlamaForCausalLM.from_pretrained(folder)).__module__ == THEIRS
        new = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
        assert type(new) is type(model)
        assert new.dtype == torch.bfloat16
        lacking = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
        transformers.AutoModelForCausalLM.from_config(lacking).save_pretrained(tmp_path / "gpt2")
        assert type(load(tmp_path / "gpt2")) is transformers.GPT2LMHeadModel
    assert type(load(folder)).__module__ == THEIRS


def test_a_context_leaves_what_was_registered():
    liger_models.hf.register()
    try:
        for _ in range(2):
            with liger_models.hf.registered():
                pass
        found = transformers.AutoModelForCausalLM._model_mapping[transformers.LlamaConfig]
        assert found is liger_models.hf.LlamaForCausalLM
    finally:
        liger_models.hf.unregister()
    assert transformers.AutoModelForCausalLM._model_mapping[transformers.LlamaConfig] is transformers.LlamaForCausalLM


def test_a_class_of_somebody_else_is_not_replaced():
    class Other(transformers.LlamaForCausalLM):
        pass

    auto_class = transformers.AutoModelForCausalLM
    auto_class.register(transformers.LlamaConfig, Other, exist_ok=True)
    try:
        with pytest.raises(ValueError, match=r"AutoModelForCausalLM must have transformers' own class for LlamaConfig"):
            liger_models.hf.register()
    finally:
        auto_class.register(transformers.LlamaConfig, transformers.LlamaForCausalLM, exist_ok=True)


@pytest.mark.parametrize("case", FIRST_CASES, ids="-".join)
def test_every_family_has_its_class(case):
    made = hf_auto.model_class(case[0])
    assert made.__name__ == getattr(transformers, made.__name__).__name__
    with liger_models.hf.registered():
        for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
            found = auto_class._model_mapping.get(made.config_class, None)
            vision = case in VISION_CASES
            if vision == (auto_class is transformers.AutoModelForImageTextToText):
                assert found is made


@pytest.mark.parametrize(
    ("auto_name", "config_name", "class_name"),
    [
        ("AutoModelForCausalLM", "Llama4Config", "Llama4ForCausalLM"),  # the text of a checkpoint with images
        ("AutoModelForImageTextToText", "Llama4Config", "Llama4ForConditionalGeneration"),
        ("AutoModelForCausalLM", "Mistral4Config", "Mistral4ForCausalLM"),  # transformers has no class of this name
        ("AutoModelForSequenceClassification", "LlamaConfig", "LlamaForSequenceClassification"),
        ("AutoModelForCausalLM", "GPT2Config", None),
    ],
)
def test_where_a_class_is_registered(auto_name, config_name, class_name):
    mapping, config = getattr(transformers, auto_name)._model_mapping, getattr(transformers, config_name)
    with liger_models.hf.registered():
        found = mapping[config]
        assert (config in mapping._extra_content) == (class_name is not None)
    if class_name is None:
        assert found.__module__.startswith("transformers.")
    else:
        assert (found.__module__, found.__name__) == (OURS, class_name)


@pytest.mark.slow
def test_code_in_the_checkpoint(folder, tmp_path):
    """Ours with trust_remote_code, that of transformers without; a copy of the copy, too."""
    model = liger_models.hf.LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "one", auto_map=True)
    liger_models.LigerLlama.from_pretrained(folder, progress=False).save_pretrained(tmp_path / "two", auto_map=True)
    for name in ("one", "two"):
        assert type(load(tmp_path / name, trust_remote_code=False)).__module__ == THEIRS
        trusted = load(tmp_path / name, trust_remote_code=True)
        assert type(trusted) is liger_models.hf.LlamaForCausalLM
        trusted.save_pretrained(tmp_path / "again")
        assert type(load(tmp_path / "again", trust_remote_code=True)) is liger_models.hf.LlamaForCausalLM
        ids = torch.arange(9)[None]
        torch.testing.assert_close(trusted(ids).logits, model(ids).logits)
    # Without liger_models, the class is that of transformers. A liger_models that fails to import is an error.
    for stand_in, expected in (
        ("sys.modules['liger_models'] = None", "transformers.models.llama.modeling_llama.LlamaForCausalLM"),
        ("sys.modules['liger_models.hf'] = sys", "cannot import name 'LlamaForCausalLM'"),
    ):
        (tmp_path / "run.py").write_text(
            f"import sys; {stand_in}; import transformers\n"
            "model = transformers.AutoModelForCausalLM.from_pretrained('one', trust_remote_code=True)\n"
            "print(type(model).__mro__[1])"
        )
        done = run("run.py", cwd=tmp_path, check=False)
        assert expected in done.stdout + done.stderr, done.stderr


def test_arguments_of_from_pretrained(folder):
    made = liger_models.hf.LlamaForCausalLM
    model = made.from_pretrained(folder, torch_dtype="bf16", device_map={"": "cpu"}, low_cpu_mem_usage=True)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert not model.training
    model, info = made.from_pretrained(
        folder, dtype="auto", device_map="auto", output_loading_info=True, use_cache=False
    )
    assert model.config.use_cache is False
    assert not any(info.values())
    for name in ("eager", "flash_attention_2"):
        with liger_models.hf.registered():
            assert load(folder, attn_implementation=name).config._attn_implementation == name
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7, "do_sample": True}))
    assert made.from_pretrained(folder).generation_config.max_new_tokens == 7
    config = transformers.LlamaConfig.from_pretrained(folder, rms_norm_eps=0.5)
    assert (
        made.from_pretrained(folder.parent, subfolder="model", config=config).model.decoder.config.rms_norm_eps == 0.5
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_implementation": "kernels-community/x"}, "attn_implementation must be one of eager, sdpa"),
        ({"device_map": {"model": 0, "lm_head": 1}}, "device_map must name one device, or be 'auto'"),
        ({"tp_plan": "auto"}, "got tp_plan. Leave them out, or load with the class of transformers"),
    ],
    ids=["attention", "devices", "other"],
)
def test_arguments_that_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message), liger_models.hf.registered():
        load(folder, **options)


def test_base_classes_say_which_class_loads(folder):
    for name in ("LigerForCausalLM", "LigerForSequenceClassification"):
        with pytest.raises(ValueError, match=rf"{name} must be a class of a family, .* liger_models\.hf\.register\(\)"):
            getattr(liger_models.hf, name).from_pretrained(folder)


def test_quantization_of_transformers_is_refused(folder):
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    message = r"\(load_in_4bit\) call liger_models\.adapters\.apply_lora and then quantize_base on"
    with pytest.raises(ValueError, match=message), liger_models.hf.registered():
        load(folder, quantization_config=config)


def test_an_architecture_of_ones_own(own_registry, tmp_path):
    """Its configuration has no class in transformers, so it gets one."""
    from dataclasses import dataclass

    from liger_models.arch.llama import LigerLlama, LlamaConfig

    @dataclass(frozen=True, kw_only=True)
    class HouseConfig(LlamaConfig):
        pass

    class House(LigerLlama):
        config_class = HouseConfig

    liger_models.register("hf_house", House, hf_class="LlamaForCausalLM")  # a name that transformers has, too
    config = HouseConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    wrapped = liger_models.hf.wrap(House.from_config(config))
    assert type(wrapped).__name__ == "LlamaForCausalLM"
    assert type(wrapped.model.decoder) is House
    assert liger_models.hf.LlamaForCausalLM.config_class is transformers.LlamaConfig
    assert wrapped.config.vocab_size == 64
    wrapped.save_pretrained(tmp_path)
    with liger_models.hf.registered():
        known = {**transformers.AutoModelForCausalLM._model_mapping._extra_content}  # pipelines read the names
        loaded = load(tmp_path)
    assert known == {type(wrapped.config): type(wrapped)}
    ids = torch.arange(9)[None]
    torch.testing.assert_close(loaded(ids).logits, wrapped(ids).logits)
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 12)


PUBLISHED = [
    file
    for file in sorted((ROOT / "tests" / "fixtures").glob("*/*.json"))
    if not file.name.endswith((".index.json", ".shapes.json", "tiny.json"))
    and "model_type" in json.loads(file.read_text(encoding="utf-8"))
]
SPELLED_OUT = {
    "num_key_value_heads",
    "layer_types",
    "head_dim",
    "sliding_window",
    "partial_rotary_factor",
    "hidden_act",
    "no_rope_layers",
    "moe_layers",
}
"""Fields that transformers fills in where a file leaves them to the defaults."""


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_published_configurations_through_the_classes_of_transformers(file):
    """The same configuration as from the file itself."""
    content = json.loads(file.read_text(encoding="utf-8"))
    want = read_config(get_arch(content["model_type"]).config_class, content)
    got = hf_config.to_liger(hf_config.config_class(content["model_type"]).from_dict(content))
    if content["model_type"] == "mistral3":  # the class ties what a file leaves open, and the loader unties it
        got = dataclasses.replace(got, tie_word_embeddings=False)
    for field in dataclasses.fields(want):
        assert field.name in SPELLED_OUT or getattr(got, field.name) == getattr(want, field.name), field.name
    assert got.head_size == want.head_size
    if hasattr(want, "window"):
        layers = range(want.num_hidden_layers)
        assert [got.window(i) for i in layers] == [want.window(i) for i in layers]
    one, other = (getattr(config, "partial_rotary_factor", None) or 1.0 for config in (got, want))
    assert one == other


def test_an_adapter_is_not_taken_for_a_model(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = unpack_projections(liger_models.hf.LlamaForCausalLM.from_pretrained(folder))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"]))
    for place in (tmp_path / "adapter", folder):  # alone, and in the folder of its model
        adapted.save_pretrained(place)
        adapter = json.loads((place / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(folder)}
        (place / "adapter_config.json").write_text(json.dumps(adapter))
        with (
            liger_models.hf.registered(),
            pytest.raises(ValueError, match=r"got an adapter.*PeftModel.from_pretrained"),
        ):
            load(place)


def test_options_of_save_pretrained(folder, tmp_path):
    model = liger_models.hf.LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "out", safe_serialization=True, variant=None, save_function=torch.save)
    with pytest.raises(ValueError, match="options must be known ones, got variant"):
        model.save_pretrained(tmp_path / "out", variant="fp16")
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()


def test_names_of_the_hub_are_downloaded(folder, monkeypatch):
    asked = {}

    def download(name, chosen, **options):
        asked.update(options, name=name, arch=chosen({"model_type": "llama"}))
        return folder

    monkeypatch.setattr("liger_models.hf.checkpoint.download", download)
    config = transformers.LlamaConfig.from_pretrained(folder)
    made = liger_models.hf.LlamaForCausalLM
    model = made.from_pretrained("me/model", config=config, revision="abc", token="secret", local_files_only=True)
    assert model.config.name_or_path == model.name_or_path == asked["name"] == "me/model"
    assert (asked["revision"], asked["token"], asked["local_files_only"]) == ("abc", "secret", True)
    assert asked["arch"] is liger_models.LigerLlama
    with pytest.raises(ValueError, match="subfolder must be in a folder on this machine, got 'x' of me/model"):
        made.from_pretrained("me/model", subfolder="x")


def test_parameters_without_values(root):
    """As frameworks load on ranks that get their parameters from another one."""
    accelerate = pytest.importorskip("accelerate")
    folder = make_folder("llama", "gqa", root)
    with accelerate.init_empty_weights():
        empty = liger_models.hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert all(each.is_meta and each.dtype == torch.float64 for each in empty.parameters())
    loaded = liger_models.hf.LlamaForCausalLM.from_pretrained(folder)
    empty.to_empty(device="cpu").load_state_dict(loaded.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(empty.parameters(), loaded.parameters(), strict=True))


def test_a_head_that_only_the_class_of_transformers_ties(root, tmp_path):
    """As of Mistral Small 3, whose files do not say that the head is not the embedding."""
    folder = make_folder("mistral3", "untied", root)
    content = json.loads((folder / "config.json").read_text())
    for part in (content, content["text_config"]):
        part.pop("tie_word_embeddings", None)
    shutil.copytree(folder, tmp_path / "open")
    (tmp_path / "open" / "config.json").write_text(json.dumps(content))
    with liger_models.hf.registered():
        model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "open")
    want = load_file(folder / "model.safetensors")["language_model.lm_head.weight"]
    assert torch.equal(model.get_output_embeddings().weight, want)
    assert not model.config.tie_word_embeddings
