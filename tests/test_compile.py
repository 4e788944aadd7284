"""Compiled blocks."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny_runs import DENSE, settings
from torch import nn

from minilooped.engine.checkpoint import load_checkpoint, load_model
from minilooped.model import Block, LoopedGPT
from minilooped.train import train


@pytest.fixture
def graphs(monkeypatch):
    """Compile without generating machine code; counts the graphs."""
    torch._dynamo.reset()
    graphs = Counter()

    def backend(graph, _):
        graphs["n"] += 1
        return graph.forward

    monkeypatch.setattr(Block, "compile", lambda block: nn.Module.compile(block, backend=backend))
    yield graphs
    torch._dynamo.reset()


def test_a_compiled_run_has_the_same_keys_and_goes_on_without_compiling_and_back(tmp_path, graphs):
    config = settings(tmp_path, max_steps=2, dtype="float32")
    run = train(DENSE, replace(config, compile=True)).run
    assert graphs["n"] > 0
    _, _, weights, _ = load_checkpoint(run)
    assert weights.keys() == LoopedGPT(replace(DENSE, vocab_size=21)).state_dict().keys()
    load_model(run)
    train(DENSE, replace(config, max_steps=4), resume=True)
    compiled = train(DENSE, replace(config, max_steps=6, compile=True), resume=True)
    eager = train(DENSE, replace(config, max_steps=6, name="eager"))
    assert compiled.step == 6 and compiled.val_loss == pytest.approx(eager.val_loss, abs=0.2)


@pytest.mark.parametrize("n_loop", [1, 8, 64])
def test_one_graph_serves_all_loops_and_layers(tmp_path, graphs, n_loop):
    config = settings(tmp_path, max_steps=2, eval_every=1, eval_batches=1, dtype="float32", compile=True)
    train(replace(DENSE, n_loop=n_loop), config)
    assert graphs["n"] == 1


def test_a_halved_micro_batch_is_compiled_for_its_own_size(tmp_path, monkeypatch, graphs):
    """Left to itself torch compiles the second size as any size, and does not compile the third."""
    run_loop = LoopedGPT.run_loop

    def small_device(model, h, *arguments):
        out = run_loop(model, h, *arguments)
        if torch.is_grad_enabled() and len(h) > 2:
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        return out

    monkeypatch.setattr(LoopedGPT, "run_loop", small_device)
    train(DENSE, settings(tmp_path, batch_size=8, max_steps=1, dtype="float32", compile=True))
    assert graphs["n"] == 3, "for 8 rows, 4 and 2"


@pytest.mark.parametrize("n_loop", [1, 5])
def test_compiled_and_eager_training_agree(tmp_path, graphs, n_loop):
    config = settings(tmp_path, max_steps=20, dtype="float32", eval_every=7, sample_every=9)
    model_config = replace(DENSE, n_loop=n_loop)
    compiled = train(model_config, replace(config, compile=True))
    assert graphs["n"] > 0
    eager = train(model_config, config)
    for a, b in zip(compiled.history, eager.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_where_compiling_fails_one_line_says_so_and_training_goes_on(tmp_path, capsys, monkeypatch):
    def no_compiler(graph, _):
        raise RuntimeError("no C++ compiler found")

    torch._dynamo.reset()
    monkeypatch.setattr(Block, "compile", lambda block: nn.Module.compile(block, backend=no_compiler))
    config = settings(tmp_path, max_steps=3)
    result = train(DENSE, replace(config, compile=True))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compile")]
    assert len(lines) == 1 and "failed, going on without it" in lines[0] and "no C++ compiler found" in lines[0]
    assert result.history[-1]["loss"] == train(DENSE, config).history[-1]["loss"]
    torch._dynamo.reset()
