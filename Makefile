# Two commands do everything: `make up` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help up setup model kernels test bench bench-cpu gpu-check chaos mutants lint format proto clean

help:  ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

up: setup  ## serve on 127.0.0.1:8000; options go into ARGS, as in: make up ARGS="--port 9000"
	@$(BIN)/twostroke up $(ARGS)

setup: $(VENV)/.installed  ## what `up` needs: virtual environment, default model, CPU kernels
	@$(MAKE) --no-print-directory --jobs 2 model kernels

model: $(VENV)/.installed
	@$(BIN)/python -m shared.models.fetch > /dev/null

kernels: $(VENV)/.kernels

test: setup $(VENV)/.installed-dev  ## run all tests
	@$(BIN)/python -m pytest $(ARGS)

bench: setup  ## measure a running server; options go into ARGS: make bench ARGS="--url http://host:8000"
	@$(BIN)/twostroke bench $(ARGS)

bench-cpu: setup  ## the same work on every engine of this machine, one after another
	@$(BIN)/twostroke bench compare $(ARGS)

gpu-check: setup $(VENV)/.installed-dev  ## test and measure the GPU kernels on this machine's GPU
	@$(BIN)/python -m bench.kernels.gpu_check

chaos: setup $(VENV)/.installed-dev  ## real processes under load and random faults; options go into ARGS
	@$(BIN)/python -m tests.chaos $(ARGS)

mutants: setup $(VENV)/.installed-mutants  ## small faults put into the code, one at a time: do the tests notice? takes hours
	@$(BIN)/python -m tests.mutants --out bench/reports/mutants.json $(ARGS)

lint: $(VENV)/.installed-dev  ## check style and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(VENV)/.installed-dev  ## bring all files into the common format
	@$(BIN)/ruff format

proto: $(VENV)/.installed-dev  ## regenerate shared/rpc from proto/
	@$(BIN)/python -m grpc_tools.protoc -I shared/rpc=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/*.proto

clean:  ## remove the virtual environment and all caches in this folder; the model stays in its cache folder
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A file in the environment marks each finished step; a step runs again when what it depends on is newer.

# Only spares loading torch to find them built: a worker whose kernels are not in the cache folder builds them.
$(VENV)/.kernels: $(VENV)/.installed $(wildcard $(addprefix shared/kernels/cpu/,*.cpp *.h *.py))
	@$(BIN)/python -m shared.kernels
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is too old or missing; Python 3.11 or newer is needed, name it with PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments; install its venv package (Debian: python3-venv)" >&2; exit 2; }
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone, at the one version: any other could bring gigabytes of another build with it.
$(VENV)/.installed: $(VENV)/.created constraints.txt pyproject.toml
	@echo "installing $(TORCH) (the largest part)"
	@$(PIP) install $(TORCH) --constraint constraints.txt
	@echo "installing twostroke and the other packages"
	@$(PIP) install --editable . --constraint constraints.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and checks need"
	@$(PIP) install --editable '.[dev]' --constraint constraints.txt
	@touch $@

$(VENV)/.installed-mutants: $(VENV)/.installed-dev
	@echo "installing what the mutation run needs"
	@$(PIP) install --editable '.[mutants]' --constraint constraints.txt
	@touch $@
