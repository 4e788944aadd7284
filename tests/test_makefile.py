"""The Makefile's own words: its help, and the files it names."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")


def variable(name: str) -> list[str]:
    (words,) = re.findall(rf"^{name} := (.*)$", MAKEFILE, re.MULTILINE)
    return words.split()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_help_shows_every_target():
    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    (targets,) = re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert re.findall(r"^make (\w+) +\S", said, re.MULTILINE) == targets.split()


@pytest.mark.parametrize("name", variable("QUICK"))
def test_what_is_tried_at_every_save_is_there(name):
    assert list((ROOT / "tests").glob(f"test_{name}.py"))
