# One short target per chore; CI calls the same ones. Every target prepares what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test install lint types unit soak bench format clean

run: install            ## train the main job on 4 local ranks
	$(BIN)/unisono train

test: lint types unit   ## everything CI runs

install: .venv/installed  ## everything in .venv, and the loops that have changed compiled
	$(BIN)/python -m unisono.run.loaded

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest

soak: install           ## 100,000 random calls on 4 ranks, every value checked (about 5 minutes)
	$(BIN)/python benchmarks/soak/soak.py

bench: install          ## measure every claim on this machine, write the records in benchmarks/ (about 20 minutes)
	$(BIN)/python benchmarks/speed_against_gloo/speed_against_gloo.py
	$(BIN)/python benchmarks/training_steps/training_steps.py
	$(BIN)/python benchmarks/call_budget/call_budget.py
	$(BIN)/python benchmarks/guard/guard.py --ways loops
	$(BIN)/python benchmarks/wake_up/wake_up.py
	$(BIN)/python benchmarks/many_ranks/many_ranks.py
	$(BIN)/python benchmarks/many_broadcasts/many_broadcasts.py
	$(BIN)/python benchmarks/pinning/pinning.py
	$(BIN)/python benchmarks/shared_tensors/shared_tensors.py 2

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
