"""What is installed, and how: a light import, files that agree with each other, a wheel that works on its own."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import minilooped

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
TEST = {r.name: r for r in map(Requirement, PROJECT["optional-dependencies"]["test"])}
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:]]


def run_python(code: str, **options) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---------------------------------------------------------------------------------------------------------------------
# The package's front door


def test_import_does_not_wait_for_torch():
    loaded = "import sys, minilooped; dir(minilooped); minilooped.__version__; print('torch' in sys.modules)"
    assert run_python(loaded) == "False"


def test_public_names_come_from_the_model_file():
    from minilooped import RULES, LoopedConfig, LoopedGPT, model

    assert (RULES, LoopedConfig, LoopedGPT) == (model.RULES, model.LoopedConfig, model.LoopedGPT)
    assert set(minilooped.__all__) <= set(dir(minilooped))
    with pytest.raises(AttributeError, match="no attribute 'LoopedGTP'"):
        minilooped.LoopedGTP  # noqa: B018


# ---------------------------------------------------------------------------------------------------------------------
# pyproject.toml gives ranges; constraints.txt and environment.yml have to agree with it


@pytest.mark.parametrize("name", [*CORE, *TEST])
def test_every_direct_dependency_has_a_lower_bound_and_a_pin_within_range(name):
    specifier = (CORE | TEST)[name].specifier
    assert [s.operator for s in specifier] == [">="], "ranges, so that the package installs beside others"
    pins = [pin for pin in PINS if pin.name == name]
    assert pins and all(specifier.contains(str(pin.specifier).removeprefix("==")) for pin in pins)


def test_the_extras_want_what_was_tested():
    for name, extra in PROJECT["optional-dependencies"].items():
        for requirement in map(Requirement, extra):
            assert requirement.name not in TEST or requirement.specifier == TEST[requirement.name].specifier, name


def test_pins_suit_every_platform():
    assert all([s.operator for s in pin.specifier] == ["=="] and "+" not in str(pin.specifier) for pin in PINS)
    assert not [pin.name for pin in PINS if pin.name.startswith(("nvidia", "cuda", "triton"))]


def test_environment_yml_agrees_with_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment.keys() == {"name", "channels", "dependencies"}
    assert environment["channels"] == ["conda-forge"]
    *conda, pip = environment["dependencies"]
    assert pip == {"pip": ["-e .[test]"]}, "minilooped itself, and what of its tests conda-forge may lack"

    lines = [re.fullmatch(r"(?P<name>[a-z0-9-]+)(?: >=(?P<version>\d+(\.\d+)*))?", line) for line in conda]
    assert all(lines), "each line is `name` or `name >=version`"
    pip_name = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    bounds = {pip_name.get(line["name"], line["name"]): line["version"] for line in lines}
    assert bounds.pop("pip") is None
    assert f">={bounds.pop('python')}" == PROJECT["requires-python"]
    known = {name: str(requirement.specifier) for name, requirement in (CORE | TEST).items()}
    assert {name: f">={version}" for name, version in bounds.items()}.items() <= known.items()
    assert CORE.keys() | {"nbval", "pytest", "pytest-xdist", "ruff", "mypy"} <= bounds.keys(), (
        "it can run the tests too"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Installing


EXPORT = """
from dataclasses import asdict
from pathlib import Path
from safetensors.torch import save_file
from torch import arange, save
from minilooped.engine.checkpoint import write_config
from minilooped.data import CharTokenizer
from minilooped.tools.export import export_hf
from minilooped.model import LoopedConfig, LoopedGPT

config = LoopedConfig(vocab_size=2, block_size=4, n_layer=1, n_loop=2, n_head=1, n_embd=2)
model, run = LoopedGPT(config), Path("run")
run.mkdir()
save_file(model.state_dict(), run / "model.safetensors")
write_config(run, {"model": asdict(config), "train": {}, "tokenizer": CharTokenizer("ab").spec()})
export_hf(run, "exported")
save(model(arange(2)[None])[0], "logits.pt")
"""
LOAD = """
import sys
from torch import arange, equal, load
from transformers import AutoModelForCausalLM

sys.modules["minilooped"] = None  # as where it is not installed
model = AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
print(equal(model(arange(2)[None]).logits, load("logits.pt")))
"""


def test_wheel_works_away_from_the_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 2_000_000
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    code = """
import minilooped.data as data
assert data.embedded("PROVENANCE.md").is_file()
print(data.__file__, data.embedded("shakespeare.txt"))
print(len(data.load_corpus().train), data.BPETokenizer().encode("Hello world").tolist())
"""
    environment = os.environ | {"PYTHONPATH": str(site), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    out = run_python(code, cwd=tmp_path, env=environment)
    package = site / "minilooped"
    assert out.splitlines() == [
        f"{package / 'data' / '__init__.py'} {package / 'embedded' / 'shakespeare.txt'}",
        "1070164 [15496, 995]",
    ]
    run_python(EXPORT, cwd=tmp_path, env=environment)
    assert run_python(LOAD, cwd=tmp_path, env=environment) == "True"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "#!/bin/sh\n[ $1 = --version ] && echo Python 3.10.12\nexit 1\n",
            "needs Python 3.11 or newer; .* is Python 3.10.12",
        ),
        (None, "No .*old-python found. Try: make PYTHON=python3.12 lab"),
    ],
)
def test_make_says_which_python_it_needs(tmp_path, script, message):
    python = tmp_path / "old-python"
    if script:
        python.write_text(script, encoding="utf-8")
        python.chmod(0o755)
    command = ["make", "lab", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode != 0 and re.search(message, done.stdout)
    assert not (tmp_path / "venv").exists()


def test_version_is_a_release():
    assert not Version(minilooped.__version__).is_prerelease
