"""The package is built from the bottom up: a module imports what stands before it, and nothing after it."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minilooped"

# From the model upwards. A new module goes where all that it imports stands before it.
ORDER = (
    "model", "modeling_minilooped", "toy", "provenance", "data", "shards", "checkpoint", "train", "presets", "plan",
    "export", "harness", "sweep", "probes", "ablation", "plots", "claims", "checks", "widgets", "cli",
)  # fmt: skip


def imports(path: Path, inside_functions: bool) -> set[str]:
    """The modules of the package, as their bare names, and the others' first names, that a module imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not inside_functions:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            names |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
    return names


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(path.stem for path in PACKAGE.glob("[!_]*.py"))


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_what_stands_before_it(module):
    own = imports(PACKAGE / f"{module}.py", inside_functions=False) & set(ORDER)
    assert own <= set(ORDER[: ORDER.index(module)])


def test_the_model_is_torch_and_the_standard_library():
    others = imports(PACKAGE / "model.py", inside_functions=True) - set(sys.stdlib_module_names)
    assert others == {"torch"}


@pytest.mark.parametrize("module", ORDER)
def test_the_package_needs_nothing_of_the_checkout(module):
    assert not imports(PACKAGE / f"{module}.py", inside_functions=True) & {"tests", "benchmarks", "notebooks"}
