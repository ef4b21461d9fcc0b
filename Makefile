# Two commands do everything: `make demo` and `make test`. Both set up a `.venv` here first, if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/peers
RUN := PYTHONWARNINGS=ignore::FutureWarning $(BIN)

.PHONY: demo test setup peers sync lint notebooks pytest export clean lab bench
.DEFAULT_GOAL := help

help:
	@echo "make demo | test | export | lint | clean | lab | bench"

$(READY): settings.ini setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[dev]"
	@touch $@

setup: $(READY)

# the tools before us, each in a folder of its own: what the tests compare with
$(PEERS)/fasterai-%: | $(READY)
	$(BIN)/python -m pip install -q --no-deps --target $@ fasterai==$*

peers: $(PEERS)/fasterai-0.3.2 $(PEERS)/fasterai-0.4.1

demo: $(READY)
	$(RUN)/python -c "from fasterai_sens.demo import print_demo; print_demo()"

test: sync lint notebooks pytest

sync: $(READY)
	$(RUN)/pytest -q tests/test_structure.py

lint: $(READY)
	$(BIN)/ruff check .

# each notebook in a process of its own, side by side, with one thread each
notebooks: $(READY)
	find nbs -name '*.ipynb' -not -path '*/.*' | sort | OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore::FutureWarning xargs -n 1 -P $$(getconf _NPROCESSORS_ONLN) $(BIN)/nbdev-test --timing

pytest: $(READY) peers
	OMP_NUM_THREADS=1 $(RUN)/pytest -q tests

bench: $(READY) peers
	for f in benchmarks/*.py; do $(RUN)/python $$f || exit 1; done

export: $(READY)
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean

lab: $(READY)
	$(BIN)/jupyter lab nbs/tutorials

clean:
	test ! -x $(BIN)/nbdev-clean || $(BIN)/nbdev-clean
	rm -rf demo_output build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
