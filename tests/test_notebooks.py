"""What holds for every chapter as it is stored. That it runs is for nbval to say: `make test`."""

import ast
import itertools
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mistune
import nbformat
import pytest

from minilooped.course import checks

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CHAPTERS = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
REFRESH = runpy.run_path(str(NOTEBOOKS / "refresh.py"))
MEGABYTE = 1_000_000
MAX_SECONDS = 120  # of CPU time, for one chapter

# "/home/someone" and "C:\\Users", but neither "tokens/s" nor a part of a URL; "<object at 0x7f61b2cbe980>".
MACHINE_DEPENDENT = r"(?<![\w.:/<])/\w[\w.-]*/\w|\b[A-Z]:\\|\b0x[0-9a-f]{6,}"


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def chapter(request) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown(notebook: nbformat.NotebookNode, kind: str) -> Iterator[dict[str, Any]]:
    """The parts of a kind (heading, link, image, block_html, ...) of all markdown cells, as mistune names them."""
    parse = mistune.create_markdown(renderer=None, plugins=["table"])

    def walk(tokens: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for token in tokens:
            if token["type"] == kind:
                yield token
            yield from walk(token.get("children", []))

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield from walk(parse(cell.source))


def text_of(token: dict[str, Any]) -> str:
    return token.get("raw", "") + "".join(map(text_of, token.get("children", [])))


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_there_are_chapters():
    assert CHAPTERS and CHAPTERS[0].stem == "00_start_here"


# ----------------------------------------------------------------------------------------------------------------------
# Stored outputs


def test_chapter_is_a_valid_notebook_of_less_than_a_megabyte(chapter, request):
    nbformat.validate(chapter)
    assert request.node.callspec.params["chapter"].stat().st_size < MEGABYTE


def test_outputs_are_those_of_one_run_from_top_to_bottom(chapter):
    cells = code_cells(chapter)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]


def test_nothing_is_stored_that_the_next_run_changes(chapter):
    assert "widgets" not in chapter.metadata
    assert not [cell.id for cell in chapter.cells if "execution" in cell.metadata]
    for cell in code_cells(chapter):
        for output in cell.outputs:
            texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if "image/" not in k)]
            found = re.search(MACHINE_DEPENDENT, "\n".join(map(str, texts)))
            assert not found, f"{cell.id} stores {found[0]!r}"
    as_stored = nbformat.writes(chapter)
    REFRESH["clean"](chapter)
    assert nbformat.writes(chapter) == as_stored, "store chapters with notebooks/refresh.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<Axes at 0x7f61b2cbe980>", True),
        ("saved /home/reader/runs", True),
        (r"saved C:\runs", True),
        ("runs/start-here", False),
        ("1/2 of 7,000 tokens/s, 0x1f", False),
        ("https://arxiv.org/abs/1807.03819", False),
        ("<b>a</b></p>", False),
    ],
)
def test_machine_dependent_text_is_recognised(text, found):
    assert bool(re.search(MACHINE_DEPENDENT, text)) == found


# ----------------------------------------------------------------------------------------------------------------------
# For those who listen, and those who follow links


def test_headings_descend_without_gaps_from_one_title(chapter):
    levels = [heading["attrs"]["level"] for heading in markdown(chapter, "heading")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels))


def test_every_picture_has_alt_text(chapter):
    for image in markdown(chapter, "image"):
        assert text_of(image).strip(), image["attrs"]["url"]
    for html in (*markdown(chapter, "block_html"), *markdown(chapter, "inline_html")):
        assert all(re.search(r'alt="[^"]', tag) for tag in re.findall(r"<img\b[^>]*>", html["raw"])), html["raw"]
    for cell in code_cells(chapter):
        for output in cell.outputs:
            for kind in output.get("data", {}):
                if kind.startswith("image/"):
                    assert output.metadata.get(kind, {}).get("alt"), f"{cell.id}: show figures with plots.show"


def test_links_lead_to_files_that_exist(chapter):
    for target in (*markdown(chapter, "link"), *markdown(chapter, "image")):
        path, _, _ = target["attrs"]["url"].partition("#")
        if path and not re.match(r"[a-z]+:", path):
            assert (NOTEBOOKS / path).exists(), path


def test_map_says_of_each_chapter_whether_it_is_there(chapter):
    for row in markdown(chapter, "table_row"):
        cells = [text_of(cell) for cell in row["children"]]
        for stem in (cell for cell in cells if re.fullmatch(r"\d\d_\w+", cell)):
            assert (NOTEBOOKS / f"{stem}.ipynb").exists() != ("to come" in cells), stem


# ----------------------------------------------------------------------------------------------------------------------
# Exercises


def exercises() -> Iterator[Any]:
    """Each exercise as its notebook and the index of its cell."""
    for path in CHAPTERS:
        notebook = nbformat.read(path, as_version=4)
        for i, cell in enumerate(notebook.cells):
            if "exercise" in cell.metadata.get("tags", []):
                yield pytest.param(notebook, i, id=f"{path.stem}-{cell.id}")


EXERCISES = list(exercises())


