"""The exercises' checkers: the right answer passes; a wrong one is told what differs; a missing one does no harm."""

import math
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from answers import RIGHT, WRONG
from answers.ch00 import losses_by_loops
from answers.ch02 import all_into_the_first, first_flat, pairs
from answers.ch04 import slopes
from answers.ch09 import most_loops
from second_device import second_device
from torch.nn.functional import cross_entropy

from minilooped.course import checks
from minilooped.science import toy

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("[0-9]*.ipynb"))


@pytest.fixture
def printed(capsys: pytest.CaptureFixture) -> Callable[[], str]:
    return lambda: capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# installation


def test_installation_prints_versions_device_and_reasons(printed, monkeypatch):
    device = torch.device("cuda"), "torch sees a gold-plated GPU"
    monkeypatch.setattr(checks.ch00_start_here, "pick_device", lambda: device)
    monkeypatch.setattr(
        checks.ch00_start_here, "pick_dtype", lambda chosen: (torch.bfloat16, f"{chosen.type} likes it")
    )
    checks.installation()
    lines = dict(line.split(maxsplit=1) for line in printed().splitlines())
    for package in ("minilooped", "torch", "jupyterlab", "ipywidgets", "matplotlib"):
        assert lines[package] == version(package)
    assert lines["device"] == "cuda: torch sees a gold-plated GPU"
    assert lines["dtype"] == "bfloat16: cuda likes it"
    assert lines["threads"] == str(torch.get_num_threads())


def test_installation_works_on_this_machine(printed):
    checks.installation()
    assert re.search(r"^device +(cpu|cuda|mps): \w+", printed(), re.MULTILINE)


# ----------------------------------------------------------------------------------------------------------------------
# compare


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        ("4", 4, "expected a number, got str"),
        (True, 1, "expected a number, got bool"),
        (torch.tensor(4), 4, "expected a number, got Tensor"),
        (8, 4, r"8 is not right, it is off by \+4"),
        (-4, 4, r"-4 is not right, it is off by -8"),
        (4.001, 4, "4.001 is not right"),
        (math.inf, 4, "inf is not right"),
        (1234567, 7, "1,234,567 is not right"),
        ([1.0, 2.0], torch.ones(2), "expected a tensor, got list"),
        (torch.ones(3), torch.ones(2), r"expected shape torch.Size\(\[2\]\), got torch.Size\(\[3\]\)"),
        (torch.ones(2, dtype=torch.long), torch.ones(2), "expected dtype torch.float32, got torch.int64"),
        (torch.tensor([1.0, 1.5, 1.0, 0.0]), torch.ones(4), "50% of the values agree; the furthest is off by 1"),
        (torch.tensor([1.0, 1.001]), torch.ones(2), "50% of the values agree; the furthest is off by 0.001"),
        (torch.tensor([math.nan, 1.0]), torch.ones(2), "50% of the values agree"),
    ],
)
def test_compare_says_what_differs(answer, expected, message):
    with pytest.raises(AssertionError, match=f"^name: .*{message}"):
        checks.compare("name", answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"), [(4, 4), (4.0, 4), (1e6 + 1, 1e6), (torch.ones(2) + 1e-6, torch.ones(2))]
)
def test_compare_accepts_what_differs_by_rounding(answer, expected, printed):
    assert checks.compare("name", answer, expected)
    assert printed() == ""


def test_compare_needs_more_than_a_small_difference_when_asked_to():
    with pytest.raises(AssertionError):
        checks.compare("name", 1_000_001, 1_000_000, tolerance=0)


# ----------------------------------------------------------------------------------------------------------------------
# The exercises


def public_checkers() -> set:
    own = {
        value
        for name, value in vars(checks).items()
        if str(getattr(value, "__module__", "")).startswith(checks.__name__)
    }
    tools = {checks.installation, checks.compare, checks.exercise, checks.passed}
    return {f for f in own if f.__name__[0] != "_"} - tools


def test_every_checker_is_tested():
    assert public_checkers() == RIGHT.keys() == WRONG.keys()


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_right_answer_passes(checker, printed):
    checker(RIGHT[checker])
    assert printed() == f"{checker.__name__}: correct\n"


