"""What the site has besides the pages in this folder: tables from the registry, and the reference from docstrings."""

import importlib
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from liger_models.arch import get_arch, list_archs
from liger_models.arch.auto import AutoLigerModel
from liger_models.base.causal_lm import CausalLM
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.cli.packing import empty_default
from liger_models.layers.moe import LigerMoE

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/liger-models/liger_models/blob/main/"
LIGER_KERNEL = json.loads((ROOT / "tests" / "fixtures" / "liger-kernel-0.8.5.json").read_text())
"""Public names of Liger-Kernel."""

BEHIND_THE_PAGES = "---\nsearch:\n  boost: 0.2\n---\n\n"
"""Head of the reference's pages: a search finds what explains a subject before the names that contain it."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the reference."""
    for uri, text in reference().items():
        files.append(File.generated(config, uri, content=f"{BEHIND_THE_PAGES}{text}"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the tables, and point links that leave this folder to the repository."""
    for name, make in {"models": models, "liger-kernel-models": liger_kernel_models}.items():
        markdown = markdown.replace(f"<!-- {name} -->", make()) if f"<!-- {name} -->" in markdown else markdown
    if page.file.src_uri == "ops.md":
        markdown = re.sub(r"^## .*: `([\w/]+)\.py`$", formulas, markdown, flags=re.MULTILINE)
    return re.sub(r"\]\(\.\./(?=\w)", f"]({REPOSITORY}", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings introduce code with two colons, as in reStructuredText; show one."""
    return html.replace("::</p>", ":</p>")


# Supported models


def doc(model: type[CausalLM]) -> tuple[str, str]:
    """From the docstring of an architecture: the checkpoints that it reads, and how it differs from Llama.

    It is that of the class in a file with several model types, and else that of the file.
    """
    own = inspect.cleandoc(model.__doc__ or "")
    text = own if "model_type" in own else (sys.modules[model.__module__].__doc__ or "").strip()
    first, _, rest = text.partition("\n\n")
    return first.partition(":")[0], rest.strip()


def tested(arch: str) -> tuple[list[Path], list[str]]:
    """The test data of an architecture: config.json files of released checkpoints, and the variants of a tiny model."""
    folder = ROOT / "tests" / "fixtures" / arch
    releases = [path.with_name(path.name.replace(".shapes", "")) for path in sorted(folder.glob("*.shapes.json"))]
    return releases, list(json.loads((folder / "tiny.json").read_text())["variants"])


def models() -> str:
    """A table of all architectures, and a section for each."""
    rows, sections = [], []
    for arch in list_archs():
        cls = get_arch(arch)
        releases, variants = tested(arch)
        if releases:
            model = AutoLigerModel.from_config(json.loads(releases[0].read_text()), device="meta")
        else:
            model = empty_default(arch)
        sees = isinstance(model, VisionLanguageModel)
        inputs = "text" + ", images" * sees + ", videos" * hasattr(model.config, "video_token_id")
        routes = any(isinstance(module, LigerMoE) for module in model.modules())
        reads, differs = doc(cls)
        rows.append([f"[`{arch}`](#{arch})", f"`{cls.__name__}`", reads, inputs, "yes" if routes else ""])
        names = [path.stem.replace(".text", " (its text model)") for path in releases]
        sections += [
            f"### `{arch}` {{ #{arch} }}",
            f"[`{cls.__name__}`][{cls.__module__}.{cls.__name__}]: {reads}.",
            differs,
            f"Released checkpoints in the tests: {', '.join(names) or 'none'}.",
            f"Variants compared with transformers: {', '.join(variants)}.",
        ]
    head = ["model_type", "class", "checkpoints", "takes", "EP"]
    return "\n\n".join([table(head, rows), "## Each of them", *sections])


def liger_kernel_models() -> str:
    """The classes that replace Liger-Kernel's patches."""
    known, read_as = list_archs(), LIGER_KERNEL["read_as"]
    name = "`apply_liger_kernel_to_{}`".format
    pairs = [(name(arch), read_as.get(arch, arch)) for arch in LIGER_KERNEL["models"]]
    rows = [[theirs, f"`{get_arch(arch).__name__}`"] for theirs, arch in pairs if arch in known]
    absent = [theirs for theirs, arch in pairs if arch not in known]
    return f"{table(['Liger-Kernel', 'liger_models'], rows)}\n\nNo counterpart: {', '.join(absent) or 'none'}."


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


# Ops


def formulas(heading: re.Match[str]) -> str:
    """The heading of an op, with the docstring of its file folded below it."""
    module = importlib.import_module(f"liger_models.{heading[1].replace('/', '.')}")
    first, _, text = (module.__doc__ or "").replace("::\n", ":\n").partition("\n\n")
    folded = textwrap.indent(f"{first}\n\n{text}", "    ")
    return f'{heading[0]}\n\n??? note "Forward, backward, what is saved"\n\n{folded}\n'


# Reference


def reference() -> dict[str, str]:
    """Page -> its text, for mkdocstrings: the public names, and one page for each folder."""
    package = ROOT / "liger_models"
    folders = [init.parent for init in package.glob("*/__init__.py")]
    return {"reference/index.md": public_names()} | {f"reference/{each.name}.md": members(each) for each in folders}


def members(folder: Path) -> str:
    """A folder and all modules in it."""
    package = ".".join(folder.relative_to(ROOT).parts)
    files = sorted(path.relative_to(ROOT).with_suffix("") for path in folder.rglob("*.py"))
    entries = [f"::: {'.'.join(file.parts)}" for file in files if not file.name.startswith("_")]
    documented = (folder / "__init__.py").read_text()
    head = f"::: {package}\n    options: {{heading_level: 1}}" if documented else f"# {package}"
    if folder.name == "losses":  # their bases define forward and from_log_probs
        entries = [f"{entry}\n    options: {{inherited_members: true}}" for entry in entries]
    return "\n\n".join([head, *entries])


def public_names() -> str:
    """The names that `liger_models` itself exports, with the first line of each docstring."""
    import liger_models

    rows = []
    for name in liger_models.__all__:
        value = getattr(liger_models, name)
        if not isinstance(value, str):
            rows.append([f"[`{name}`][{value.__module__}.{name}]", first_line(value)])
    intro = "# Reference\n\nGenerated from the docstrings. `from liger_models import ...` imports these names:\n\n"
    return intro + table(["name", "what it is"], rows)


def first_line(value: Any) -> str:
    """The first line of a docstring, for a cell of a table."""
    return (value.__doc__ or "").strip().partition("\n")[0].replace("|", "\\|")
