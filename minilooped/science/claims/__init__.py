"""Every checkable statement of the papers, the function that measures it here, and what came out.

    minilooped claims                                    # those that take seconds
    minilooped claims P1-b P2-c                          # these
    minilooped claims --tier minutes --out data/results  # keep the results: claims.json, and the page claims.md

A claim says in advance in which band each of its quantities has to lie. Its verdict follows from the measurement by
`verdict` and is never written by hand. To add a claim, call `claim` in the file of its paper, below the function that
measures it, with a kind, and a band for each quantity that this function returns.

[1] On the Residual Scaling of Looped Transformers, arXiv 2606.18524. [2] DeepLoop, arXiv 2607.13491. [3] LOOM, Looping
Beyond Twice, arXiv 2610.01153. Letters as in model.py: L blocks, N loops, D = L * N; the papers' own differ.
"""

# Each of these enters its claims, in the order of the page.
from . import residual_scaling as residual_scaling  # isort: skip
from . import residual_scaling_training as residual_scaling_training  # isort: skip
from . import deeploop as deeploop  # isort: skip
from . import loom as loom  # isort: skip
from . import loom_training as loom_training  # isort: skip
from . import related as related  # isort: skip

from .claim import CLAIMS as CLAIMS
from .claim import DEPTHS as DEPTHS
from .claim import EXACT as EXACT
from .claim import FLAT as FLAT
from .claim import LINEAR as LINEAR
from .claim import MODEL as MODEL
from .claim import NOTHING as NOTHING
from .claim import ONE as ONE
from .claim import ROOT as ROOT
from .claim import SMALL as SMALL
from .claim import SMALL_MODEL as SMALL_MODEL
from .claim import Band as Band
from .claim import Claim as Claim
from .claim import Kind as Kind
from .claim import Measured as Measured
from .claim import Tier as Tier
from .claim import Verdict as Verdict
from .claim import at_most as at_most
from .claim import by_seed as by_seed
from .claim import exactly as exactly
from .claim import judged as judged
from .claim import over_seeds as over_seeds
from .claim import paired as paired
from .claim import shaped as shaped
from .claim import slope as slope
from .claim import verdict as verdict
from .ledger import PAPERS as PAPERS
from .ledger import Ledger as Ledger
from .ledger import Results as Results
from .ledger import counts as counts
from .ledger import lines as lines
from .ledger import load as load
from .ledger import page as page
from .ledger import record as record
from .ledger import report as report
from .ledger import select as select
from .ledger import summary as summary
from .ledger import worded as worded
from .registration import band_words as band_words
from .registration import registered as registered
