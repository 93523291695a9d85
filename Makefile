# Start with `make search` and `make test`; everything runs in .venv.
PYTHON ?= python3
# TORCH_INDEX picks the torch build ("Choosing the torch build" in docs/install.md). If set, an installed torch is replaced.
TORCH_INDEX ?=
# Extras of pyproject.toml to add: `cuda` is what only NVIDIA GPUs use. Tests, lint and types add `dev` by themselves.
EXTRAS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

SEARCH ?= --model smollm2-135m --seq-len 128 --global-batch 4 --memory-limit 2GiB

.PHONY: install search test test-fast test-exports estimates replay results emulated-card test-rivals docs lint types \
	clean anew

# What is installed has a stamp, and each extra one of its own: those asked for later are added, and newer pins renew all.
INSTALLED := $(VENV)/.installed
comma := ,
EXTRA_STAMPS := $(sort $(wildcard $(INSTALLED)-*) $(patsubst %,$(INSTALLED)-%,$(subst $(comma), ,$(EXTRAS))))
DEV := $(INSTALLED)-dev
INSTALL := $(PIP) install -q -c constraints.txt -c constraints-cuda.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

install: $(INSTALLED) $(EXTRA_STAMPS)

$(INSTALLED): pyproject.toml constraints.txt constraints-cuda.txt $(if $(TORCH_INDEX),anew)
	@$(PYTHON) -c 'import sys; sys.exit("autofit needs Python 3.11 or later, and this is " + sys.version.split()[0] + "; set PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@# torch first and alone: its build determines what the other packages pull in. Its dependencies come with them from
	@# PyPI, because an index of torch builds lacks the pinned versions; it stays as an extra index for what only it has,
	@# such as ROCm's Triton.
	$(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX),--no-deps --force-reinstall --index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) -e .
	@touch $@

$(INSTALLED)-%: $(INSTALLED)
	$(INSTALL) -e '.[$*]'
	@touch $@

search: install
	$(BIN)/autofit search $(SEARCH)

# Four at a time keep two cores busy: some of their time goes into waiting.
test: install $(DEV)
	$(BIN)/python -m pytest -n 4 --no-loadscope-reorder

# Without what trains, starts programs, or searches for long.
test-fast: install $(DEV)
	$(BIN)/python -m pytest -n 2 -m "not slow" --durations=5

# The estimator's figures: its error against published and recorded runs, and its own running time. A missed target ends
# none of them.
estimates: install
	-$(BIN)/python benchmarks/published.py memory
	-$(BIN)/python benchmarks/published.py speeds
	-$(BIN)/python benchmarks/estimate_trials.py
	$(BIN)/python benchmarks/timings.py estimator

# Replays of search methods, ours and others', over the recorded tables. What only the others need is kept out of the
# environment: transformers imports SciPy if it is installed, and every trial would take more time and memory.
RIVALS := $(VENV)/rivals
REPLAY ?=

replay: $(RIVALS)
	PYTHONPATH=$(RIVALS) $(BIN)/autofit bench replay $(REPLAY)

# Writes the tables of benchmarks/RESULTS.md, and the picture docs/search.svg. Takes some ten minutes the
# first time; if interrupted, run it again to continue. Optuna's Gaussian process, which takes more than an hour, runs
# only if RESULTS='--methods optuna-gp' names it; the page keeps its figures.
RESULTS ?=

results: $(RIVALS)
	PYTHONPATH=$(RIVALS) $(BIN)/python benchmarks/replay.py $(RESULTS) --json benchmarks/recorded/replay-results.json \
		--page benchmarks/RESULTS.md
	$(BIN)/python benchmarks/replay.py --picture docs/search.svg

# An NVIDIA card that is not there: the CUDA build of torch on an emulated driver (tests/emulated_card/README.md).
emulated-card: install $(DEV)
	$(BIN)/python tests/emulated_card/build.py --home $(VENV)/emulated-card

test-rivals: $(RIVALS) $(DEV)
	PYTHONPATH=$(RIVALS) $(BIN)/python -m pytest tests/unit/bench/test_replay_rivals.py

# LLaMA-Factory and axolotl train as exported files say. Each has an environment of its own, because it needs other
# versions of our libraries; together they take minutes to install, and 5 GB with a build of torch for CPUs.
TRAINERS := $(VENV)/trainers
OWN_ENVIRONMENTS := tests/exports_in_own_environments
TRAINERS_PIP = $(@D)/bin/python -m pip --disable-pip-version-check install -q

test-exports: $(TRAINERS)/llamafactory/.installed $(TRAINERS)/axolotl/.installed $(DEV)
	TRAINERS_HOME=$(TRAINERS) $(BIN)/python -m pytest $(OWN_ENVIRONMENTS)

$(TRAINERS)/%/.installed: $(OWN_ENVIRONMENTS)/%.txt | install
	$(PYTHON) -m venv --clear $(@D)
	@# torch first, and what its build needs, as for ours.
	$(if $(TORCH_INDEX),$(TRAINERS_PIP) --no-deps --index-url $(TORCH_INDEX) "$$(grep '^torch==' $<)")
	$(TRAINERS_PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$(grep '^torch==' $<)"
	$(TRAINERS_PIP) --no-deps -r $<
	@touch $@

$(RIVALS): constraints.txt | install
	$(PIP) install -q -c constraints.txt --no-deps --upgrade --target $@ scipy
	@touch $@

# The documentation as a site in site/; a broken link fails. The variable silences Material's notice about a successor.
docs: install $(INSTALLED)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

lint: install $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install $(DEV)
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
