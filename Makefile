# Start with `make search` and `make test`; everything runs in .venv.
PYTHON ?= python3
# TORCH_INDEX picks the torch build ("Choosing the torch build" in README.md). If set, an installed torch is replaced.
TORCH_INDEX ?=
# Extras of pyproject.toml to add: `cuda` is what only NVIDIA GPUs use. Tests, lint and types add `dev` by themselves.
EXTRAS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

SEARCH ?= --model smollm2-135m --seq-len 128 --global-batch 4 --memory-limit 2GiB

.PHONY: install search test estimates replay results emulated-card test-rivals lint types clean anew

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

test: install $(DEV)
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

# The estimator's figures: its error against published and recorded runs, and its own running time.
estimates: install
	$(BIN)/python benchmarks/estimate_published.py
	$(BIN)/python benchmarks/estimate_cpu.py
	$(BIN)/python benchmarks/estimator_time.py

# Replays of search methods, ours and others', over the recorded tables. What only the others need is kept out of the
# environment: transformers imports SciPy if it is installed, and every trial would take more time and memory.
RIVALS := $(VENV)/rivals
REPLAY ?=

replay: $(RIVALS)
	PYTHONPATH=$(RIVALS) $(BIN)/autofit bench replay $(REPLAY)

# Writes benchmarks/RESULTS.md with its plots, the tables of many limits, of several workers and of drift (for
# benchmarks/README.md), and the picture in docs/search.md. Takes some ten minutes the first time; if interrupted, run it
# again to continue (the last three tables, a few minutes, begin anew). Optuna's Gaussian process for speed, which takes
# more than an hour, was run before.
# Tables of record_gpu_tables.sh, once there are any, are replayed under the limits of smaller cards, too: those below a
# table's own.
RECORDED := benchmarks/recorded
JUDGED := $(patsubst %,$(RECORDED)/%.jsonl,cpu-2c-smollm2-135m cpu-2c-pythia-160m cpu-zen5-2c-smollm2-135m \
	cpu-zen5-2c-gemma-3-270m cpu-zen5-2c-smollm2-360m cpu-zen5-2c-qwen2.5-0.5b)
GRID_LIMITS ?= 24GiB 40GiB 79GiB
GRIDS := $(foreach table,$(wildcard $(RECORDED)/*-grid-*.jsonl),--table $(table) $(GRID_LIMITS:%=--table $(table)@%))
RESULTS ?= $(foreach table,$(JUDGED),--table $(table) --table $(table)@25%) $(GRIDS) \
	--also $(RECORDED)/replay-gp.json --also $(RECORDED)/replay-gp-later.json

results: $(RIVALS)
	PYTHONPATH=$(RIVALS) $(BIN)/python benchmarks/replay_results.py $(RESULTS)
	$(BIN)/python benchmarks/replay_limits.py --out $(RECORDED)/replay-limits.json
	$(BIN)/python benchmarks/replay_workers.py --out $(RECORDED)/replay-workers.json
	$(BIN)/python benchmarks/replay_drift.py --out $(RECORDED)/replay-drift.json
	$(BIN)/python benchmarks/picture_of_a_search.py

# An NVIDIA card that is not there: the CUDA build of torch on an emulated driver (tests/emulated_card/README.md).
emulated-card: install $(DEV)
	$(BIN)/python tests/emulated_card/build.py --home $(VENV)/emulated-card

test-rivals: $(RIVALS) $(DEV)
	PYTHONPATH=$(RIVALS) $(BIN)/python -m pytest tests/unit/search/test_replay_rivals.py

$(RIVALS): constraints.txt | install
	$(PIP) install -q -c constraints.txt --no-deps --upgrade --target $@ scipy xgboost-cpu
	@touch $@

lint: install $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install $(DEV)
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
