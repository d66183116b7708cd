"""The package as a whole: what importing it costs, what it runs without, what its files may import, what is shipped."""

import ast
import email
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import liger_models
from liger_models.layers.masks import FOR_CPUS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "liger_models"
FILES = sorted(PACKAGE.rglob("*.py"))
RECIPES = sorted(PACKAGE.glob("recipes/*/*.yaml"))
STUBS = sorted(PACKAGE.rglob("*.pyi"))
HEAVY = {"torch", "triton", "transformers", "huggingface_hub", "tokenizers", "safetensors", "numpy", "einops"}
LEVELS = (
    ("common",),
    ("distributed",),
    ("kernels", "text"),
    ("layers",),
    ("memory",),
    ("convert",),
    ("generation",),
    ("base",),
    ("arch",),
    ("losses", "data", "adapters", "retrieval", "hf"),
    ("parallel",),
    ("train",),
    ("",),
    ("cli", "__main__"),
)
"""The levels of the package, lowest first: a module imports from its own level and from the levels below it.

An entry is a module, or a folder, which stands for all modules of the folder that have no entry of their own.
"""
PLACES = {module: level for level, modules in enumerate(LEVELS) for module in modules}


def run(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    loaded = run("import sys, liger_models; print(*sys.modules)").split()
    assert HEAVY.isdisjoint(loaded)


REGISTER = """
import sys
import liger_models.hf
from transformers import AutoModelForCausalLM, LlamaConfig

liger_models.hf.register()
print(*sys.modules)
AutoModelForCausalLM._model_mapping[LlamaConfig]
print(*sys.modules)
"""


def test_registering_the_models_imports_none():
    """None of transformers, and of this package only the family of a model that is loaded."""
    registered, used = (line.split() for line in run(REGISTER).splitlines())
    models = [name for name in used if name.startswith("transformers.models.") and ".modeling_" in name]
    assert models == ["transformers.models.auto.modeling_auto"]
    families = {f"liger_models.arch.{name}" for name in ("llama", "qwen3", "mamba2")}
    assert families.isdisjoint(registered)
    assert families & {*used} == {"liger_models.arch.llama"}


STEP = """
import sys
import torch
import liger_models.train.loop
from liger_models import AutoLigerModel, LigerAdamW, LlamaConfig

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
model = AutoLigerModel.from_config(LlamaConfig(vocab_size=256, **sizes), dtype=torch.bfloat16)
optimizer = LigerAdamW(model.parameters())
ids = torch.arange(8)[None]
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
optimizer.zero_grad()
print(*sys.modules)
"""


@pytest.mark.skipif(not FOR_CPUS, reason="on builds for accelerators variable-length attention imports the compiler")
def test_a_new_model_and_its_step_leave_out_the_compiler():
    loaded = run(STEP).split()
    distributed = {f"torch.distributed.{name}" for name in ("tensor", "fsdp", "checkpoint")}
    assert {"torch._dynamo", "sympy", *distributed}.isdisjoint(loaded)


@pytest.mark.parametrize("name", liger_models.__all__)
def test_every_public_name_is_there(name):
    assert getattr(liger_models, name)
    assert name in dir(liger_models)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"Did you mean LigerLlama\? It has: .*LigerAdamW"):
        liger_models.LigerLama  # noqa: B018
    with pytest.raises(
        ImportError, match=r"cannot import name 'LigerLama' from 'liger_models'\. Did you mean LigerLlama"
    ):
        from liger_models import LigerLama  # noqa: F401
    with pytest.raises(ImportError, match="Did you mean LigerFusedLinearDPOLoss"):
        from liger_models.losses import LigerFusedDPOLoss  # noqa: F401
    with pytest.raises(ImportError, match=r"cannot import name 'Unknown' from 'liger_models' \("):
        from liger_models import Unknown  # noqa: F401
    assert not hasattr(liger_models, "LigerLama")
    assert importlib.util.find_spec("liger_models.nothing") is None


TRAIN_WITHOUT = """
import sys

class Hiding:
    # A finder of modules that does not find some.

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
import warnings
warnings.simplefilter("ignore")  # torch says that NumPy is missing
import torch
import liger_models
from liger_models import LigerLlama, LlamaConfig

for name in liger_models.__all__:
    getattr(liger_models, name)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
torch.manual_seed(0)
model = LigerLlama.from_config(config)
ids = torch.arange(20)[None]
loss = model(ids, labels=ids, cu_seqlens=torch.tensor([0, 8, 20])).loss
loss.backward()
assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
if "numpy" not in {absent!r}:  # safetensors[torch] brings it, to write
    model.save_pretrained({folder!r})
    model = LigerLlama.from_pretrained({folder!r}, progress=False)
assert model.generate(ids, max_new_tokens=4, eos_token_id=[]).shape == (1, 24)
assert not [name for name in sys.modules if name.partition(".")[0] in {absent!r}]
"""


EXTRAS = (
    "typer",
    "rich",
    "pyarrow",
    "torchao",
    "tensorboard",
    "PIL",
    "av",
    "transformers",
    "liger_kernel",
    "peft",
    "pandas",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "absent",
    [
        ("triton", "numpy", *EXTRAS),
        *(pytest.param((name,), marks=pytest.mark.matrix) for name in ("triton", "numpy")),
    ],
    ids=lambda names: names[-1],
)
def test_a_model_trains_and_generates_on_the_cpu_without(absent, tmp_path):
    run(TRAIN_WITHOUT.format(absent=absent, folder=str(tmp_path / "model")))


