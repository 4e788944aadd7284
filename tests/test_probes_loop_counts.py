"""Every probe that takes a loop count takes any integer, and refuses what is none in the model's own words."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from figures import LETTERS
from helpers import example
from small_models import moe

from minilooped.data.tasks import Task
from minilooped.science import probes

MODEL = moe(vocab_size=LETTERS.vocab_size).eval()
X, Y = (part.clamp_min(0) for part in example(MODEL.config))
DENSE = replace(MODEL.config, n_expert=0, router="shared")

# With one of the two arguments by which a probe is told how many loops.
PROBES = {
    "visits": lambda n: probes.visits(MODEL, X, n),
    "routing": lambda n: probes.routing(MODEL, X, n),
    "routing_and_inputs": lambda n: probes.routing_and_inputs(MODEL, X, n),
    "agreement": lambda n: probes.agreement(MODEL, X, n),
    "loss_after_each_loop": lambda n: probes.loss_after_each_loop(MODEL, [(X, Y)], n),
    "accuracy_by_loop": lambda n: probes.accuracy_by_loop(MODEL, Task(X, Y), n),
    "logit_lens": lambda n: probes.logit_lens(MODEL, X[0], Y[0], n),
    "early_exit": lambda n: probes.early_exit(MODEL, X, Y, 0.1, n_loop=n),
    "loop_dial": lambda n: probes.loop_dial(MODEL, LETTERS, [(X, Y)], [n], prompt="a", max_new_tokens=2),
    "norm_growth": lambda n: probes.norm_growth(DENSE, ["none"], [n], seeds=[0]),
    "growth_plane": lambda n: probes.growth_plane(DENSE, [1], [n]),
    "variance_over_loops": lambda n: probes.variance_over_loops(DENSE, [n], seeds=[0]),
}
OTHERS = {"distinct_by_chance"}  # a formula


def flat(value) -> list:
    """Everything in a result, in order."""
    if isinstance(value, torch.Tensor):
        return value.flatten().tolist()
    if isinstance(value, dict):
        return flat(list(value.values()))
    if hasattr(value, "__dataclass_fields__"):
        return flat(vars(value))
    return [part for one in value for part in flat(one)] if isinstance(value, list | tuple) else [value]


def test_every_probe_that_takes_a_loop_count_is_tried():
    functions = inspect.getmembers(probes, inspect.isfunction)
    taking = {name for name, probe in functions if {"n_loop", "n_loops"} & inspect.signature(probe).parameters.keys()}
    assert taking - OTHERS == PROBES.keys()


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("n_loop", [0, -1, 2.5, "two"])
def test_a_loop_count_that_cannot_be_is_refused_by_name(name, n_loop):
    with pytest.raises(ValueError, match="n_loop"):
        PROBES[name](n_loop)


@pytest.mark.parametrize("name", PROBES)
def test_any_integer_is_a_loop_count(name):
    assert flat(PROBES[name](np.int64(4))) == flat(PROBES[name](4))
