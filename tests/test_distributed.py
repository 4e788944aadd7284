"""Several processes give the gradients of one."""

import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tiny_runs import DENSE, LOOM, children, settings
from torch import distributed

from minilooped import train as trainer
from minilooped.engine.checkpoint import find_run, load_checkpoint
from minilooped.engine.log import read_log
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.train import NextLoss, accumulate, evaluate, train, train_step

# In later segments of SEGMENTS the embedding takes no part, and experts' per-loop routers have a gradient in their own
# loop only.
SEGMENTS = replace(DENSE, n_loop=3, segment=1, tie_embeddings=False)
CONFIGS = {"dense": DENSE, "segments": SEGMENTS, "loom": LOOM}


def example(config: LoopedConfig) -> tuple[LoopedGPT, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A model and two micro-batches of four rows; dense ones with unequal numbers of targets in rows and batches."""
    torch.manual_seed(0)
    model = LoopedGPT(replace(config, vocab_size=11)).double()
    x, y = torch.randint(11, (2, 8, 8))
    if not config.n_expert:  # their auxiliary losses are means over all tokens, whether they have a target or not
        y[0], y[5, :3] = -100, -100
    return model, list(zip(x.split(4), y.split(4), strict=True))


def outcome(model: LoopedGPT, step_per_segment: bool, share: slice) -> dict:
    """What one step and one evaluation give, from this process's share of the rows."""
    _, batches = example(model.config)
    batches = [(x[share], y[share]) for x, y in batches]
    next_loss = NextLoss(model).parallel()
    losses = [loss.item() for loss in accumulate(next_loss, batches)]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = train_step(next_loss, optimizer, batches, step_per_segment=step_per_segment, grad_clip=0.5)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return dict(losses=losses, gradients=gradients, step=step, weights=weights, evaluation=evaluate(model, batches))


def stop_one(rank: int, folder: Path) -> int:
    """The step after which this process stops when the second one alone gets a signal in its fourth step."""
    rate = trainer.learning_rate

    def interrupted(step, config):
        if step == 3 and rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return rate(step, config)

    trainer.learning_rate = interrupted
    try:
        return trainer.train(DENSE, settings(folder)).step
    finally:
        trainer.learning_rate = rate


def work(rank: int, rendezvous: str, results: str):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found = {
        (name, per_segment): outcome(example(config)[0], per_segment, slice(rank, None, 2))
        for name, config in CONFIGS.items()
        for per_segment in (True, False)
    }
    found["stopped at"] = stop_one(rank, Path(results))
    torch.save(found, f"{results}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    settings(folder)  # writes the tokens
    processes = [children.Process(target=work, args=(r, str(folder / "rendezvous"), str(folder))) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("per_segment", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_equal_one_with_the_same_batch(two_processes, name, per_segment):
    alone = outcome(example(CONFIGS[name])[0], per_segment, slice(None))
    first, second = (found[name, per_segment] for found in two_processes)
    for key in ("gradients", "weights"):
        assert alone[key].keys() == first[key].keys()
        for parameter, value in alone[key].items():
            assert torch.equal(first[key][parameter], second[key][parameter]), "the processes stay together"
            torch.testing.assert_close(first[key][parameter], value, rtol=1e-9, atol=1e-12)
    for key in ("losses", "step", "evaluation"):
        assert first[key] == second[key] and first[key] == pytest.approx(alone[key], rel=1e-9)


def test_a_signal_to_one_process_stops_all_after_the_same_step(two_processes):
    assert [found["stopped at"] for found in two_processes] == [4, 4]


def test_torchrun_trains_as_one_process_does(tmp_path):
    config = settings(tmp_path, max_steps=6, eval_every=2, dtype="float32", name="alone")
    alone = train(DENSE, config)
    fields = asdict(DENSE) | asdict(config) | dict(name="two")
    options = []
    for name, value in fields.items():
        if isinstance(value, bool):
            options.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None and name != "vocab_size":
            options += [f"--{name}", str(value)]
    done = subprocess.run(
        [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2 -m minilooped.cli train".split()]
        + options,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "threads  1 in each of 2 processes" in done.stdout
    assert done.stdout.count("validation loss about") == 2, "only one of them prints"
    assert done.stdout.splitlines()[-1] == f"validation loss {alone.val_loss:.3f}"
    run = find_run("two", config.runs)
    for one, two in zip(alone.history, read_log(run / "log.csv"), strict=True):
        for column, value in one.items():
            if column != "seconds" and value is not None:
                assert two[column] == pytest.approx(value, rel=1e-4), column
    for name, weight in load_checkpoint(alone.run).weights.items():
        torch.testing.assert_close(load_checkpoint(run).weights[name], weight, rtol=0, atol=1e-4)
    assert [path.name for path in run.parent.iterdir() if path.name.startswith("two")] == ["two"], "nor writes"
