"""Provenance: the facts about the code and the machine that stand beside every recorded result."""

import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch

from minilooped.science import provenance as module
from minilooped.science.provenance import provenance


def test_provenance_names_the_gpu_its_cuda_and_its_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [provenance("")[name] for name in ("gpu", "cuda", "driver")] == [None, None, None]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [provenance("")[name] for name in ("gpu", "cuda", "driver")] == ["A card", "13.0", None]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.1\necho 580.1\n", encoding="utf-8")
    program.chmod(0o755)
    assert provenance("")["driver"] == "580.1"


# ----------------------------------------------------------------------------------------------------------------------
# The commit


@pytest.fixture
def checkout(tmp_path):
    """A git repository with this package's file in its place, and what reads the commit of that copy."""

    def git(*command: str) -> str:
        person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", *person, *command], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit_of_package() -> str | None:
        spec = spec_from_file_location("provenance_of_a_copy", copy)
        copied = module_from_spec(spec)
        spec.loader.exec_module(copied)
        return copied.provenance("this")["commit"]

    copy = tmp_path / "minilooped" / "science" / "provenance.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(module.__file__, copy)
    git("init", "-q")
    return tmp_path, git, commit_of_package


def test_the_commit_is_that_of_the_start_and_none_outside_a_checkout(tmp_path, monkeypatch):
    commit = provenance("this")["commit"]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert provenance("this")["commit"] == commit  # whatever this process has written since
    module._commit.cache_clear()
    try:
        assert provenance("this")["commit"] is None
    finally:
        module._commit.cache_clear()


def test_a_package_installed_inside_somebody_elses_repository_has_no_commit(checkout):
    folder, git, commit_of_package = checkout
    (folder / ".gitignore").write_text("minilooped/\n", encoding="utf-8")
    git("add", ".gitignore")
    git("commit", "-qm", "of the reader")
    assert commit_of_package() is None


def test_changed_code_is_marked_and_changed_results_are_not(checkout):
    folder, git, commit_of_package = checkout
    result, script = folder / "data" / "results" / "mine.json", folder / "benchmarks" / "mine.py"
    for path in (result, script):
        path.parent.mkdir(parents=True)
        path.write_text("{}", encoding="utf-8")
    git("add", ".")
    git("commit", "-qm", "of the package")
    commit = git("rev-parse", "--short", "HEAD")
    result.write_text("{1: 2}", encoding="utf-8")
    (folder / "mine.txt").touch()
    assert commit_of_package() == commit
    script.write_text("{1: 2}", encoding="utf-8")
    assert commit_of_package() == f"{commit}+"
