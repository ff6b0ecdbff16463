# make help     what can be made
#
# PYTHON   the interpreter that makes the environment (Python 3.11)
# VENV     the environment; made and filled on first use
# LOGDIR   where `make quickstart` trains; run it again to go on there

PYTHON ?= python3
VENV ?= .venv
LOGDIR ?= runs/quickstart
BAZEL ?= bazel

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.lingvo_gshard
INSTALLED_TEST := $(VENV)/.lingvo_gshard_test
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

# Debian's bazel-bootstrap needs no network: what bazel would fetch stands in the packages
# bazel-platforms, bazel-rules-java and bazel-rules-proto, and in two stand-ins.
DEBIAN_RULES := /usr/share/bazel
ifneq ($(wildcard $(DEBIAN_RULES)/rules/java),)
BAZEL_FLAGS ?= \
  --override_repository=platforms=$(DEBIAN_RULES)/tools/platforms \
  --override_repository=rules_java=$(DEBIAN_RULES)/rules/java \
  --override_repository=rules_proto=$(DEBIAN_RULES)/rules/proto \
  --override_repository=rules_cc=$(CURDIR)/bazel/debian/rules_cc \
  --override_repository=remote_coverage_tools=$(CURDIR)/bazel/debian/remote_coverage_tools
endif

.PHONY: help quickstart install test test-all lint format bazel-test clean

help:
	@echo "make quickstart   install, train translation.quickstart, score it, translate a few lines"
	@echo "make install      install into $(VENV), with the versions of constraints.txt"
	@echo "make test         lint, then every test that takes seconds"
	@echo "make test-all     lint, then every test"
	@echo "make lint         ruff: mistakes and formatting"
	@echo "make format       let ruff mend both where it can"
	@echo "make bazel-test   the tests of make test, by bazel"
	@echo "make clean        remove what builds and tests left; runs/ and $(VENV) stay"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) LOGDIR=$(LOGDIR) BAZEL=$(BAZEL)"

quickstart: $(INSTALLED)
	$(BIN)/gshard-train --experiment=translation.quickstart --logdir=$(LOGDIR)
	$(BIN)/gshard-evaluate --logdir=$(LOGDIR)
	printf '%s\n' \
	  "No se pudo guardar el archivo." \
	  "Vous devez saisir un mot de passe." \
	  "Die Liste der Benutzer ist leer." \
	  "Seleziona una lingua dal menu." \
	  | $(BIN)/gshard-translate --logdir=$(LOGDIR)

install: $(INSTALLED)

test: lint
	$(PYTEST)

# Of slow tests a process for each file: TensorFlow does not give back what it has lowered.
test-all: test
	@for file in $$(grep -rl slow tests --include='test_*.py'); do \
	  $(PYTEST) -m slow $$file || [ $$? = 5 ] || exit 1; \
	done

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED_TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bazel-test: $(INSTALLED_TEST)
	PATH="$(abspath $(BIN)):$$PATH" $(BAZEL) test $(BAZEL_FLAGS) //tests/...

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

$(INSTALLED): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "$(PYTHON) is older than Python 3.11; name another with PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), once; a few minutes ..."
	@$(PIP_INSTALL) -e .
	@touch $@

$(INSTALLED_TEST): $(INSTALLED)
	@$(PIP_INSTALL) -e ".[test]"
	@touch $@
