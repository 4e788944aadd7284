"""The package is built from the bottom up: a room imports what stands before it, and nothing after it."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import minilooped

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minilooped"

# As the package itself lists its rooms, folders and files. A new one goes where all that it imports stands before it.
ORDER = re.findall(r"^    (\w+)  ", minilooped.__doc__, re.MULTILINE)
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def dotted(path: Path) -> str:
    """minilooped/science/toy.py -> minilooped.science.toy"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# The docstring counts.
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 1000, 60

MODULES = {dotted(path) for path in FILES}


def imports(path: Path) -> set[str]:
    """What a file imports anywhere, inside its functions too: modules of the package by their dotted names, others by
    their first names. Imports for annotations alone count like all others."""
    package = dotted(path).split(".") if path.name == "__init__.py" else dotted(path).split(".")[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found = [f"{module}.{alias.name}" for alias in node.names]
            found = [name if name in MODULES else module for name in found]
        else:
            continue
        names |= {name if name.startswith("minilooped.") else name.partition(".")[0] for name in found}
    return names


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_file_and_folder_has_its_place():
    rooms = {path.stem for path in PACKAGE.glob("[!_]*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert sorted(ORDER) == sorted(rooms)


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_a_room_imports_only_what_stands_before_it(path):
    """Inside its functions too: an import that waits there still ties the two together."""
    own = room(dotted(path))
    needed = {room(name) for name in imports(path) if name.startswith("minilooped.")} - {own}
    assert needed <= set(ORDER[: ORDER.index(own)])


def test_there_is_no_circle():
    """Between files, inside the rooms too."""
    graph = {dotted(path): imports(path) & MODULES - {dotted(path)} for path in FILES}
    assert list(TopologicalSorter(graph).static_order())


def test_the_model_is_torch_and_the_standard_library():
    assert imports(PACKAGE / "model.py") - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_the_package_needs_nothing_of_the_checkout(path):
    assert not imports(path) & {"tests", "benchmarks", "notebooks"}


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_a_file_and_each_of_its_functions_can_be_read_at_one_go(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = [(function.end_lineno - function.lineno + 1, function.name) for function in functions]
    assert not [(lines, name) for lines, name in lengths if lines > MOST_LINES_OF_A_FUNCTION]


def test_no_benchmark_imports_another_that_imports_it():
    folder = ROOT / "benchmarks"
    scripts = {path.stem: imports(path) for path in folder.glob("*.py")}
    assert list(TopologicalSorter({name: needed & scripts.keys() for name, needed in scripts.items()}).static_order())


# Modules and names that notebooks, the README and recorded commands imported before the package had rooms.
BEFORE = {
    "ablation": "ARMS PARTS assembled interval",
    "checkpoint": "load_model",
    "claims": "CLAIMS",
    "checks": "installation",
    "data": "Task baselines cycle_hops eval_windows load_corpus p_hop permutations",
    "plan": "MEMORY_PARTS at_loops hours load_counts memory",
    "plots": "show",
    "probes": "visits",
    "stats": "interval",
    "sweep": "LanguageModel Regression Trial best curve grid load shift sweep",
    "toy": "growth",
    "train": "NextLoss PEAK_TFLOPS TrainConfig accumulate fit_micro_batch learning_rate loops_of_step train_step",
    "widgets": "loop_dial",
}


@pytest.mark.parametrize("module", BEFORE)
def test_an_older_notebook_finds_what_it_imports(module):
    names = {}
    exec(f"from minilooped.{module} import {', '.join(BEFORE[module].split())}\nfrom minilooped import {module}", names)
    here = minilooped.MOVED.get(module, module)
    assert names[module] is sys.modules[f"minilooped.{here}"]
