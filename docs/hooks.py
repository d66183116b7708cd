"""What the site has besides the pages of this folder: tables from the registry, the reference from docstrings."""

import importlib
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from liger_models.arch import get_arch, list_archs
from liger_models.convert.auto import AutoLigerModel
from liger_models.layers.causal_lm import CausalLM
from liger_models.layers.moe import LigerMoE
from liger_models.layers.vision_language import VisionLanguageModel

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/liger-models/liger_models/blob/main/"
LIGER_KERNEL = json.loads((ROOT / "tests" / "data" / "liger-kernel-0.8.5.json").read_text())
"""Public names of Liger-Kernel."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the reference."""
    for uri, text in reference().items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the tables, and let links out of this folder lead to the repository."""
    for name, make in {"models": models, "liger-kernel-models": liger_kernel_models}.items():
        markdown = markdown.replace(f"<!-- {name} -->", make()) if f"<!-- {name} -->" in markdown else markdown
    if page.file.src_uri == "ops.md":
        markdown = re.sub(r"^## .*: `(\w+)\.py`$", formulas, markdown, flags=re.MULTILINE)
    return re.sub(r"\]\(\.\./(?=\w)", f"]({REPOSITORY}", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings announce code by two colons, as in reStructuredText."""
    return html.replace("::</p>", ":</p>")


# Supported models


def doc(model: type[CausalLM]) -> tuple[str, str]:
    """What an architecture's docstring says: which checkpoints it reads, and what differs from Llama."""
    first, _, rest = (sys.modules[model.__module__].__doc__ or "").strip().partition("\n\n")
    return first.partition(":")[0], rest.strip()


def tested(arch: str) -> tuple[list[Path], list[str]]:
    """What the tests have of an architecture: config.json of released checkpoints, and variants of a tiny one."""
    folder = ROOT / "tests" / "data" / arch
    releases = [path.with_name(path.name.replace(".shapes", "")) for path in sorted(folder.glob("*.shapes.json"))]
    return releases, list(json.loads((folder / "tiny.json").read_text())["variants"])


def models() -> str:
    """A table of all architectures, and a section for each."""
    rows, sections = [], []
    for arch in list_archs():
        cls = get_arch(arch)
        releases, variants = tested(arch)
        config = json.loads(releases[0].read_text()) if releases else cls.config_class()
        model = AutoLigerModel.from_config(config, device="meta")
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
    """For Liger-Kernel's patches the classes that stand in their place."""
    known = list_archs()
    name = "`apply_liger_kernel_to_{}`".format
    rows = [[name(arch), f"`{get_arch(arch).__name__}`"] for arch in LIGER_KERNEL["models"] if arch in known]
    absent = [name(arch) for arch in LIGER_KERNEL["models"] if arch not in known]
    return f"{table(['Liger-Kernel', 'here'], rows)}\n\nWithout a counterpart here: {', '.join(absent) or 'none'}."


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


# Ops


def formulas(heading: re.Match[str]) -> str:
    """The heading of an op, and folded below it what its file begins with."""
    module = importlib.import_module(f"liger_models.kernels.{heading[1]}")
    first, _, text = (module.__doc__ or "").replace("::\n", ":\n").partition("\n\n")
    folded = textwrap.indent(f"{first}\n\n{text}", "    ")
    return f'{heading[0]}\n\n??? note "Forward, backward, what is kept"\n\n{folded}\n'


# Reference


def reference() -> dict[str, str]:
    """Page -> its text, for mkdocstrings: one for each package, and one for the modules beside them."""
    package = ROOT / "liger_models"
    pages = {"reference/index.md": public_names(), "reference/modules.md": members(package)}
    return pages | {f"reference/{init.parent.name}.md": members(init.parent) for init in package.glob("*/__init__.py")}


def members(folder: Path) -> str:
    """A package and its modules, those that are named after an architecture behind the others."""
    package = ".".join(folder.relative_to(ROOT).parts)
    archs = set() if folder.name == "arch" else set(list_archs())
    names = sorted((path.stem for path in folder.glob("*.py")), key=lambda name: (name in archs, name))
    entries = [f"::: {package}.{name}" for name in names if not name.startswith("_")]
    documented = folder.name != "liger_models" and (folder / "__init__.py").read_text()
    head = f"::: {package}\n    options: {{heading_level: 1}}" if documented else f"# {package}"
    if folder.name == "losses":  # they share private bases
        entries = [f"{entry}\n    options: {{inherited_members: true}}" for entry in entries]
    return "\n\n".join([head, *entries])


def public_names() -> str:
    """The names that `liger_models` itself has, with the first line of each docstring."""
    import liger_models

    rows = []
    for name in liger_models.__all__:
        value = getattr(liger_models, name)
        if not isinstance(value, str):
            rows.append([f"[`{name}`][{value.__module__}.{name}]", first_line(value)])
    intro = "# Reference\n\nMade from the docstrings. These names are there by `from liger_models import ...`:\n\n"
    return intro + table(["name", "what it is"], rows)


def first_line(value: Any) -> str:
    """Of a docstring, for a cell of a table."""
    return (value.__doc__ or "").strip().partition("\n")[0].replace("|", "\\|")
