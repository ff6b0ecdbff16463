# make help     lists the targets
#
# PYTHON   the interpreter that creates the environment (Python 3.11 to 3.13)
# VENV     the environment; created on first use
# LOGDIR   the run directory of `make quickstart`; run it again to resume
# FILES    `make test` and `make test-slow` run the tests of these files and folders alone; CHANGED names a revision of git
#          instead, and means the files that differ from it
# VERSION  the version that `make release` releases
# SHARE    K/N: `make test-slow` runs each slow test whose name has the checksum K modulo N; without it
#          the number of commits chooses one of 240 parts, so that 240 commits in a row run every slow test
# MINUTES  after these many, `make test-slow` begins no further test
# FAULTS   number of faults of `make soak`; SEED is their seed, and that of `make soak-serve`

PYTHON ?= python3
VENV ?= .venv
LOGDIR ?= runs/quickstart
FAULTS ?= 200
SEED ?= 0
BAZEL ?= bazel

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.lingvo_gshard
INSTALLED_TEST := $(VENV)/.lingvo_gshard_test
INSTALLED_DOCS := $(VENV)/.lingvo_gshard_docs
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
# All tests in one process would fill its memory: TensorFlow never frees what it has lowered.
MODEL_TESTS := $(addprefix tests/,core dropless fine_tuning kernels layers long_inputs low_precision \
  optimizers pipeline published_layers sharding tasks training)
STEP_TESTS := $(addprefix tests/,cluster hlo inference local_updates planning profiling propagation \
  runtime services serving spmd_passes tracing verification)
OTHER_TESTS := tests $(addprefix --ignore=,$(MODEL_TESTS) $(STEP_TESTS))
SLOW_PARTS := 240
SHARE ?= $(shell expr $$(git rev-list --count HEAD 2>/dev/null || echo 0) % $(SLOW_PARTS))/$(SLOW_PARTS)
PARTS := "$(MODEL_TESTS)" "$(STEP_TESTS)" "$(OTHER_TESTS)"
SELECTION := $(if $(FILES),--belongs-to="$(FILES)") $(if $(CHANGED),--changed-since="$(CHANGED)")

# Debian's bazel-bootstrap works offline: the packages bazel-platforms, bazel-rules-java and
# bazel-rules-proto, and two stand-ins in bazel/debian, replace what bazel would download.
DEBIAN_RULES := /usr/share/bazel
ifneq ($(wildcard $(DEBIAN_RULES)/rules/java),)
BAZEL_FLAGS ?= \
  --override_repository=platforms=$(DEBIAN_RULES)/tools/platforms \
  --override_repository=rules_java=$(DEBIAN_RULES)/rules/java \
  --override_repository=rules_proto=$(DEBIAN_RULES)/rules/proto \
  --override_repository=rules_cc=$(CURDIR)/bazel/debian/rules_cc \
  --override_repository=remote_coverage_tools=$(CURDIR)/bazel/debian/remote_coverage_tools
endif

.PHONY: help quickstart install install-dev test test-slow test-all soak soak-serve soak-cluster lint format docs pictures release bazel-test clean

help:
	@echo "make quickstart   install, train translation.quickstart, score it, translate a few lines"
	@echo "make install      install into $(VENV), with the versions of constraints.txt"
	@echo "make install-dev  the same, with what tests, linting and committing need"
	@echo "make test         lint, then every test that takes seconds; FILES=\"lingvo_gshard/layers ...\": the"
	@echo "                  tests of these files; CHANGED=main: those of files that differ from main"
	@echo "make test-slow    a share of the slow tests; SHARE=3/200: the fourth of 200 parts; MINUTES=10: at most so long"
	@echo "make test-all     lint, then every test"
	@echo "make soak         trains under $(FAULTS) random faults, an hour; compares with a run without"
	@echo "make soak-serve   serves honest and hostile clients for 10 minutes; compares every answer"
	@echo "make soak-cluster trains on four hosts, which are network namespaces, under random faults, an hour; as root"
	@echo "make lint         ruff (mistakes, formatting) and basedpyright (types)"
	@echo "make format       let ruff fix what it can"
	@echo "make docs         the site in build/site, strict about links, without a network"
	@echo "make pictures     draw the pictures of the documentation that follow from the code"
	@echo "make release VERSION=0.2.0   date the changelog, set the version, build, check, commit and tag"
	@echo "make bazel-test   the tests of make test, by bazel"
	@echo "make clean        remove build and test outputs; keep runs/ and $(VENV)"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) LOGDIR=$(LOGDIR) FAULTS=$(FAULTS) SEED=$(SEED) BAZEL=$(BAZEL)"

