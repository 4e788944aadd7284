"""Settings shared by every test."""

import os
import random

# One thread: sums are then added in the same order on every machine, so that "equal" can mean bit for bit.
# The variable is for the programs that tests start, the call for this process.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402  (reads the variable)
from torch import nn  # noqa: E402

from minilooped.model import LoopedGPT  # noqa: E402

torch.set_num_threads(1)

# The same examples in every run, so that a test passes or fails for everyone; no deadline, since machines are busy.
hypothesis.settings.register_profile("minilooped", derandomize=True, deadline=None)
hypothesis.settings.load_profile("minilooped")


@pytest.fixture
def dropout(monkeypatch):
    """A model that draws random numbers in training, torch's and Python's, as one with dropout does."""
    embed = LoopedGPT.embed

    def dropped(model, *args):
        if model.training:
            random.random()
        return nn.functional.dropout(embed(model, *args), 0.2, training=model.training)

    monkeypatch.setattr(LoopedGPT, "embed", dropped)


@pytest.fixture
def shown(monkeypatch):
    """The pictures that a notebook would show, in the order in which they come."""
    import matplotlib.pyplot as plt

    images = []
    monkeypatch.setattr("IPython.display.display", images.append)
    yield images
    assert plt.get_fignums() == [], "a figure stays open in pyplot"
