# Needs Python, pip and make. Each target installs what it needs first: nothing is done by hand.
PYTHON ?= python3
ARGS ?=
BENCH ?= linear_cross_entropy

VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
INSTALLED := $(VENV)/.installed
OLDEST_INSTALLED := $(OLDEST)/.installed
DOCS := .venv-docs
DOCS_INSTALLED := $(DOCS)/.installed
DOCS_EXTRA := import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

# One thread per test process: pytest-xdist starts one process per core.
PARALLEL := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST_FLAGS := -n auto --dist worksteal
QUICK := -m "not gpu and not interpreter and not slow and not all_models"
QUICK_TRITON := -m "interpreter and not slow"
# Runs the same code whatever the versions: CONTRIBUTING.md names it.
LEFT_OUT := $(addprefix --ignore=tests/,benchmarks cli estimate test_examples.py test_packaging.py)
# One step of the rows of Llama, Gemma and Qwen with their kinds of layers, Trainer, TRL and PEFT,
# the largest case of each kernel compiled, and some interpreted.
TORCH ?= torch
SMOKE := $(addprefix tests/,test_every_architecture.py test_images_and_sound.py \
	layers/test_decorated_forwards.py layers/test_lora.py layers/test_experts.py integrations/test_trainer.py \
	integrations/trl/test_sft.py kernels/test_compile_matrix.py kernels/test_launch.py)
SMOKE_TRITON := $(addprefix tests/kernels/test_,linear_cross_entropy.py rms_norm.py rotary.py gated.py)

.PHONY: help setup train test test-all test-gpu test-oldest test-oldest-ci test-newest check
.PHONY: release-check bench docs clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## make .venv with the pinned versions

train: setup ## train a small model patched and unpatched (ARGS="--model-type qwen3")
	$(VENV)/bin/python examples/train.py $(ARGS)

test: setup ## run the quick tests that need no GPU (ARGS="-k softcap")
	$(PARALLEL) $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK) $(ARGS)
	$(PARALLEL) TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK_TRITON) $(ARGS)

test-all: setup ## run every test that needs no GPU: before a release
	$(PARALLEL) $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) -m "not gpu and not interpreter" $(ARGS)
	$(PARALLEL) TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest $(PYTEST_FLAGS) -m interpreter $(ARGS)

test-gpu: setup ## run the tests that need a CUDA GPU, one at a time
	$(VENV)/bin/python -m pytest -m gpu $(ARGS)

test-oldest: $(OLDEST_INSTALLED) ## run the quick tests on the oldest supported versions
	$(PARALLEL) $(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK) $(ARGS)
	$(PARALLEL) TRITON_INTERPRET=1 $(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK_TRITON) $(ARGS)

test-oldest-ci: $(OLDEST_INSTALLED) ## run what may differ on them: no benchmarks, no examples
	$(PARALLEL) $(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK) $(LEFT_OUT) $(ARGS)
	$(PARALLEL) TRITON_INTERPRET=1 $(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK_TRITON) $(ARGS)

# Whatever is the newest at each run: no file says that an environment is up to date.
test-newest: ## run five minutes of tests on the newest versions (TORCH=torch==2.13.0 keeps that)
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install $(TORCH)
	$(NEWEST)/bin/python -m pip install -e '.[test,trl]'
	$(PARALLEL) $(NEWEST)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK) $(SMOKE) $(ARGS)
	$(PARALLEL) TRITON_INTERPRET=1 $(NEWEST)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK_TRITON) $(SMOKE_TRITON) $(ARGS)

check: setup ## formatting, lint, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

release-check: setup ## build sdist and wheel, install and run them in new environments
	$(VENV)/bin/python tests/release_check.py $(ARGS)

bench: setup ## time and memory beside peers (BENCH=training_step ARGS="--help")
	$(VENV)/bin/python -m benchmarks $(BENCH) $(ARGS)

docs: $(DOCS_INSTALLED) ## build the documentation in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

clean: ## remove the environments, builds and caches
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(DOCS) build dist site liger_patch.egg-info
	rm -rf .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"constraints.txt needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

$(OLDEST_INSTALLED): pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -c constraints-oldest.txt -e '.[test]'
	touch $@

# The extra alone: the site needs no PyTorch.
$(DOCS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -c constraints.txt $$($(DOCS)/bin/python -c '$(DOCS_EXTRA)')
	touch $@
