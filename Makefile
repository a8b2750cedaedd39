# Two commands do everything: `make serve` and `make test`. Each prepares its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve chat test lint bench soak clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

serve: $(READY)
	$(BIN)/disagg serve $(ARGS)

chat: $(READY)
	$(BIN)/disagg chat $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check disagg tests bench scripts
	$(BIN)/ruff check disagg tests bench scripts
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m bench $(ARGS)

soak: $(READY)
	$(BIN)/python -m bench.faults $(ARGS)

clean:
	rm -rf $(VENV)