def imports_above(notebook: nbformat.NotebookNode, i: int) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    for cell in notebook.cells[:i]:
        if cell.cell_type == "code":
            for statement in ast.parse(cell.source).body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    exec(ast.unparse(statement), namespace)
    return namespace


def folded(cell: nbformat.NotebookNode) -> dict[str, str]:
    """What stands folded in a markdown cell, by its summary."""
    blocks = re.findall(r"<details><summary>(.*?)</summary>\n\n(.*?)\n\n</details>", cell.source, re.DOTALL)
    return {summary: text.strip() for summary, text in blocks}


def test_there_are_exercises_and_every_checker_has_one():
    calls = [notebook.cells[i].source.splitlines()[-1] for notebook, i in (exercise.values for exercise in EXERCISES)]
    used = [re.match(r"checks\.(\w+)\(", call)[1] for call in calls]
    own = [
        name
        for name, value in vars(checks).items()
        if str(getattr(value, "__module__", "")).startswith(checks.__name__)
    ]
    not_checkers = {"installation", "compare", "passed", "exercise"}
    assert sorted(used) == sorted(name for name in own if name[0] != "_" and name not in not_checkers)


@pytest.mark.parametrize(("notebook", "i"), EXERCISES)
def test_exercise_is_stored_unanswered_with_hint_and_solution(notebook, i):
    assert "not answered yet" in printed(notebook.cells[i])
    following = notebook.cells[i + 1]
    assert following.cell_type == "markdown"
    assert list(folded(following)) == ["Hint", "Solution"] and all(folded(following).values())


@pytest.mark.parametrize(("notebook", "i"), EXERCISES)
def test_solution_passes_its_check(notebook, i, capsys):
    question, check = ast.parse(notebook.cells[i].source).body
    (solution,) = re.findall(r"```python\n(.*?)```", folded(notebook.cells[i + 1])["Solution"], re.DOTALL)
    (answer,) = ast.parse(solution).body
    assert isinstance(question, ast.FunctionDef) and isinstance(answer, ast.FunctionDef)
    assert (answer.name, ast.dump(answer.args)) == (question.name, ast.dump(question.args))
    assert ast.unparse(check) == f"checks.{answer.name}({answer.name})"

    namespace = imports_above(notebook, i)
    exec(solution, namespace)
    exec(ast.unparse(check), namespace)
    assert capsys.readouterr().out == f"{answer.name}: correct\n"


# ----------------------------------------------------------------------------------------------------------------------
# refresh.py


def test_refresh_twice_stores_the_same_bytes_and_no_widget(tmp_path, capsys):
    path = tmp_path / "notebooks" / "00_short.ipynb"
    path.parent.mkdir()
    (tmp_path / "data").mkdir()
    cells = [
        nbformat.v4.new_markdown_cell("# A slider", id="a"),
        nbformat.v4.new_code_cell("import ipywidgets\nprint(6 * 7)\nipywidgets.IntSlider()", id="b"),
        nbformat.v4.new_code_cell("6 * 7", id="c", metadata={"tags": ["exercise"]}),
        nbformat.v4.new_code_cell("import time\nprint(1, flush=True)\ntime.sleep(0.5)\nprint(2)", id="d"),
        nbformat.v4.new_code_cell("from pathlib import Path\nPath('runs').mkdir()\nPath('../data').exists()", id="e"),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "my kernel of yesterday"}
    nbformat.write(notebook, path)

    REFRESH["refresh"](path)
    once = path.read_bytes()
    REFRESH["refresh"](path)
    assert path.read_bytes() == once
    assert "00_short.ipynb: " in capsys.readouterr().out

    stored = nbformat.read(path, as_version=4)
    assert stored.metadata.kernelspec.display_name == "Python 3" and "widgets" not in stored.metadata
    assert [cell.metadata for cell in stored.cells] == [{}, {}, {"tags": ["exercise"]}, {}, {}]
    assert printed(stored.cells[1]) == "42\n" and len(stored.cells[1].outputs) == 1
    assert stored.cells[2].outputs[0].data == {"text/plain": "42"}
    assert [output.text for output in stored.cells[3].outputs] == ["1\n2\n"]
    assert stored.cells[4].outputs[0].data == {"text/plain": "True"}
    assert [cell.execution_count for cell in code_cells(stored)] == [1, 2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "notebooks"] and list(path.parent.iterdir()) == [path]


def test_refresh_measures_what_the_kernel_computes(tmp_path):
    path = tmp_path / "00_short.ipynb"
    busy_then_asleep = "import time\nwhile time.process_time() < 2: pass\ntime.sleep(1.5)"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(busy_then_asleep)]), path)
    took = REFRESH["refresh"](path)
    assert took["cpu_seconds"] >= 2 and took["wall_seconds"] > took["cpu_seconds"] + 1


def test_no_chapter_computes_for_more_than_two_minutes():
    recorded = json.loads(REFRESH["TIMES"].read_text(encoding="utf-8"))["chapters"]
    assert all(0 < took["cpu_seconds"] <= MAX_SECONDS for took in recorded.values())


def test_refresh_leaves_the_notebook_alone_when_a_cell_fails(tmp_path):
    path = tmp_path / "00_short.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        REFRESH["refresh"](path)
    assert path.read_bytes() == before
