"""Wherever a model was trained, what looks at it asks where it lives, and sees the same numbers as on the CPU."""

import ast
import inspect
import json
import re
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MOE, tiny
from second_device import DEVICE, There, second_device

from minilooped import data, train
from minilooped.course import checks, widgets
from minilooped.data import CharTokenizer, load_corpus
from minilooped.data.tasks import Task
from minilooped.model import LoopedGPT
from minilooped.presets import PRESETS
from minilooped.science import probes, sweep
from minilooped.train import evaluate, loop_rms, sample

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
CONFIGS = {
    "dense": tiny(block_size=8, vocab_size=11),
    "four loops": tiny(block_size=8, vocab_size=11, n_loop=4),
    "experts": tiny(block_size=8, vocab_size=11, router="per_loop", router_init="independent", segment=2, **MOE),
}


def model_of(name: str) -> LoopedGPT:
    torch.manual_seed(0)
    return LoopedGPT(CONFIGS[name]).eval()


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(seed))


X, Y = tokens(1), tokens(2)
TOKENIZER = CharTokenizer("abcdefghijk")

# Every public function of the probes that takes a model, with tokens on the CPU.
PROBES = {
    "loop_dial": ("dense", lambda m: probes.loop_dial(m, TOKENIZER, [(X, Y)], (1, 4), prompt="a", max_new_tokens=4)),
    "loss_after_each_loop": ("dense", lambda m: probes.loss_after_each_loop(m, [(X, Y)], n_loop=4)),
    "accuracy_by_loop": ("dense", lambda m: probes.accuracy_by_loop(m, Task(X, Y))),
    "logit_lens": ("dense", lambda m: probes.logit_lens(m, X[0], Y[0])),
    "early_exit": ("dense", lambda m: probes.early_exit(m, X, Y, 0.1)),
    "visits": ("dense", lambda m: probes.visits(m, X)),
    "end_variance": ("dense", lambda m: probes.end_variance(m, X)),
    "kappa": ("dense", lambda m: probes.kappa(m, X)),
    "visit_gradients": ("dense", lambda m: probes.visit_gradients(m, X, lambda logits: logits.mean()[None])),
    "stream_gradients": ("dense", lambda m: probes.stream_gradients(m, X, Y)),
    "routing": ("experts", lambda m: probes.routing(m, X)),
    "routing_and_inputs": ("experts", lambda m: probes.routing_and_inputs(m, X)),
    "agreement": ("experts", lambda m: probes.agreement(m, X)),
    "swapped_routers": ("experts", lambda m: probes.swapped_routers(m, [(X, Y)])),
    "gradient_reach": ("experts", lambda m: probes.gradient_reach(m, X, Y)),
    "gradient_agreement": ("experts", lambda m: probes.gradient_agreement(m, X, Y, 1)),
    "batch_bytes": ("dense", lambda m: probes.batch_bytes(m, X, Y) >= 0),
    # And of the trainer's ways to look at a model.
    "evaluate": ("experts", lambda m: evaluate(m, [(X, Y)])),
    "sample": ("dense", lambda m: sample(m, TOKENIZER, "abc", max_new_tokens=5, temperature=0.0)),
    "loop_rms": ("dense", lambda m: loop_rms(m, X)),
}


def numbers(value) -> list[float]:
    """All numbers in a result, in order."""
    if isinstance(value, There):
        value = value.here
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if is_dataclass(value):
        return [n for field in fields(value) for n in numbers(getattr(value, field.name))]
    if isinstance(value, dict):
        return [n for part in value.values() for n in numbers(part)]
    if isinstance(value, list | tuple):
        return [n for part in value for n in numbers(part)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_finds_the_model_where_it_is(name):
    config, probe = PROBES[name]
    expected = probe(model_of(config))
    with second_device():
        found = probe(model_of(config).to(DEVICE))
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-4, abs=1e-6)
    if name not in ("visit_gradients", "routing_and_inputs"):  # these are for further work on the device
        assert not holds_device_tensors(found), "what is for plots comes back to the CPU"


