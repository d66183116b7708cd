"""The files of the benchmarks do not import each other in circles, counting imports inside functions."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported_names(file: Path) -> set[str]:
    """Full names of what a file imports, with relative imports resolved."""
    package = file.relative_to(ROOT).parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def test_no_circle_between_files():
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        graph[module] = set()
        for name in imported_names(file):
            while name and name not in modules:  # a name in a module, or another package's
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    assert len(graph) > 30
    assert sum(map(len, graph.values())) > 60
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