def test_core_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[>]", requirement)[0] for requirement in project["dependencies"]}
    assert names == {"torch", "triton", "safetensors", "huggingface_hub", "tokenizers", "einops"}
    assert all(project["optional-dependencies"].values())


@cache
def imports(file: Path) -> set[str]:
    """Full names of what a file imports from anywhere: at its top, inside functions, and for type checkers."""
    package = [PACKAGE.name, *file.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` and `from module import name` look alike; `module_of` tells them apart.
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def name_of(file: Path) -> str:
    """Name of a module below the package; a folder's is that of its ``__init__.py``, and the package's own is empty."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {name_of(file): file for file in FILES}


def module_of(imported: str) -> str:
    """The module of the package that an imported name is, or is in."""
    name = imported.removeprefix(PACKAGE.name).removeprefix(".")
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@cache
def imported_modules(module: str) -> set[str]:
    """The other modules of the package that a module imports."""
    names = [name for name in imports(MODULES[module]) if name.partition(".")[0] == PACKAGE.name]
    return {module_of(name) for name in names} - {module}


FACES = sorted(module for module, file in MODULES.items() if "import lazy_exports" in file.read_text())
"""The `__init__` of folders, which export names that other files define."""


def level_of(module: str) -> int:
    """The level in `LEVELS` of a module, by the longest entry that is the module or a folder around it."""
    part = module
    while part and part not in PLACES:
        part = part.rpartition(".")[0]
    assert part in PLACES, f"{module}: give it a level in LEVELS"
    return PLACES[part]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    for name in imports(MODULES[module]):
        taken = ("liger_kernel",) if module.startswith("hf.") else ("transformers", "liger_kernel")
        assert name.partition(".")[0] not in taken, f"{module} imports {name}"
    for other in imported_modules(module):
        assert level_of(other) <= level_of(module), f"{module} imports {other}, which is on a higher level"
        assert other not in FACES or other == "", f"{module} imports a face: name {other}'s file"


def test_no_circle_between_files():
    remaining = {module: imported_modules(module) for module in MODULES}
    while free := [module for module, others in remaining.items() if not others & remaining.keys()]:
        for module in free:
            del remaining[module]
    assert not remaining, f"modules that import each other, or such modules: {sorted(remaining)}"


def test_families_do_not_import_each_other():
    families = {
        module for module in MODULES if module.startswith("arch.") and module not in ("arch.auto", "arch.registry")
    }
    for module in families:
        own = module.split(".")[1]
        others = {each.split(".")[1] for each in imported_modules(module) & families}
        assert {each for each in others if not each.startswith("_")} <= {own}, f"{module} imports {others}"


def test_every_entry_of_the_table_is_a_module_or_a_folder():
    assert {""} | PLACES.keys() <= MODULES.keys()
    assert len(PLACES) == sum(map(len, LEVELS)), "a module has two levels"


@pytest.mark.parametrize("module", FACES)
def test_a_face_exports_what_type_checkers_see(module):
    face = importlib.import_module(f"{PACKAGE.name}.{module}".rstrip("."))
    seen = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.parse(MODULES[module].with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert seen
    assert sorted(seen) == face.__all__ == dir(face)
    for name, path in seen.items():
        home, _, attribute = path.rpartition(".")
        assert getattr(face, name) is getattr(importlib.import_module(home), attribute)
    with pytest.raises(AttributeError, match="It has: "):
        face.no_such_name  # noqa: B018


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, and of the wheel that is made of it, as `python -m build` makes them."""
    source, out = tmp_path_factory.mktemp("source") / "repository", tmp_path_factory.mktemp("dist")
    hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*_output", "results")
    shutil.copytree(ROOT, source, ignore=hidden)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.xdist_group("built")
@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    info = f"liger_models-{liger_models.__version__}.dist-info"
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    with zipfile.ZipFile(path) as wheel:
        package = {str(file.relative_to(ROOT)) for file in [*FILES, *RECIPES, *STUBS]} | {"liger_models/py.typed"}
        assert set(wheel.namelist()) == package | {f"{info}/{name}" for name in about}
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert b"liger-models = liger_models.cli:main" in wheel.read(f"{info}/entry_points.txt")
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert metadata["License-Expression"] == project["license"]
    assert metadata["Requires-Python"] == project["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == extras.keys()
    shipped = [Requirement(each) for each in metadata.get_all("Requires-Dist")]
    for extra, requirements in {"": [], **extras}.items():
        wanted = [Requirement(each) for each in [*project["dependencies"], *requirements]]
        got = [each for each in shipped if each.marker is None or each.marker.evaluate({"extra": extra})]
        assert {(r.name, str(r.specifier)) for r in got} == {(r.name, str(r.specifier)) for r in wanted}, extra


@pytest.mark.xdist_group("built")
@pytest.mark.slow
def test_the_sdist_holds_what_the_wheel_is_made_of(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {Path(*Path(file.name).parts[1:]) for file in sdist.getmembers() if file.isfile()}
    package = {file.relative_to(ROOT) for file in [*FILES, *RECIPES, *STUBS]} | {Path("liger_models/py.typed")}
    about = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert {name for name in names if ".egg-info" not in str(name)} == package | {Path(name) for name in about}