def holds_device_tensors(value) -> bool:
    if is_dataclass(value):
        return any(holds_device_tensors(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, dict):
        return any(map(holds_device_tensors, value.values()))
    return any(map(holds_device_tensors, value)) if isinstance(value, list | tuple) else isinstance(value, There)


def test_every_probe_that_takes_a_model_is_tried():
    taking = {
        name
        for name, value in vars(probes).items()
        if next(iter(getattr(value, "__annotations__", {})), "") == "model"
        and value.__module__ != "minilooped.science.probes.running"  # what probes are made of
    }
    assert taking and taking <= PROBES.keys()


def test_the_second_device_refuses_to_mix():
    """The instrument itself: tokens that stayed on the CPU raise, as on a GPU, and so does NumPy."""
    with second_device():
        model = model_of("dense").to(DEVICE)
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            model(X)
        logits, _ = model(X.to(DEVICE))
        with pytest.raises(TypeError, match="Tensor.cpu"):
            logits.detach().numpy()
        with pytest.raises(TypeError, match="no float64"):
            logits.double()
        with pytest.raises(RuntimeError, match="same device"):
            X[X.to(DEVICE)]  # indices of the device into a tensor of the CPU
        with pytest.raises(RuntimeError, match="same device"):
            torch.stack([logits.mean(), torch.tensor(1.0)])  # joined, a number without dimensions may not mix either
        assert (
            torch.equal(logits[0][X[0]].cpu(), logits.cpu()[0][X[0]]) and (logits.mean() * torch.tensor(2.0)).isfinite()
        )
        assert logits.device == DEVICE and logits.cpu().device.type == "cpu"


DIALS = {"dial": torch.rand(2, 4)}  # recorded losses, (seeds, loops)
# Every widget that looks at models of the reader's.
DRAWS = {
    "draw_router_map": lambda models: widgets.draw_router_map(models, TOKENIZER, "model", "abca"),
    "draw_loops": lambda models: widgets.draw_loops(DIALS, models, TOKENIZER, "dial", "model", 2, "abcabca"),
    "router_map": lambda models: widgets.router_map(models, TOKENIZER, "abca"),
    "loop_lens": lambda models: widgets.loop_lens(DIALS, models, TOKENIZER, "abcabca"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_widget_finds_its_models_where_they_are(name, shown):
    DRAWS[name]({"model": model_of("experts")})
    with second_device():
        DRAWS[name]({"model": model_of("experts").to(DEVICE)})
    here, there = shown
    assert here.alt == there.alt and here.data == there.data


def test_every_widget_that_takes_models_is_tried():
    functions = inspect.getmembers(widgets, inspect.isfunction)
    assert {name for name, widget in functions if "models" in inspect.signature(widget).parameters} == DRAWS.keys()


def cells(chapter: int) -> dict[str, str]:
    """The code cells of a chapter, by id."""
    found = json.loads(NOTEBOOKS[chapter].read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in found if cell["cell_type"] == "code"}


# The cells, by number, in which a chapter looks at a model that it has trained, and those that they need.
LOOKING = {
    0: "01 03 05 07 08 10 12 16 18 20",
    6: "01 03 16 56",
    7: "01 22 24 27 27a",
    11: "01 03 04 08 11 14 16 18 19 21 23 27 28 29",
}


@pytest.fixture
def small_trainings_there(monkeypatch, tmp_path):
    """Whatever a chapter trains is trained on the second device: two steps, on a piece of the text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks.ch00_start_here, "pick_device", lambda: (DEVICE, "a test says so"))
    monkeypatch.setattr("minilooped.engine.machine.pick_device", lambda asked="auto": (DEVICE, "a test says so"))
    # Sizes are reckoned on torch's own "meta", whose name the second device has.
    monkeypatch.setattr(train, "refuse_what_cannot_fit", lambda *_: None)
    corpus = load_corpus("shakespeare")
    piece = replace(corpus, train=corpus.train[:20_000], val=corpus.val[:1_100])
    for module in (data, train, sweep):
        monkeypatch.setattr(module, "load_corpus", lambda *_: piece)
    whole_run, steps, whole_sample = train.train, train.training_steps, train.sample
    monkeypatch.setattr(train, "train", lambda model, config: whole_run(model, replace(config, max_steps=2)))
    monkeypatch.setattr(sweep, "training_steps", lambda *args, **options: islice(steps(*args, **options), 2))
    short = dict(max_new_tokens=3)
    for module in (train, probes.loops):
        monkeypatch.setattr(module, "sample", lambda *args, **options: whole_sample(*args, **options | short))


def with_imports(chapter: int) -> dict[str, Any]:
    """A namespace in which all import statements of the chapter have run."""
    space: dict[str, Any] = {}
    for code in cells(chapter).values():
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                exec(ast.unparse(statement), space)
    return space


class WithoutAsserts(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Pass:
        return ast.Pass()


@pytest.mark.parametrize("chapter", LOOKING)
def test_a_chapters_cells_run_where_its_models_are(chapter, small_trainings_there, shown):
    """On a GPU the first lesson was the first to break. What a cell asserts about losses takes a whole training."""
    with second_device():
        space = with_imports(chapter)
        for number in LOOKING[chapter].split():
            tree = WithoutAsserts().visit(ast.parse(cells(chapter)[f"cell-{number}"]))
            exec(compile(ast.fix_missing_locations(tree), f"{NOTEBOOKS[chapter].stem}, cell-{number}", "exec"), space)
    models = [space.get("model"), *space.get("models", {}).values(), space.get("fixed")]
    assert any(isinstance(model, LoopedGPT) and model.wte.weight.device == DEVICE for model in models)


def test_what_a_chapter_trains_names_its_device():
    """The numbers of the chapters, and the bounds that they assert, are those of a CPU."""
    assert all(PRESETS[name].train.device == "cpu" for name in ("shakespeare", "shakespeare-moe"))
    for chapter, path in enumerate(NOTEBOOKS):
        code = "\n".join(cells(chapter).values())
        if re.search(r"\bTrainConfig\(|minilooped train --preset", code):
            assert re.search(r"""device["']?[=:] ?["']cpu|--device cpu""", code), path.name


def test_no_cell_looks_for_files_beside_the_kernel():
    """The kernel of VS Code and of papermill starts in the root, that of JupyterLab beside the notebook."""
    for chapter, path in enumerate(NOTEBOOKS):
        for name, code in cells(chapter).items():
            assert not re.search(r"""["'](\.\.|data/|notebooks/)""", code), f"{path.name}, {name}"


RECORDED = [chapter for chapter in range(len(NOTEBOOKS)) if any("RESULTS" in code for code in cells(chapter).values())]


@pytest.mark.parametrize("chapter", RECORDED)
def test_recorded_results_are_found_wherever_a_kernel_starts(chapter, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    space, read = with_imports(chapter), 0
    for code in cells(chapter).values():
        for statement in ast.parse(code).body:
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            if isinstance(statement, ast.Assign) and names & {"RESULTS", "results"}:
                exec(ast.unparse(statement), space)
                read += 1
    assert read
