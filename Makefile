# Two commands: `make demo` (set-up and the main job) and `make test` (set-up and tests).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := runs/demo

.PHONY: install demo test lint race clean

install: $(STAMP)

# The exact `torch==2.13.0` pin selects the CPU build where that is what the index offers; plain `torch` pulls CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "ratrain needs Python 3.11 or newer; set PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

# Prepare the corpus, plan, train on 4 processes, export, report, and let plain transformers use the result.
demo: install
	$(BIN)/ratrain train examples/demo.toml --out $(RUN) --resume never
	$(BIN)/ratrain export $(RUN) $(RUN)/export
	$(BIN)/ratrain report $(RUN)
	$(BIN)/python examples/complete.py $(RUN)/export

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

# RATrain against what people use today; needs root (network namespaces) and a quiet machine for an hour.
race: install
	$(BIN)/pip install --quiet --no-build-isolation -e '.[race]' || true
	$(BIN)/python benchmarks/peers.py --set lifecycle --set same-layout --set best-layout --repeat 3 --docs docs/benchmarks.md

clean:
	rm -rf $(VENV) runs
