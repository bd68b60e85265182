# The whole project from here. `make demo` and `make test` set themselves up from nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help ready demo test rig fuzz bench check format wheel clean

help:  ## this text
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  ARGS=... is handed on, for example: make test ARGS='-k volume'"

ready:  ## the environment: .venv, packages, the native module (instant when it is up to date)
	@$(PYTHON) scripts/ready.py

demo: ready  ## the whole job on this machine: target, volume, ingest, training, kills, resume, model, report
	@$(PYTHON) scripts/ready.py --run $(BIN)/headrace demo $(ARGS)

test: ready  ## every test but the kernel rig, Rust and Python, one summary
	-@$(BIN)/python scripts/environments.py frameworks
	@$(PYTHON) scripts/ready.py --run $(BIN)/python -m pytest $(ARGS)

rig: ready  ## the tests against a real Linux kernel (QEMU; Debian packages)
	@HEADRACE_RIG=1 $(PYTHON) scripts/ready.py --run $(BIN)/python -m pytest -m rig $(ARGS)

fuzz:  ## the receive paths under libFuzzer; ARGS='600 target_bytes' for seconds and targets
	@$(PYTHON) scripts/ready.py --run $(PYTHON) scripts/fuzz.py $(ARGS)

bench: ready  ## every figure, measured here
	@$(PYTHON) scripts/ready.py --run $(BIN)/python -m benchmarks all $(ARGS)

check: ready  ## lint, format, types, import rules, clippy, rustfmt
	@$(PYTHON) scripts/ready.py --run $(BIN)/python scripts/check.py $(ARGS)

format: ready  ## put Python and Rust into shape
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q . && $(PYTHON) scripts/ready.py --run cargo fmt --all

wheel: ready  ## dist/*.whl (abi3: one wheel for every CPython from 3.10)
	@$(PYTHON) scripts/ready.py --run $(BIN)/maturin build --release --out dist

clean:  ## remove what was built (.venv, target, caches)
	rm -rf $(VENV) .venv-* target dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f src/headrace/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
