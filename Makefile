# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv when it needs to.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The docs tools print advertisements for their forks.
export DISABLE_MKDOCS_2_WARNING := true
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo vision tune-demo test quick check docs docs-tables kernels tests seconds faults mutants soak soak-elastic gpu-check matrix release url changelog \
	catalogue bench-bytes bench-controllers bench-network bench-advice bench-scaling clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 19

demo: $(VENV)/.demo ## train a language model with dense and compressed gradients, compare
	$(BIN)/python examples/language_model.py $(ARGS)

vision: $(VENV)/.demo ## train a small ResNet while a controller moves the level: ARGS="--controller accordion"
	$(BIN)/python examples/vision.py $(ARGS)

# Two processes share the studies. One thread each: the model is too small to share among threads.
TUNE_DEMO := OMP_NUM_THREADS=1 $(BIN)/python examples/tune_language_model.py configs/demo.yaml $(ARGS)
tune-demo: $(VENV)/.tune ## tune five methods by a study each, compare them fairly (15 minutes)
	@mkdir -p runs/tune
	@$(TUNE_DEMO) >runs/tune/second.log 2>&1 & second=$$!; $(TUNE_DEMO) && wait $$second

test: kernels ## everything that CI runs: check and docs beside the tests
	@$(MAKE) --no-print-directory check docs & beside=$$!; \
	  $(MAKE) --no-print-directory tests; tests=$$?; wait $$beside && exit $$tests

# Without processes, without the laws of every method, without tests that take seconds, and without
# a file that starts Python again and again.
QUICK := tests/units tests/structure --ignore tests/units/strategies/test_two_lightning_packages.py
quick: check ## check, then the tests of modules and of the sources, without processes (90 s): ARGS="-k topk"
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not processes and not nightly and not slow" $(QUICK) $(ARGS)

check: $(VENV)/.test ## linter, formatter, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.test ## build the site into site/, warnings are errors
	$(BIN)/mkdocs build --strict --quiet

TABLES := combinations compressors memories schemes start waits wire
docs-tables: $(VENV)/.test ## write docs/tables/ anew, from what the classes declare
	@mkdir -p docs/tables
	@for table in $(TABLES); do $(BIN)/python -m lightning_gc list $$table --markdown \
	  >docs/tables/$$table.part && mv docs/tables/$$table.part docs/tables/$$table.md || exit 1; done

kernels: $(VENV)/.test # else each process of the tests compiles them
	@$(BIN)/python -c "import tests.support.preload"

# A file's tests run in one process, which keeps what its fixtures have started. Two processes take
# files that compute, two others those that wait. Without bytecode each would compile our sources.
tests: export PYTHONDONTWRITEBYTECODE :=
tests: $(VENV)/.test ## pytest in two pools of two processes; choose with ARGS="-k topk"
	$(BIN)/python -m pytest -n 4 --dist loadfile $(ARGS)

seconds: ## run all tests, and write each file's seconds to tests/seconds.json, which orders them
	@$(MAKE) --no-print-directory tests ARGS=--record-seconds

faults: kernels ## plant deliberate faults, see which test finds each (24 minutes): ARGS="--only ID", ARGS=--list
	$(BIN)/python -m tests.faults.plant --jobs 2 $(ARGS)

mutants: kernels ## change the engine, codecs and roll everywhere, list changes that no test sees (hours): ARGS="lightning_gc.engine.*"
	$(PIP) install -q -c constraints.txt -e '.[mutants]'
	$(BIN)/mutmut run --max-children 2 $(ARGS)
	@mkdir -p runs
	$(BIN)/mutmut results | grep survived >runs/mutants-$$(date +%Y%m%d).txt || test $$? = 1

soak: $(VENV)/.test ## random runs, random faults, restarts (a round takes about 5 s): ARGS="--rounds 1000 --out soak.jsonl"
	$(BIN)/python -m tests.soak $(ARGS)

soak-elastic: $(VENV)/.test ## elastic runs with random faults, each replayed (300 rounds take 8 minutes): ARGS="--rounds 60 --islands 2"
	$(BIN)/python -m tests.soak.elastic $(ARGS)

gpu-check: $(VENV)/.test ## everything that needs a GPU, skipped without one; writes gpu-check.txt: ARGS="--only 1 7", ARGS="--loan 9"
	$(BIN)/python -m tests.gpu $(ARGS)

matrix: $(VENV)/.test ## the supported versions, or projects of others, one by one, as far as they can be installed here: ARGS="--only py311-tested-l", ARGS=--projects
	$(BIN)/python -m tests.matrix $(ARGS)

url: $(VENV)/.test ## write the repository's address of pyproject.toml into README, CITATION.cff and others
	@$(BIN)/python docs/repository_url.py

release: $(VENV)/.test ## source distribution and wheel into dist/, their metadata checked
	$(PIP) install -q -c constraints.txt -e '.[release]'
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

changelog: $(VENV)/.test ## collect changes/ into CHANGELOG.md, before a release: ARGS=--draft only prints
	$(PIP) install -q -c constraints.txt -e '.[release]'
	$(BIN)/towncrier build --yes $(ARGS)

catalogue: $(VENV)/.tune ## every method tuned by a study of its own, on three models (CPU hours): ARGS="--jobs 8 --only method=topk"
	$(BIN)/python benchmarks/papers/equal_budgets.py $(ARGS)

bench-bytes: $(VENV)/.test ## monitor against network interface (needs root and iproute2)
	$(BIN)/python benchmarks/true_bytes.py $(ARGS)

bench-controllers: $(VENV)/.demo ## examples/vision.py with four controllers, 3 seeds (10 minutes)
	$(BIN)/python benchmarks/controllers.py $(ARGS)

bench-network: $(VENV)/.test ## seconds per step on slow links, against DDP and torch's hooks (needs root and iproute2)
	$(BIN)/python benchmarks/network.py $(ARGS)

bench-advice: $(VENV)/.test ## can the advice be trusted (needs root and iproute2): ARGS="predict", "probe --workers 2 4" or "repeat"
	$(BIN)/python benchmarks/advice.py $(ARGS)

bench-scaling: $(VENV)/.test ## where each scheme stops paying, to 1,024 workers (5 minutes): ARGS="--shaped 100" needs root
	$(BIN)/python benchmarks/scaling.py $(ARGS)

clean: ## remove what was made
	rm -rf $(VENV) site build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lightning_gc needs Python 3.11 or later; name one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# torch first and by itself, so that nothing else chooses its build.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(PIP) install -q "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e '.[examples,fast]'
	@touch $@

$(VENV)/.tune: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e '.[examples,fast,tune]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e '.[lightning,examples,tune,docs,test]'
	@touch $@ $(VENV)/.demo $(VENV)/.tune
