"""The site: it builds without a warning, has an entry for every public name, and fetches nothing when it is read."""

import ast
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

import liger_models
from liger_models.arch import built_in, get_arch

from .test_package import FILES, PACKAGE, ROOT

THEIRS = json.loads((ROOT / "tests" / "fixtures" / "liger-kernel-0.8.5.json").read_text())
"""Public names of Liger-Kernel."""

Definition = ast.FunctionDef | ast.ClassDef


def definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    """Public classes, functions and methods with their full names."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}.{node.name}")


@cache
def statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


@cache
def public() -> dict[str, Definition]:
    """What has a docstring; test_package.py and the linter see to it that functions and classes have one."""
    found = {}
    for file in FILES:
        parts = [PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts]
        if file.name == "__init__.py" or not file.name.startswith("_"):
            module = ".".join(parts).removesuffix(".__init__")
            found |= dict(definitions(statements(file), module))
    return {name: node for name, node in found.items() if ast.get_docstring(node)}


@cache
def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for file in FILES for node in statements(file) if isinstance(node, ast.ClassDef)}


def arguments(node: Definition) -> set[str]:
    """Names that an ``Args`` section may have: a function's, or a class's by its constructor or its fields."""
    if isinstance(node, ast.FunctionDef):
        return {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
    fields = {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
    made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    bases = [classes()[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes()]
    return fields.union(*map(arguments, made or bases))


def test_arguments_in_docstrings_exist():
    for name, node in public().items():
        section = re.search(r"^Args:\n((?: .*\n?|\n)+)", ast.get_docstring(node) or "", re.MULTILINE)
        for line in re.findall(r"^    (\w[\w*, ]*):", section[1], re.MULTILINE) if section else ():
            named = set(line.replace("*", "").split(", "))
            assert named <= arguments(node) | {"Others"}, f"{name}: {named}"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the site, built without a warning."""
    pytest.importorskip("mkdocstrings_handlers", reason="pip install 'liger-models[docs]'")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.matrix  # `make docs` builds it, too
@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_site(site):
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"reference/{init.parent.name}.md\n" in navigation for init in PACKAGE.glob("*/__init__.py"))
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = {line.split()[0]: line.split()[3] for line in zlib.decompress(inventory).decode().splitlines()}
    assert not public().keys() - entries.keys()
    reference = (site / "reference" / "index.html").read_text(encoding="utf-8")
    for name in liger_models.__all__:
        value = getattr(liger_models, name)
        if not isinstance(value, str):
            full = f"{value.__module__}.{name}"
            assert full in entries
            assert f"#{full}" in reference

    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert all((entry.get("boost") == 0.2) == entry["location"].startswith("reference/") for entry in found)

    models = (site / "models.html").read_text(encoding="utf-8")
    for arch in built_in():
        assert f'id="{arch}"' in models
        assert get_arch(arch).__name__ in models

    moving = (site / "from-liger-kernel.html").read_text(encoding="utf-8")
    assert all(f"apply_liger_kernel_to_{name}<" in moving for name in THEIRS["models"])

    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//""", text), page.name
        assert not re.findall(r"""<link[^>]+rel=["']?(?:stylesheet|preconnect)[^>]+href=["']?(?:https?:)?//""", text)


@pytest.mark.matrix  # `make docs` builds it, too
@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_site_in_a_browser(site):
    """Playwright and a Chromium are needed: pip install playwright, and CHROMIUM or PATH has the browser."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium: set CHROMIUM to its path")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1400, "height": 1000}, color_scheme="dark")

        page.goto((site / "index.html").as_uri())
        cards = page.locator(".grid.cards > ul > li")
        assert cards.count() == 6
        boxes = [cards.nth(i).bounding_box() for i in range(6)]
        assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"]  # a grid, and not a list

        for wide in ("performance", "models", "ops", "cli"):
            page.goto((site / f"{wide}.html").as_uri())
            page.wait_for_timeout(500)  # for the script that makes wide tables scroll
            cut = "tables => tables.filter(table => table.scrollWidth > table.parentElement.parentElement.clientWidth)"
            assert page.eval_on_selector_all(".md-typeset table:not([class])", f"{cut}.length") == 0, wide

        page.goto((site / "performance.html").as_uri())
        for plot in page.locator(".md-typeset img").all():
            plot.scroll_into_view_if_needed()
            pixels = Image.open(io.BytesIO(plot.screenshot())).convert("L").histogram()
            assert sum(pixels[:64]) > 0.6 * sum(pixels)  # dark, apart from bars and letters
            assert sum(pixels[192:]) > 0  # letters

        for query, best in {"gradient checkpointing": "quickstart.html", "merge adapters": ".html"}.items():
            page.goto((site / "index.html").as_uri())
            page.locator(".md-search__input").click()
            page.keyboard.type(query)
            found = page.locator(".md-search-result__link")
            found.first.wait_for()
            pages = [found.nth(i).get_attribute("href") for i in range(3)]
            assert not any("/reference/" in each for each in pages), pages
            assert best in pages[0], pages
        chromium.close()


def test_every_name_of_liger_kernel_is_in_the_table():
    page = (ROOT / "docs" / "from-liger-kernel.md").read_text(encoding="utf-8")
    for name in THEIRS["names"]:
        assert f"`{name}`" in page, name


def test_what_stands_beside_a_name_of_liger_kernel_exists():
    page = (ROOT / "docs" / "from-liger-kernel.md").read_text(encoding="utf-8")
    for home, name in re.findall(r"`from (liger_models[\w.]*) import (\w+)`", page):
        assert hasattr(importlib.import_module(home), name), f"{home}.{name}"
    for name in re.findall(r"^\| [^|]+ \| `(\w+)[`(]", page.partition("## Modules")[2], re.MULTILINE):
        assert name == "rope" or name in liger_models.__all__, name
