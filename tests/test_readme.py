"""What the README says is what the code does: its rule table, its example, its links and its commands."""

import json
import re
import statistics
from pathlib import Path

import pytest

from minilooped.model import RULES, LoopedConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_rule_table_is_the_rules_resolved_for_4_blocks_in_8_loops():
    rows = re.findall(r"^\| `(\w+)` \| .+? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    assert [name for name, *_ in rows] == list(RULES)
    for name, *numbers in rows:
        row = RULES[name](LoopedConfig(n_layer=4, n_loop=8))
        resolved = (row.skip, row.branch, row.init_gain, row.lr_factor)
        assert [float(number) for number in numbers] == pytest.approx(resolved, rel=5e-3), name


def test_nothing_is_left_to_fill_in():
    assert not re.findall(r"^[A-Z_]{4,}$", README, re.MULTILINE)


def test_the_recipe_table_is_the_recorded_result():
    rows = json.loads((ROOT / "data/results/recipe.json").read_text(encoding="utf-8"))["rows"]
    table = re.findall(r"^\| .+? \| ([\d,]+) \| (\d+) \| ([\d.]+) \(([\d., ]+)\) \|$", README, re.MULTILINE)
    for name, (parameters, steps, mean, each) in zip(("nanoGPT", "looped", "untied control"), table, strict=True):
        recorded = [row for row in rows if row["name"] == name]
        assert {f"{row['parameters']:,}" for row in recorded} == {parameters}
        assert {row["steps"] for row in recorded} == {int(steps)}
        assert [f"{row['loss']:.3f}" for row in recorded] == each.split(", ")
        assert f"{statistics.mean(row['loss'] for row in recorded):.3f}" == mean


def test_the_chapter_list_has_the_recorded_seconds_of_every_chapter():
    recorded = json.loads((ROOT / "data/results/chapters.json").read_text(encoding="utf-8"))["chapters"]
    table = re.findall(r"^\| \[(\w+)\]\(notebooks/\1\.ipynb\) \| .+ \| \d+ \| (\d+) \|$", README, re.MULTILINE)
    assert [stem for stem, _ in table] == sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    assert dict(table) == {stem: f"{took['cpu_seconds']:.0f}" for stem, took in recorded.items()}


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_links_to_files_lead_somewhere():
    links = re.findall(r"\]\(([^):]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert target in targets
    for script in re.findall(r"python (benchmarks/\w+\.py)", README):
        assert (ROOT / script).exists()
