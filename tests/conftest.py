"""Settings shared by every test."""

import os

# One thread: sums are then added in the same order on every machine, so that "equal" can mean bit for bit.
# The variable is for the programs that tests start, the call for this process.
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402  (the variable is read when torch is imported)

torch.set_num_threads(1)
