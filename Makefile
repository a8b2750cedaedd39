# Two commands do everything: `make serve` and `make test`. Each prepares its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=15
SYSTEM := tests/e2e tests/faults
BENCH := tests/bench tests/scripts

.PHONY: serve chat test test-system test-parts test-bench lint style types bench soak clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

serve: $(READY)
	$(BIN)/disagg serve $(ARGS)

chat: $(READY)
	$(BIN)/disagg chat $(ARGS)

# Tests of the running system wait more than they compute. Without ARGS they run beside types and all
# other tests, which leave them the processors, so that they see a machine that is almost idle; one
# after another, as two Ray clusters that start at once disturb each other. Both end with their 15
# slowest tests. Those of `bench/` and `scripts/` are `make test-bench`.
ifeq ($(ARGS),)
test: style
	@began_s=$$(date +%s); \
	$(MAKE) --no-print-directory --keep-going --jobs=3 test-system test-parts types; status=$$?; \
	echo "make test: $$(($$(date +%s) - began_s)) s"; exit $$status
else
test: lint
	$(PYTEST) $(ARGS)
endif

# Shown when all have run: until then the dots on the terminal are those of the other tests.
test-system: $(READY)
	@$(PYTEST) $(SYSTEM) >$(VENV)/test-system.out 2>&1; status=$$?; \
	echo "$(SYSTEM):"; cat $(VENV)/test-system.out; exit $$status

test-parts: $(READY)
	nice -n 10 env $(PYTEST) $(SYSTEM:%=--ignore=%) $(BENCH:%=--ignore=%)

test-bench: $(READY)
	$(PYTEST) $(BENCH) $(ARGS)

lint: style types

style: $(READY)
	$(BIN)/ruff format --check disagg tests bench scripts
	$(BIN)/ruff check disagg tests bench scripts

types: $(READY)
	nice -n 10 $(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m bench $(ARGS)

soak: $(READY)
	$(BIN)/python -m bench.faults $(ARGS)

clean:
	rm -rf $(VENV)
