"""How a step is divided into micro-batches and processes: what may not depend on it, and the one loss that does."""

import pytest
import torch
from helpers import LOOM_PARTS, MOE, build, gradients, tiny, tokens
from tiny_runs import children
from torch import Tensor, distributed

from minilooped.train import NextLoss, accumulate, rehearse, train_step

EXPERTS = {
    "moe": dict(MOE),
    "one expert per token": MOE | dict(top_k=1),
    "loom": dict(LOOM_PARTS, rule="loom", gate="sigmoid"),
    "loom in segments": dict(LOOM_PARTS, rule="loom", gate="sigmoid", segment=2),
    "recomputed": dict(LOOM_PARTS, rule="loom", segment=1, recompute_loops=True),
}
ROWS = 8


def model_of(balance: str, **changes):
    """A float64 model with heavy auxiliary losses; a bias would turn many choices over if it moved too early."""
    return build(tiny(**changes, balance=balance, balance_coef=0.25, z_coef=0.5), shaken=True)


def divided(model, rows: int) -> list[tuple[Tensor, Tensor]]:
    """One batch of 8 rows, in micro-batches of `rows`."""
    x, y = (tokens(model.config, batch=ROWS, seed=seed) for seed in (1, 2))
    return list(zip(x.split(rows), y.split(rows), strict=True))


def of_a_step(balance: str, rows: int, **changes) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of one batch, before any update."""
    model = model_of(balance, **changes)
    return [loss.item() for loss in accumulate(NextLoss(model), divided(model, rows))], gradients(model)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of two gradients, relative to the norm of each tensor."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / one[name].norm()).item() for name in one if one[name].any())


@pytest.mark.parametrize("kind", EXPERTS)
def test_one_and_eight_micro_batches_have_the_same_loss_and_gradient(kind):
    """With the selection bias and the z-loss on."""
    losses, grads = of_a_step("bias", ROWS, **EXPERTS[kind])
    for rows in (4, 1):
        losses_of_many, grads_of_many = of_a_step("bias", rows, **EXPERTS[kind])
        assert losses_of_many == pytest.approx(losses, rel=1e-12, abs=0)
        assert largest_difference(grads, grads_of_many) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("step_per_segment", [True, False])
@pytest.mark.parametrize("kind", EXPERTS)
def test_one_and_eight_micro_batches_move_weights_and_biases_alike(kind, step_per_segment):
    """Three steps: each update is followed by one move, whatever the number of micro-batches and segments."""
    states = []
    for rows in (ROWS, 1):
        model = model_of("bias", **EXPERTS[kind])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moves = 0
        for _ in range(3):
            step = train_step(NextLoss(model), optimizer, divided(model, rows), step_per_segment=step_per_segment)
            moves += step[2]
        states.append(model.state_dict())
        assert not any(block.mlp.router.collected.any() for block in model.blocks)
        # Every move is one step of balance_coef, up or down, or none.
        steps = torch.stack([block.mlp.router.bias for block in model.blocks]) / 0.25
        assert torch.equal(steps, steps.round()) and steps.any() and steps.abs().max() <= moves
    torch.testing.assert_close(states[1], states[0], rtol=1e-9, atol=1e-12)


def test_the_switch_loss_depends_a_little_on_the_division():
    """It is a product of two means over one forward's tokens. Loss and gradient change by less than 1 % here."""
    changes = MOE | dict(balance_coef=2e-3, z_coef=1e-3)
    results = []
    for rows in (ROWS, 1):
        model = build(tiny(**changes, balance="switch"), shaken=True)
        losses = [loss.item() for loss in accumulate(NextLoss(model), divided(model, rows))]
        results.append((losses[0], torch.cat([grad.flatten() for grad in gradients(model).values()])))
    (loss, grad), (loss_of_many, grad_of_many) = results
    assert 1e-7 < abs(loss_of_many / loss - 1) < 0.01
    assert 1e-5 < ((grad - grad_of_many).norm() / grad.norm()).item() < 0.01


def test_a_rehearsal_and_a_refused_update_leave_no_loads():
    model = model_of("bias", **MOE)
    batches = divided(model, 4)
    rehearse(NextLoss(model), batches)
    assert not any(block.mlp.router.collected.any() for block in model.blocks)
    with torch.no_grad():
        model.wte.weight[:] = torch.nan
    with pytest.raises(FloatingPointError):
        train_step(NextLoss(model), torch.optim.SGD(model.parameters(), lr=0.1), batches)
    assert not any(buffer.any() for block in model.blocks for buffer in block.mlp.router.buffers())


# -- two processes -----------------------------------------------------------------------------------------------------


def trained(rank: int = 0, world_size: int = 1) -> dict[str, Tensor]:
    """Weights and biases after three steps, from every `world_size`-th row of each micro-batch."""
    model = model_of("bias", **EXPERTS["loom in segments"])
    batches = [(x[rank::world_size], y[rank::world_size]) for x, y in divided(model, 4)]
    next_loss, optimizer = NextLoss(model).parallel(), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(next_loss, optimizer, batches, step_per_segment=True)
    return {name: value.clone() for name, value in model.state_dict().items()}


def work(rank: int, folder: str):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(trained(rank, 2), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_move_the_biases_as_one_does(tmp_path):
    processes = [children.Process(target=work, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    alone = trained()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in alone), "the processes stay together"
    torch.testing.assert_close(first, alone, rtol=1e-9, atol=1e-12)
    biases = [name for name in alone if name.endswith("router.bias")]
    assert any(alone[name].any() for name in biases) and all(torch.equal(alone[n], first[n]) for n in biases)
