# One entry for people and CI. `make test` on a fresh clone does all its set-up.
SHELL := /bin/bash
PYTHON ?= python3
# Which tests `make test` runs; without the slow ones: make test MARKS='not gpu and not slow'
MARKS ?= not gpu
BIN := .venv/bin
STAMP := .venv/.installed

# Torch's waiting threads spin by default, which slows every process on a shared machine down.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: venv demo test lint fmt types checks bench gpu peers clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Its options go into ARGS: make demo ARGS='--out runs/demo --seed 1'
demo: $(STAMP)
	$(BIN)/treering demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "$(MARKS)" tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

checks: test lint types

bench: $(STAMP)
	$(BIN)/treering bench tree --only star,two_level,caterpillar,partitions
	$(BIN)/treering bench engine

# Runs in the python3 of a CUDA machine, which has torch, transformers, numba, jaxtyping and pytest, and where nothing
# else can be installed: so no beartype (addopts), and no tests of what needs pydantic.
gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -o addopts= -ra --strict-markers --import-mode=importlib \
	  --ignore=tests/test_config.py --ignore=tests/test_config_rl.py --ignore=tests/cli -m gpu tests
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu

# Other projects that benchmarks compare with, apart from ours so that neither bends the other's versions.
peers: .venv-peers/.installed

.venv-peers/.installed: benchmarks/peers/constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c $< prefix_grouper torch transformers
	touch $@

clean:
	rm -rf .venv .venv-peers .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
