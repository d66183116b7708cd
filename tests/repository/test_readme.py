"""The documentation: every Python block and notebook runs, every make target and every local link in it exists."""

import json
import re
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import metadata
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from liger_models import LigerLlama, LlamaConfig
from liger_models.arch import built_in
from liger_models.arch.qwen3_5.text import Qwen3_5TextConfig
from liger_models.base import causal_lm
from liger_models.retrieval import settings
from liger_models.text import tokenizer

from ..base.conftest import make_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Line number and content of each fenced block of a language."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match[1] == language:
            yield text.count("\n", 0, match.start()) + 2, match[2]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def test_an_accelerator_is_asked_for_only_where_it_is_available():
    """Without ``check_available`` a CUDA build of PyTorch names CUDA on a machine that has no GPU."""
    sources = [*PAGES, *NOTEBOOKS, *ROOT.glob("liger_models/**/*.py"), *ROOT.glob("examples/*.py")]
    calls = [call for each in sources for call in re.findall(r"current_accelerator\(.*?\)", each.read_text("utf-8"))]
    assert set(calls) == {"current_accelerator(check_available=True)"}


def serve(monkeypatch, folder: Path) -> None:
    """Make every name on the hub this folder."""
    monkeypatch.setattr(causal_lm, "download", lambda repo_id, *_, **options: folder)
    for module in (tokenizer, settings):
        monkeypatch.setattr(module, "snapshot_download", lambda repo_id, **options: str(folder))