def test_a_checker_stands_in_the_file_of_the_chapter_that_asks_it():
    for path in NOTEBOOKS:
        source = path.read_text(encoding="utf-8")
        for name in re.findall(r'"exercise".*?checks\.(\w+)\(', source, re.DOTALL):
            assert re.search(r"\.ch(\d\d)", getattr(checks, name).__module__)[1] == path.name[:2], name


# What a checker hands to an answer is called as readers may call it: by keyword, with integers of any kind, with
# numbers that are tensors.
CALLS = {
    "run_loop by keyword": (
        checks.loss_after_every_loop,
        lambda *a: losses_by_loops(*a, lambda model, h, loop, x0: model.run_loop(h=h, x0=x0, loop=loop)),
    ),
    "run_loop with some keywords": (
        checks.loss_after_every_loop,
        lambda *a: losses_by_loops(*a, lambda model, h, loop, x0: model.run_loop(h, loop=loop, x0=x0)),
    ),
    "run_loop with NumPy's integers": (
        checks.drawn_loss,
        lambda *a: losses_by_loops(*a, lambda model, h, loop, x0: model.run_loop(h, np.int64(loop), x0)).mean(),
    ),
    "final_norm by keyword": (
        checks.bounded_alpha,
        lambda final_norm: first_flat(lambda N, alpha: final_norm(alpha=alpha, N=N)),
    ),
    "final_norm with whole numbers": (
        checks.bounded_alpha,
        lambda final_norm: first_flat(
            lambda N, alpha: final_norm(np.int64(N), int(alpha) if alpha == int(alpha) else alpha)
        ),
    ),
    "final_norm with tensors": (
        checks.bounded_alpha,
        lambda final_norm: first_flat(lambda N, alpha: final_norm(torch.tensor(N), torch.tensor(alpha))),
    ),
    "branch by keyword": (checks.branch_exponents, lambda f: slopes(lambda L, N: f(n_loop=N, n_layer=L), 3)),
    "branch with NumPy's integers": (checks.branch_exponents, lambda f: slopes(lambda *a: f(*map(np.int64, a)), 3)),
    "branch with tensors": (checks.branch_exponents, lambda f: slopes(lambda *a: f(*map(torch.tensor, a)), 3)),
    "held by keyword": (checks.longest_segment, lambda held, *a: most_loops(lambda n: held(n=n), *a)),
    "held with NumPy's integers": (
        checks.longest_segment,
        lambda held, *a: most_loops(lambda n: held(np.int32(n)), *a),
    ),
    "held with tensors": (
        checks.longest_segment,
        lambda held, *a: most_loops(lambda n: int(held(torch.tensor(n))), *a),
    ),
}


@pytest.mark.parametrize("style", CALLS)
def test_what_a_checker_hands_out_is_called_as_readers_call(style, printed):
    checker, answer = CALLS[style]
    checker(answer)
    assert printed() == f"{checker.__name__}: correct\n"


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_an_answer_may_lie_on_another_device(checker, printed):
    """A reader with a GPU may have computed it there."""
    with second_device() as device:

        def answer(*given):
            found = RIGHT[checker](*given)
            there = isinstance(found, torch.Tensor) and found.dtype != torch.float64 and not found.requires_grad
            return found.to(device) if there else found

        checker(answer)
    assert printed() == f"{checker.__name__}: correct\n"


@pytest.mark.parametrize(
    ("W", "assumption"),
    [
        (lambda d: -torch.eye(d), "A1"),
        (pairs([[0.0, -1.0], [1.0, 0.0]]), "A1"),
        (lambda d: pairs([[-1.0, 1.0], [1.0, -1.0]])(d) / 2**0.5, "A3"),
        (lambda d: torch.full((d, d), 1 / d) - torch.eye(d), "A1"),  # from half of the starts the stream dies out, ...
        (lambda d: torch.full((d, d), 1 / d) - torch.eye(d), "A3"),  # ... and from the other half W no longer sees it
        (lambda d: -torch.diag(torch.arange(d) % 2 * 2**0.5), "A3"),
        (all_into_the_first, "A3"),  # its gain falls slowly, like N^-1/2
        (lambda d: all_into_the_first(d).T, "A3"),  # from some starts nothing moves at all
    ],
)
def test_theorem_can_be_broken_in_more_ways_than_one(W, assumption, printed):
    checks.break_the_theorem(lambda d: (W(d), assumption))
    assert printed() == "break_the_theorem: correct\n"


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_missing_answer_does_not_stop_the_notebook(checker, printed):
    checker(lambda *_: None)
    assert re.fullmatch(rf"{checker.__name__} .*: not answered yet\n", printed())