quickstart: $(INSTALLED)
	$(BIN)/gshard-train --experiment=translation.quickstart --logdir=$(LOGDIR)
	$(BIN)/gshard-evaluate --logdir=$(LOGDIR)
	printf '%s\n' \
	  "No se pudo guardar el archivo." \
	  "Vous devez saisir un mot de passe." \
	  "Il file non esiste." \
	  "O dispositivo não está ligado." \
	  | $(BIN)/gshard-translate --logdir=$(LOGDIR)

install: $(INSTALLED)

install-dev: $(INSTALLED_TEST)
	@$(PIP_INSTALL) -e ".[dev]"

test: lint
	@failed=; for part in $(if $(FILES)$(CHANGED),"",$(PARTS)); do \
	  $(PYTEST) $$part $(SELECTION) || failed=1; \
	done; test -z "$$failed"

test-slow: $(INSTALLED_TEST)
	@$(PIP_INSTALL) -e ".[datasets]"
	$(PYTEST) -m slow --failed-first --slow-share=$(SHARE) $(if $(MINUTES),--slow-minutes=$(MINUTES)) $(SELECTION)

# One process per file of slow tests.
test-all: test
	@$(PIP_INSTALL) -e ".[datasets]"
	@failed=; for file in $$( (grep -rl slow tests --include='test_*.py'; sed 's/::.*//' tests/slow_tail/tail.txt) | sort -u); do \
	  $(PYTEST) -m slow $$file || [ $$? = 5 ] || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "Slow tests failed in:$$failed"; exit 1; }

soak: $(INSTALLED_TEST)
	$(BIN)/python -m tests.soak --seed=$(SEED) --faults=$(FAULTS)

soak-serve: $(INSTALLED_TEST)
	$(BIN)/python -m tests.serving.soak --seed=$(SEED)

soak-cluster: $(INSTALLED_TEST)
	$(BIN)/python -m tests.agents.soak --seed=$(SEED)

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(INSTALLED_TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED_DOCS)
	$(BIN)/python -m docs.site build/site_source
	$(BIN)/mkdocs build --quiet --strict

pictures: $(INSTALLED)
	$(BIN)/python -m docs.pictures

# A VERSION of the environment is not meant.
RELEASED := $(if $(filter command,$(origin VERSION)),$(VERSION))
release: $(if $(RELEASED),$(INSTALLED_TEST))
ifeq ($(RELEASED),)
	@$(PYTHON) -m docs.release
else
	@$(PIP_INSTALL) -e ".[dev]"
	@$(BIN)/python -m docs.release $(RELEASED)
endif

bazel-test: $(INSTALLED_TEST)
	PATH="$(abspath $(BIN)):$$PATH" $(BAZEL) test $(BAZEL_FLAGS) //tests/...

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# pip compiles what it installs, but not a package that stays where it is.
$(INSTALLED): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "$(PYTHON) is older than Python 3.11; name another with PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), once; a few minutes ..."
	@$(PIP_INSTALL) -e .
	@$(BIN)/python -m compileall -q lingvo_gshard
	@touch $@

$(INSTALLED_TEST): $(INSTALLED)
	@$(PIP_INSTALL) -e ".[test]"
	@$(BIN)/python -m compileall -q tests
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	@$(PIP_INSTALL) -e ".[docs]"
	@touch $@
