"""The package is built from the bottom up: a module imports what stands before it, and nothing after it."""

import ast
import re
import sys
from pathlib import Path

import pytest

import minilooped

ROOT = Path(__file__).parents[1]

# As the package itself lists them. A new module goes where all that it imports stands before it.
ORDER = re.findall(r"^    (\w+)  ", minilooped.__doc__, re.MULTILINE)


def imports(path: Path) -> set[str]:
    """The modules of the package, as their bare names, and the others' first names, that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.level or node.module == "minilooped"):
            names |= {node.module} if node.level and node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.removeprefix("minilooped.").partition(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
    return names


def of_package(module: str) -> set[str]:
    return imports(ROOT / "minilooped" / f"{module}.py")


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(path.stem for path in (ROOT / "minilooped").glob("[!_]*.py"))


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_what_stands_before_it(module):
    """Inside its functions too: an import that waits there still ties the two together."""
    assert of_package(module) & set(ORDER) <= set(ORDER[: ORDER.index(module)])


def test_the_model_is_torch_and_the_standard_library():
    assert of_package("model") - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize("module", ORDER)
def test_the_package_needs_nothing_of_the_checkout(module):
    assert not of_package(module) & {"tests", "benchmarks", "notebooks"}


def test_no_benchmark_imports_another_that_imports_it():
    scripts = {path.stem: imports(path) for path in (ROOT / "benchmarks").glob("*.py")}
    while free := [name for name, needed in scripts.items() if not needed & scripts.keys()]:
        for name in free:
            del scripts[name]
    assert not scripts
