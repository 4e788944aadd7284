"""Student's t against its density, its closed forms and printed tables; the interval against what it promises."""

import math

import pytest
import torch

from minilooped.science.stats import interval, student


@pytest.mark.parametrize(
    ("n", "printed"), [(2, 12.706), (3, 4.303), (8, 2.365), (11, 2.228), (31, 2.042), (121, 1.980)]
)
def test_student_is_what_tables_print(n, printed):
    assert student(n) == pytest.approx(printed, abs=5.1e-4)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 10, 17, 64, 1000])
def test_the_density_of_t_has_95_percent_between_minus_student_and_student(n):
    x = torch.linspace(-student(n), student(n), 100_001, dtype=torch.float64)
    scale = math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2)) / ((n - 1) * math.pi) ** 0.5
    density = scale * (1 + x**2 / (n - 1)) ** (-n / 2)
    assert torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=1e-6)


def test_student_of_few_has_closed_forms_and_of_many_is_the_normals():
    assert student(2) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-9)  # one degree of freedom: Cauchy
    assert student(3) == pytest.approx(0.95 * (2 / (4 * 0.975 * 0.025)) ** 0.5, rel=1e-6)
    assert student(1000) == pytest.approx(1.959964 * (1 + (1.959964**2 + 1) / (4 * 999)), rel=1e-5)


def test_interval_by_hand():
    mean, half = interval(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert mean == 2 and half == pytest.approx(4.302653 / 3**0.5, rel=1e-6)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 20])
def test_of_100_intervals_95_hold_the_mean(n):
    """5,000 of Gaussian values; 0.95 to within four standard deviations of such a count."""
    drawn = 5 + 3 * torch.randn(5_000, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    found = torch.tensor([interval(values) for values in drawn], dtype=torch.float64)  # (trials, 2)
    covered = ((found[:, 0] - 5).abs() <= found[:, 1]).double().mean().item()
    assert covered == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 5_000) ** 0.5)


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_seeds_are_refused(n):
    with pytest.raises(ValueError, match=f"^an interval takes two seeds or more, not {n}: one value says nothing"):
        interval(torch.ones(n))
