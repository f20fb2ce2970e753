# make setup   an environment in .venv, once        make demo   a tiny model learns arithmetic, on any machine
# make test    the tests                            make lint   ruff and mypy
# make test-engines   tests with real vLLM, SGLang and LMDeploy, in environments that are built once (make test-vllm: one)
# make clean   remove .venv and caches              PYTHON=python3.12 chooses the interpreter (3.11 or newer)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
TORCH := $(shell grep '^torch==' constraints.txt)
ENGINES := vllm sglang lmdeploy

.PHONY: help setup test test-engines $(ENGINES:%=test-%) lint demo clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,4s/^# //p' Makefile

setup: $(VENV)/.dev

test: $(VENV)/.dev
	$(BIN)/python -m pytest

ENGINE_TESTS ?= tests/engines
# Two at a time: starting one keeps a core busy. Their models are too small for more threads.
test-engines: $(VENV)/.dev
	$(MAKE) --keep-going --jobs=2 --output-sync=target $(ENGINES:%=test-%)

$(ENGINES:%=test-%): test-%: $(VENV)/.dev
	OMP_NUM_THREADS=1 XTUNER_TEST_ENGINES=$* $(BIN)/python -m pytest $(ENGINE_TESTS) --durations=5

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: $(VENV)/.run
	$(BIN)/xtuner demo

# torch goes first and alone: without the constraints of the others, an index may offer its build for the CPU.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "xtuner needs Python 3.11 or newer; '$(PYTHON)' is not. Use: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and what else is needed, once: a minute or more for each of two commands without output."
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info build dist
	find xtuner tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
