# What the targets do: `make help`. They need Python 3.11+, make and a C library; the rest
# is installed into .venv. Another Python: make PYTHON=/path/to/python3.13 test

BIN := .venv/bin
LINKS := build/typing/kvalet
PIP := $(BIN)/python -m pip -qq --no-input
PYTHONS := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)

# Most tests, those with a real llama-server too, keep one core busy: one of them per core.
ALL_CORES := -n auto --dist worksteal

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# pyright would otherwise ask the network for a newer version of itself.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help dev demo test check fmt format-check lint imports typecheck covered bench sim docs \
	wheel clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

dev: .venv/.dev $(LINKS)/.linked ## make .venv with everything that development needs

demo: .venv/.demo ## four chats that outgrow the cache: a stock server, then kvalet
	@$(BIN)/kvalet demo

test: dev ## the whole test suite, a real llama-server included
	@$(BIN)/python -m pytest $(ALL_CORES)

check: format-check lint imports typecheck covered test ## all that must hold before a commit

fmt: dev ## format the code, mend what ruff can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

format-check: dev
	@echo "format"
	@$(BIN)/ruff format --check --quiet . || { echo "make fmt mends this" >&2; exit 1; }

lint: dev ## ruff
	@echo "lint"
	@$(BIN)/ruff check --quiet .

imports: dev
	@echo "import contracts"
	@PYTHONPATH=build/typing $(BIN)/lint-imports --no-logo

typecheck: dev ## mypy and pyright, strict
	@echo "mypy"
	@$(BIN)/mypy
	@$(BIN)/mypy tests conftest.py
	@echo "pyright"
	@$(BIN)/pyright

# Nothing of protocol/ goes unseen by its own tests.
covered: dev
	@echo "coverage of protocol/"
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -q tests/protocol
	@$(BIN)/coverage report --skip-covered --show-missing --fail-under=100

bench: .venv/.demo ## core, journal, relay and a lone chat, measured
	@$(BIN)/python -m kvalet.sims.bench

sim: ## simulated worlds
	@echo "make sim: worlds come with a later version of kvalet" >&2
	@exit 1

docs: dev ## write the generated documents
	@$(BIN)/python docs/generate.py

wheel: .venv/.made ## dist/kvalet-*.whl
	@rm -rf build/lib build/bdist.*
	@echo "building dist/"
	@$(PIP) wheel --no-deps --wheel-dir dist .

clean: ## remove what was generated; .venv stays
	rm -rf build dist *.egg-info .coverage .hypothesis .import_linter_cache
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	rm -rf __pycache__
	find actors protocol sims tests docs -name __pycache__ -prune -exec rm -rf {} +

# --- installing -----------------------------------------------------------------------------
# Stamps in .venv say what is there. While pip works, .made is called .busy: pip takes a package
# for installed as soon as its metadata is there, so what an interruption left is thrown away.

define install
	@mv .venv/.made .venv/.busy
	@trap 'exit 130' INT TERM; \
	$(PIP) install --editable $(1) || { mv .venv/.busy .venv/.made; exit 1; }
	@mv .venv/.busy .venv/.made
	@touch $@
endef

.venv/.made:
	@if [ -e .venv/.busy ]; then rm -rf .venv; fi
	@for python in $(PYTHONS); do \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		echo "installing .venv ($$($$python --version))"; \
		mkdir -p .venv && touch .venv/.busy && \
		$$python -m venv .venv && \
		$(PIP) install --upgrade 'pip>=25.1' && \
		mv .venv/.busy $@ && exit 0; \
		exit 1; \
	done; \
	echo "kvalet needs Python 3.11 or newer; looked at: $(PYTHONS)." >&2; \
	echo "Name one that fits: make PYTHON=/path/to/python3.13" >&2; \
	exit 1

.venv/.demo: .venv/.made pyproject.toml
	@echo "installing kvalet, a llama-server and a small model (some 300 MB the first time)"
	$(call install,'.[demo]')

.venv/.dev: .venv/.made pyproject.toml
	@echo "installing kvalet, its demo and the development tools (some 500 MB the first time)"
	$(call install,'.[demo]' --group dev)
	@touch .venv/.demo

# mypy and pyright read files, not import hooks: show them the tree that Python sees.
$(LINKS)/.linked: Makefile
	@mkdir -p $(LINKS)
	@for room in actors protocol sims; do ln -sfn ../../../$$room $(LINKS)/$$room; done
	@for file in __init__.py __main__.py testing.py; do \
		ln -sfn ../../../actors/public/$$file $(LINKS)/$$file; done
	@touch $@
