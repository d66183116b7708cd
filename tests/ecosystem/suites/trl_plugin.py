"""A plugin of pytest: TRL's tests train tiny models of `liger_models.hf` on local copies of TRL's data sets.

Models and data sets are written into the working directory under their names on the hub, where transformers and
datasets find them before they ask the hub. A test that needs another model or data set of the hub is skipped.
"""

import contextlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers.processing_utils  # replaces sys.modules["transformers"], whose attributes change below
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import liger_models.hf
from liger_models.adapters import unpack_projections
from liger_models.hf.checkpoint import Checkpoint
from liger_models.hf.model import LigerForCausalLM

HUB = Path("trl-internal-testing")
SIZES = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "qwen2_5", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "qwen3", {"head_dim": 128}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3Moe", "qwen3", {"head_dim": 128, **EXPERTS}),
    "tiny-GptOssForCausalLM": ("GptOss", "gptoss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "tiny-LlamaForCausalLM-3": ("Llama", "llama3", {}),
    "tiny-LlamaForCausalLM-3.1": ("Llama", "llama3_1", {}),
    "tiny-LlamaForCausalLM-3.2": ("Llama", "llama3_2", {}),
    "tiny-MistralForCausalLM-0.1": ("Mistral", "qwen2_5", {}),
    "tiny-MistralForCausalLM-0.2": ("Mistral", "qwen2_5", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2", "gemma", {}),
    "tiny-Cohere2ForCausalLM": ("Cohere2", "cohere2", {}),
    "tiny-Phi3ForCausalLM": ("Phi3", "phi3", {}),
    "tiny-Olmo3ForCausalLM": ("Olmo3", "qwen2_5", {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "qwen2_5", {"hidden_size": 16}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", "qwen3", {}),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", "llama3_2", {}),
}
"""Name on the hub -> the family in transformers, TRL's chat template, and the sizes that differ from SIZES."""

DATA = ("zen", "toolcall", "harmony")
"""Data sets of the hub that TRL's scripts write."""
ENDS = {
    "llama": "<|eot_id|>",
    "gptoss": "<|return|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}
"""Beginning of a template's name -> the token that ends a turn. Qwen's is the default."""
PAD = "<|endoftext|>"
QWEN = Path("qwen")
"""Folder in which the tests of completions with ids of Qwen2.5's tokenizer run; the wide logits cost time."""
QWEN_IDS = {PAD: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}

unpacked: tuple[type, ...] = ()
"""Classes of models that are unpacked in the running test: PEFT targets projections by their names in transformers."""


def write_data(checkout: Path) -> list[str]:
    """Write the data sets, and return the texts in them."""
    texts: list[str] = []
    for name in DATA:
        script = checkout / "scripts" / f"generate_{name}_dataset.py"
        spec = importlib.util.spec_from_file_location(f"generate_{name}", script)
        assert spec is not None and spec.loader is not None  # noqa: PT018
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        # The script uploads each data set, which is a configuration of one repository.
        written: dict[str, datasets.DatasetDict] = {}
        upload = datasets.DatasetDict.push_to_hub
        datasets.DatasetDict.push_to_hub = lambda self, _, config_name, written=written: written.update(
            {config_name: self}
        )
        try:
            module.main(0.1, True, None)
        finally:
            datasets.DatasetDict.push_to_hub = upload
        lines = ["---", "configs:"]
        for config, splits in written.items():
            lines += [f"- config_name: {config}", "  data_files:"]
            for split, rows in splits.items():
                if "tools" in rows.column_names:  # on the hub they are JSON, as the tests expect
                    tools = [json.dumps(row) for row in rows["tools"]]
                    rows = rows.remove_columns("tools").add_column("tools", tools)
                rows.to_parquet(HUB / name / config / f"{split}.parquet")
                lines += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
                texts += [str(row) for row in rows]
        (HUB / name / "README.md").write_text("\n".join([*lines, "---", ""]))
    return texts


def train_tokenizer(
    texts: list[str], template: str, name: str, ids: dict[str, int]
) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes with merges learned from these texts, and with the special tokens of a chat template.

    Args:
        texts: what the merges are learned from.
        template: the chat template.
        name: of the template.
        ids: special token -> its id, for tokens whose ids are given.
    """
    end = next((token for start, token in ENDS.items() if name.startswith(start)), "<|im_end|>")
    special = [PAD, end, *re.findall(r"<\|?[A-Za-z_]+\|?>", template)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=alphabet, special_tokens=[*dict.fromkeys(special)], show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    file = json.loads(backend.to_str())
    file["model"]["vocab"] |= ids
    for token in file["added_tokens"]:
        token["id"] = ids.get(token["content"], token["id"])
    backend = Tokenizer.from_str(json.dumps(file))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=end)
    tokenizer.chat_template = template
    return tokenizer


def write_model(folder: Path, texts: list[str], special_ids: dict[str, int]) -> None:
    """Write a model with drawn weights and a tokenizer, as transformers writes them."""
    name = folder.name
    family, template, sizes = MODELS[name]
    source = Path(trl.__file__).with_name("chat_templates") / f"{template}.jinja"
    tokenizer = train_tokenizer(texts, source.read_text(), template, special_ids)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    head = "ForSequenceClassification" if "Classification" in name else "ForCausalLM"
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "vocab_size": vocabulary, **ids, **sizes})
    if head == "ForSequenceClassification":
        config.num_labels = 1
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.xavier_uniform_(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def use_the_door() -> None:
    """Let transformers' auto classes, and the classes that TRL takes by their names, be those of this package."""
    liger_models.hf.register()
    for family, _, _ in MODELS.values():
        for head in ("ForCausalLM", "ForSequenceClassification"):
            ours = getattr(liger_models.hf, f"{family}{head}", None)
            if ours is not None:
                setattr(transformers, f"{family}{head}", ours)
    post_init = transformers.TrainingArguments.__post_init__

    def train_anywhere(self: Any) -> None:
        """TRL trains in bf16 by default, and the tests do not say that they may run on the CPU."""
        if not torch.accelerator.is_available():
            self.use_cpu, self.bf16 = True, False
        post_init(self)

    transformers.TrainingArguments.__post_init__ = train_anywhere
    load = Checkpoint.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        model = load(cls, *args, **options)
        return unpack_projections(model) if issubclass(cls, unpacked) else model

    Checkpoint.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
    # The files say which class the tokenizer has, but for some families AutoTokenizer takes the family's.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained
    for auto in (transformers.AutoTokenizer, transformers.AutoProcessor):
        other = auto.from_pretrained
        auto.from_pretrained = lambda name, *args, other=other, **options: (
            tokenizer if Path(name, "tokenizer.json").is_file() else other
        )(name, *args, **options)


def pytest_configure(config: Any) -> None:
    if not HUB.is_dir():
        texts = write_data(Path.cwd())
        for name in MODELS:
            write_model(HUB / name, texts, {})
        write_model(QWEN / HUB / "tiny-Qwen2ForCausalLM-2.5", texts, QWEN_IDS)
        for name in ("zen", "tiny-Qwen2ForSequenceClassification-2.5"):
            (QWEN / HUB / name).symlink_to((HUB / name).absolute())
    use_the_door()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    global unpacked
    adapted = re.search("peft|lora|adapter|prompt_tuning", item.nodeid.lower())
    # Where a classifier is adapted, it is the model; elsewhere it gives rewards.
    classes = (Checkpoint,) if "test_reward_trainer" in item.nodeid else (LigerForCausalLM,)
    unpacked = classes if adapted else ()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """Run a test, and skip it if it asks for a model or a data set that is not here."""
    try:
        with contextlib.chdir(QWEN if "mask_truncated_completions" in item.name else Path()):
            return (yield)
    except Exception as error:
        text = item.nodeid + inspect.getsource(item.function)
        absent = [name for name in re.findall(r"[\w-]+/(?:tiny-|zen|[A-Z])[\w.-]+", text) if not Path(name).is_dir()]
        if isinstance(error, (OSError, ConnectionError)) and absent:
            pytest.skip(f"the run is offline, and {absent[0]} is not here")
        raise
