# Needs Python >= 3.11, pip, git and make. Each target sets up what it uses, once, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# As many tests at a time as there are cores, and each of them on one: a second thread would only be in the way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses logical --maxprocesses 8
# What a change of the model, of its data or of what is measured on it breaks first.
QUICK := imports makefile model_* toy stats sweep provenance files texts tokenizers tasks storage corpus training_steps \
    train_settings

.PHONY: help train lab test quick lint constraints
.DEFAULT_GOAL := help

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(VENV)/.installed  ## train a small looped model on the embedded text, then sample from it
	$(BIN)/minilooped train

lab: $(VENV)/.installed  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks/00_start_here.ipynb

test: lint  ## lint, unit tests, and every notebook from top to bottom: all there is to pass
	$(PYTEST) --dist worksteal
	@# A worker takes whole notebooks, in their order: the longest chapter is the first.
	$(PYTEST) notebooks --nbval-lax --nbval-current-env --nbval-cell-timeout=300 --dist loadfile --no-loadscope-reorder

quick: $(VENV)/.installed-test  ## ruff, and the tests of model and data that take no time: for every save
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(PYTEST) --dist worksteal -p no:nbval -m 'not slow' $(QUICK:%=tests/test_%.py)

lint: $(VENV)/.installed-test  ## check code and notebooks with ruff, and the types of the package with mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The stamp files below make a second call install nothing; editing one of these two files installs again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.installed

# torch moves only by hand; it pins its own CUDA packages, which a CPU or Mac user must not get from here.
TORCH ?= 2.13.0
constraints: | $(BIN)/python  ## resolve constraints.txt again, to the newest releases for every platform
	$(BIN)/python -m pip install --disable-pip-version-check --quiet uv
	{ echo "# The exact versions that the Makefile installs and that the tests ran with. Made by: make constraints"; \
	  echo "torch==$(TORCH)" | $(BIN)/uv pip compile pyproject.toml --extra test --constraint - --universal \
	      --python-version 3.11 --quiet --no-header --no-annotate | grep -vE '^(nvidia|cuda|triton)-?'; \
	} > constraints.tmp && mv constraints.tmp constraints.txt

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) found. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "minilooped needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