@pytest.fixture
def tiny_hub(tmp_path, monkeypatch):
    """Every name on the hub is a tiny Llama with a tokenizer, and the working directory is an empty folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_tokens(["yes", "no"])  # the answers of a reranker
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LigerLlama.from_config(config, dtype=torch.bfloat16)
    model.assets = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode(),
    }
    model.save_pretrained(tmp_path / "hub")
    serve(monkeypatch, tmp_path / "hub")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def vision_hub(tmp_path, tiny_hub, monkeypatch):
    """Every name on the hub is a tiny Qwen2.5-VL."""
    size = {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    model = make_model("qwen2_5_vl", preprocessor_config=size)
    model.bfloat16().save_pretrained(tmp_path / "vision")
    serve(monkeypatch, tmp_path / "vision")


@pytest.fixture
def transformers_own():
    """The auto classes of transformers return its own classes again."""
    yield
    if "liger_models.hf.auto" in sys.modules:
        sys.modules["liger_models.hf.auto"].unregister()


@every_page
def test_python_blocks_run(page, request, tiny_hub, own_registry, transformers_own, capsys, monkeypatch):
    if page.name == "vision.md":
        request.getfixturevalue("vision_hub")
    if page.name == "medusa.md":  # its configuration has the defaults of the released models
        sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
        config = partial(Qwen3_5TextConfig, linear_value_head_dim=16, num_attention_heads=4, head_dim=32, **sizes)
        monkeypatch.setattr("liger_models.arch.qwen3_5.text.Qwen3_5TextConfig", config)
    if page.name == "fp8.md":
        pytest.importorskip("torchao", reason="float8 training needs torchao: pip install 'liger_models[fp8]'")
    if page.name == "gguf.md":
        pytest.importorskip("gguf", reason="GGUF files need gguf: pip install 'liger_models[gguf]'")
    namespace: dict = {"__name__": "readme"}
    with warnings.catch_warnings():
        others = {
            "engines.md": ("accelerate", "lightning", "peft"),
            "in-your-tools.md": ("accelerate", "datasets", "peft", "transformers", "trl"),
            "lora.md": ("peft", "torchao"),
        }
        if page.name in others:
            for other in others[page.name]:
                pytest.importorskip(other)
            warnings.simplefilter("ignore")  # theirs
        for line, code in blocks(page, "python"):
            # The empty lines in front give a traceback the page's line numbers.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


TINY = {
    "custom": {"STEPS": 2},
    "images": {"STEPS": 1},
    "lora": {"STEPS": 2},
    "word_problems": {
        "TRAIN": "a.parquet",
        "TEST": "a.parquet",
        "STEPS": 2,
        "ROWS": 2,
        "LR": 1e-3,
        "MAX_NEW_TOKENS": 4,
    },
}
"""Notebook -> what a test changes of its cell of parameters."""


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_run(file, request, tiny_hub, own_registry, tmp_path):
    if file.stem == "images":
        request.getfixturevalue("vision_hub")
    if file.stem == "word_problems":
        pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        problems = [{"question": f"{n} + {n}?", "answer": f"It is #### {2 * n}"} for n in range(3)]
        parquet.write_table(pyarrow.Table.from_pylist(problems), "a.parquet")
    settings = tmp_path / "hub" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    namespace: dict = {"__name__": "notebook"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers'
        for number, cell in enumerate(json.loads(file.read_text(encoding="utf-8"))["cells"]):
            assert not cell.get("outputs"), "clear the outputs"
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{file.name}, cell {number}", "exec"), namespace)
            if "parameters" in cell["metadata"].get("tags", ()):
                assert TINY[file.stem].keys() <= namespace.keys()
                namespace |= TINY[file.stem]
    if file.stem == "word_problems":  # both have learned the same
        assert namespace["ours"] == pytest.approx(namespace["theirs"], rel=2e-2)


@every_page
def test_shell_blocks_name_what_exists(page):
    extras = metadata("liger_models").get_all("Provides-Extra")
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for _, code in blocks(page, "sh"):
        for line in code.splitlines():
            command = line.partition("#")[0].split()
            if command[:1] == ["make"]:
                named = {word for word in command[1:] if re.fullmatch("[a-z-]+", word)}
                assert named <= targets, line
            for word in command:
                if word.endswith(".py"):
                    assert (ROOT / word).is_file(), line
            for extra in re.findall(r"pip install '.*\[(\w+)\]'", line):
                assert extra in extras, line


REPOSITORY = "https://github.com/liger-models/liger_models/blob/main/"


@every_page
def test_links_into_the_repository_exist(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if target.startswith(REPOSITORY):
            assert (ROOT / target.removeprefix(REPOSITORY)).exists(), target
        elif "://" not in target:
            assert page.name != "README.md", f"{target}: the package index needs a whole address"
            assert (page.parent / target).exists(), target


def test_every_op_is_documented():
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    package = ROOT / "liger_models"
    files = {path.relative_to(package).as_posix() for path in (package / "kernels").rglob("[!_]*.py")}
    shared = {
        "kernels/attention/causal_attention_kernels.py",
        "kernels/attention/heads.py",
        "kernels/attention/workspace.py",
        "kernels/dispatch.py",
        "kernels/float8/float8_product.py",
        "kernels/float8/frozen_product.py",
        "kernels/frozen/products.py",
        "kernels/launch.py",
        "kernels/linear/projection.py",
        "kernels/linear_attention/documents.py",
        "kernels/loss/row_chunks.py",
        "kernels/loss/scalar_loss.py",
        "kernels/linear_attention/in_chunks.py",
        "kernels/matmul/batch_invariance.py",
        "kernels/moe/grouped_mm.py",
        "kernels/moe/permutation.py",
        "kernels/norm/fused_norm.py",
        "kernels/norm/partial_sums.py",
        "kernels/norm/row_norm.py",
        "kernels/optimizer/moments.py",
        "kernels/options.py",
        "kernels/overlap.py",
        "kernels/rope/head_norm.py",
        "kernels/tiles.py",
    }
    for name in sorted(files - shared):
        assert re.search(rf": (`\S+`, )*`{re.escape(name)}`", text), name


def test_the_readme_names_every_architecture():
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Models\n")[2].partition("\n\nEach")[0]
    assert sorted(re.findall(r"`(\w+)`", table.replace("`model_type`", ""))) == sorted(built_in())


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f": {page.name}\n" in navigation for page in (ROOT / "docs").glob("*.md"))
