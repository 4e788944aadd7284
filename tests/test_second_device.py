"""Wherever a model was trained, what looks at it asks where it lives, and sees the same numbers as on the CPU."""

import json
import re
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import MOE, tiny
from second_device import DEVICE, There, second_device

from minilooped.course import plots, widgets
from minilooped.data import CharTokenizer
from minilooped.data.tasks import Task
from minilooped.model import LoopedGPT
from minilooped.science import probes
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
        assert logits.device == DEVICE and logits.cpu().device.type == "cpu"


@pytest.mark.parametrize(
    "draw",
    [
        lambda models: widgets.draw_router_map(models, TOKENIZER, "model", "abca"),
        lambda models: widgets.draw_loops({"dial": torch.rand(2, 4)}, models, TOKENIZER, "dial", "model", 2, "abcabca"),
    ],
    ids=["router_map", "loop_lens"],
)
def test_a_widget_finds_its_models_where_they_are(draw, monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "show", lambda ax, alt: shown.append(alt))
    draw({"model": model_of("experts")})
    with second_device():
        draw({"model": model_of("experts").to(DEVICE)})
    assert shown[0] == shown[1]


def cell_with(chapter: int, text: str) -> str:
    cells = json.loads(NOTEBOOKS[chapter].read_text(encoding="utf-8"))["cells"]
    (found,) = ("".join(c["source"]) for c in cells if c["cell_type"] == "code" and text in "".join(c["source"]))
    return found


def test_the_first_lessons_loop_runs_where_its_model_is(capsys):
    """Chapter 0, the loop in four lines: on a GPU this cell was the first to break."""
    tokenizer = CharTokenizer("To be, rnt")  # ten of the model's eleven tokens
    with second_device():
        space = dict(torch=torch, model=model_of("dense").to(DEVICE), tokenizer=tokenizer)
        exec(cell_with(0, "h, _, _ = model.run_loop(h, loop, x0)").replace(", or not to be", ""), space)
    assert "stream (1," in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["h = x0 = fixed.eval().embed(idx[None])", "said = torch.stack([fixed.logits(h).argmax(-1)"],
    ids=["lens_by_hand", "letters_that_change"],
)
def test_the_cells_of_chapter_11_run_where_their_models_are(text, capsys):
    """What they print is the same on both devices; the assertions are about trained models, and left out."""
    code = re.sub(r"^assert (shares|min).*$", "", cell_with(11, text), flags=re.MULTILINE)
    task = SimpleNamespace(windows=[(tokens(i), tokens(i + 1)) for i in range(4)], corpus=SimpleNamespace())
    task.corpus.tokenizer = TOKENIZER
    printed = []
    for device in ("cpu", DEVICE):
        with second_device() if device == DEVICE else nullcontext():
            model = model_of("four loops").to(device)
            exec(code, dict(torch=torch, probes=probes, task=task, text="abcabcabc", fixed=model, live={"one": model}))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def code_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_looks_for_files_beside_itself(path):
    for code in code_cells(path):
        assert not re.search(r"""["']\.\.["'/]""", code), f"a kernel may start anywhere\n{code}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_chapter_trains_by_itself_is_on_a_device_that_it_names(path):
    """Its later cells have tokens on the CPU. Chapters 0 and 3 let the trainer choose, and ask the model."""
    cells = code_cells(path)
    if any("LanguageModel(" in code for code in cells):
        training = next(code for code in cells if "TrainConfig(" in code)
        assert re.search(r"""device["']?\s*[=:]\s*["']cpu["']""", training), training


def test_a_cell_finds_the_recorded_results_wherever_its_kernel_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "show", lambda ax, alt: None)
    exec(cell_with(3, 'RESULTS / "six_panels.json"'), dict(plots=plots))
    assert capsys.readouterr().out.startswith("python benchmarks/six_panels.py on 20")
