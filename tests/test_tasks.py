"""Tasks of several steps: against answers found by hand, and the baselines that need no thought."""

import itertools

import pytest
import torch

from minilooped.data import tasks
from minilooped.data.tasks import Task, baselines, cycle_hops, p_hop, permutations


def hop_by_hand(text: list[int], at: int, p: int) -> int | None:
    """The letter p jumps from position `at`, or None where there is no jump."""
    for _ in range(p):
        earlier = [i for i in range(at) if text[i] == text[at]]
        if not earlier:
            return None
        at = earlier[-1] + 1
    return text[at]


@pytest.mark.parametrize("letters, length, hops", [(4, 33, (1, 2, 4)), (3, 12, (3,)), (8, 40, (2, 5)), (4, 3, (1,))])
def test_p_hop_is_what_a_reader_with_a_finger_finds(letters, length, hops):
    (x, y), p = p_hop(40, length, hops, letters=letters, generator=torch.Generator().manual_seed(length))
    assert x.shape == y.shape == (40, length) and set(p.tolist()) == set(hops)
    for row, said, count in zip(x.tolist(), y.tolist(), p.tolist(), strict=True):
        text = row[1:]
        assert row[0] == letters + count and 0 <= min(text) and max(text) < letters
        assert all(a != b for a, b in itertools.pairwise(text)), "a letter follows itself"
        by_hand = [hop_by_hand(text, at, count) for at in range(len(text))]
        assert said == [-100] + [-100 if letter is None else letter for letter in by_hand]


def test_p_hop_uses_every_letter_evenly_and_depends_on_its_generator_alone():
    draw = [p_hop(500, 9, (1, 2), letters=5, generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(draw[0].x, draw[1].x) and not torch.equal(draw[0].x, draw[2].x)
    shares = [draw[0].x[:, 1:].flatten().bincount(minlength=5) / 4000, draw[0].x[:, 1].bincount(minlength=5) / 500]
    assert all((share - 0.2).abs().max() < 0.06 for share in shares)


def test_without_repeats_the_letter_just_read_is_no_answer_to_one_hop():
    """What handing out the letters freely would give away: they repeat once in four."""
    task, _ = p_hop(2000, 33, (1,), generator=torch.Generator().manual_seed(0))
    assert baselines(task)["repeat"] == 0 and baselines(task)["commonest"] < 0.28


@pytest.mark.parametrize("told", [None, 6])
@pytest.mark.parametrize(("things", "steps"), [(11, 1), (11, 4), (7, 6), (8, 4)])
def test_cycle_hops_are_those_of_a_finger_on_one_cycle(things, steps, told):
    task = cycle_hops(50, steps, things=things, told=told, generator=torch.Generator().manual_seed(1))
    assert task.x.shape == task.y.shape == (50, things + 1 + (told is not None))
    for x, y in zip(task.x.tolist(), task.y.tolist(), strict=True):
        at, seen = x[-1], {x[-1]}
        for hop in range(1, things + 1):
            at = x[at]  # the table is in the first places, and a thing is the number of its place
            seen.add(at)
            if hop == steps:
                assert y[-1] == at
        assert at == x[-1] and len(seen) == things  # one cycle through all of them
        assert y[:-1] == [-100] * (len(y) - 1)
        assert told is None or x[-2] == things + steps - 1


def test_the_start_is_no_answer_to_cycle_hops_and_a_guess_is_one_in_the_other_things():
    task = cycle_hops(4000, 3, things=5, generator=torch.Generator().manual_seed(0))
    assert (task.x[:, -1] != task.y[:, -1]).all()
    offset = (task.y[:, -1] - task.x[:, -1]) % 5
    assert offset.bincount()[1:].div(4000).sub(1 / 4).abs().max() < 0.03
    again = cycle_hops(4000, 3, things=5, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(task, again, strict=True))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_permutations_are_done_in_turn(n):
    x, y = permutations(30, 7, n=n, generator=torch.Generator().manual_seed(n))
    every = list(itertools.permutations(range(n)))
    assert x.max() < len(every) and (n == 5 or x.unique().numel() == len(every))
    for row, products in zip(x.tolist(), y.tolist(), strict=True):
        things = list(range(n))  # where each thing is now
        for token, product in zip(row, products, strict=True):
            things = [every[token][place] for place in things]
            assert tuple(things) == every[product]


def test_permutations_do_not_commute_and_depend_on_their_generator_alone():
    draw = [permutations(50, 4, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draw[0].y, draw[1].y) and not torch.equal(draw[0].x, draw[2].x)
    swap, turn = 1, 3  # of S3: (0, 2, 1) and (1, 2, 0)
    products = tasks._products(3)
    assert products[swap, turn] != products[turn, swap] and products[0].tolist() == list(range(6))


def test_baselines_are_shares_of_what_is_scored():
    x, y = torch.tensor([[7, 1, 2, 3]]), torch.tensor([[-100, 1, 1, 0]])
    assert baselines(Task(x, y)) == pytest.approx({"commonest": 2 / 3, "repeat": 1 / 3})


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: p_hop(1, 8, (1,), letters=2), "letters >= 3"),
        (lambda: p_hop(1, 8, (0, 1)), "hops >= 1"),
        (lambda: p_hop(1, 8, ()), "hops >= 1"),
        (lambda: p_hop(1, 2), "length >= 3"),
        (lambda: cycle_hops(1, 0), "0 < steps < things, .* not 0, 11"),
        (lambda: cycle_hops(1, 5, things=5), "not 5, 5"),
        (lambda: cycle_hops(1, 3, told=2), "told >= steps"),
        (lambda: permutations(1, 8, n=1), "n=1 must be from 2 to 6"),
        (lambda: permutations(1, 8, n=7), "n=7 must be from 2 to 6"),
    ],
)
def test_a_task_that_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