@pytest.mark.parametrize(
    ("checker", "mistake"),
    [(checker, mistake) for checker, mistakes in WRONG.items() for mistake in mistakes],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_wrong_answer_is_told_what_differs(checker, mistake, printed):
    answer, message = WRONG[checker][mistake]
    with pytest.raises(AssertionError, match=message) as error:
        checker(answer)
    assert str(error.value).startswith(checker.__name__)
    assert printed() == ""


@pytest.mark.parametrize(("n_layer", "n_loop"), [(1, 1), (4, 1), (1, 4), (3, 5)])
def test_fixup_gain_keeps_the_first_gradient_step_of_three_matrices(n_layer, n_loop):
    d, eta, gain = 256, 1e-4, RIGHT[checks.fixup_gain](n_layer, n_loop)
    torch.manual_seed(0)
    h0, wish = torch.randn(2, d, dtype=torch.float64)
    W_1, W_2 = gain * torch.randn(2, n_layer, d, d, dtype=torch.float64) * (2 / d) ** 0.5  # relu halves the square
    W_3 = torch.zeros(n_layer, d, d, dtype=torch.float64, requires_grad=True)

    def run(W_3):
        h = h0
        for _ in range(n_loop):
            for layer in range(n_layer):
                h = h + W_3[layer] @ torch.relu(W_2[layer] @ torch.relu(W_1[layer] @ h))
        return h

    (grad,) = torch.autograd.grad(run(W_3) @ wish / d, W_3)
    moved = toy.rms(run(W_3 - eta * grad) - h0) / eta
    # 0.3 at one block and one loop; by the law of large numbers |relu(W_2 relu(W_1 h))|^2 = gain^4 |h|^2
    assert moved.item() == pytest.approx(0.3**4 * (h0 @ h0 / d * toy.rms(wish)).item(), rel=0.25)


def test_a_number_is_a_number_whoever_made_it_and_nan_is_none():
    assert checks.compare("name", np.int64(4), 4) and checks.compare("name", np.float32(4), 4)
    for wrong, expected in ((float("nan"), 4), (1, 0), (29_999, 30_000)):
        with pytest.raises(AssertionError, match="is not right, it is off by"):
            checks.compare("name", wrong, expected, 0)


def test_losses_after_every_loop_take_one_pass_with_the_loops_own_numbers():
    def many_passes(model, idx, targets, n_loop):
        return torch.stack([model(idx, targets, n_loop=n)[1] for n in range(1, n_loop + 1)])

    def one_loop_again_and_again(model, idx, targets, n_loop):
        h, losses = model.embed(idx), []
        for _ in range(n_loop):
            h = model.run_loop(h, 0, h)[0]
            losses.append(cross_entropy(model.logits(h).flatten(0, 1), targets.flatten()))
        return torch.stack(losses)

    with pytest.raises(AssertionError, match="at n_loop=2|3 passes through the stack, and 2 are enough"):
        checks.loss_after_every_loop(many_passes)
    with pytest.raises(AssertionError, match="at n_loop=2"):
        checks.loss_after_every_loop(one_loop_again_and_again)


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_a_checker_leaves_the_readers_generator_alone(checker):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    checker(RIGHT[checker])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("checker", RIGHT, ids=lambda checker: checker.__name__)
def test_what_a_checker_draws_does_not_depend_on_the_readers_generators(checker, monkeypatch):
    """Nor does it set them: torch.manual_seed would set those of all GPUs."""

    def drawn(seed: int) -> list[str]:
        torch.default_generator.manual_seed(seed)
        given = []
        checker(lambda *args: given.append(repr([a for a in args if isinstance(a, torch.Tensor)])))
        return given

    monkeypatch.setattr(torch, "manual_seed", None)
    assert drawn(1) == drawn(2)


@pytest.mark.parametrize("checker", WRONG, ids=lambda checker: checker.__name__)
def test_a_wrong_answer_is_told_the_same_whenever_it_is_checked(checker):
    def told(answer) -> str:
        with pytest.raises(AssertionError) as error:
            checker(answer)
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.4g}", str(error.value))  # but for rounding

    for answer, _ in WRONG[checker].values():
        torch.manual_seed(1)
        first = told(answer)
        torch.manual_seed(2)
        assert told(answer) == first
