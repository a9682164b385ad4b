# The README's two commands are `make demo` and `make test`; both set the clone up on the first run.
# Options go through ARGS: make test ARGS="-k mask -x"

PYTHON_IN_VENV := .venv/bin/python
STAMP := .venv/.setup-done
ARGS ?=
USUAL := not full and not device

# The tests start many processes: what one of them has compiled is there for the next.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-alone test-others full lint types layers docs conform-ascend clean

help:
	@echo "make setup   .venv, which the others make too; . .venv/bin/activate puts burst-portable on the path"
	@echo "make demo    train a small model over two ranks and check it against one device"
	@echo "make test    the test-suite"
	@echo "make full    the test-suite with every combination (long)"
	@echo "make lint    ruff: format and rules       make types   mypy, strict"
	@echo "make layers  imports between folders      make docs    the documentation, into build/site"
	@echo "make clean   remove reports and caches"
	@echo "make conform-ascend  the Ascend backend on the real torch_npu and an imitation of CANN (long)"

setup: $(STAMP)

# A change of the pins or of the dependencies sets up again; otherwise the stamp says that there is nothing to do.
$(STAMP): pyproject.toml constraints.txt ci/setup.sh
	@sh ci/setup.sh
	@touch $@

demo: $(STAMP)
	@echo "Trains a small Llama for 10 steps of 4,096 tokens, on two ranks and again on one device to compare."
	@echo "This takes about a minute on two CPU cores, longer if other programs use them."
	@.venv/bin/burst-portable run --model tiny --ranks 2 --seq-len 4096 --steps 10 --check --profile --report report/ $(ARGS)

# Tests that measure time run by themselves, all others in three processes. With options, one pytest runs what they say.
# To look for the first in all files would take ten seconds, in which the second core has nothing to do.
# By default xdist would run files of few tests last, and these hold the longest tests.
ALONE = $(shell grep -rl --include='*.py' 'mark\.alone' tests)

ifeq ($(strip $(ARGS)),)
test: $(STAMP)
	@$(MAKE) --no-print-directory test-alone; alone=$$?; $(MAKE) --no-print-directory test-others && exit $$alone
else
test: $(STAMP)
	@$(PYTHON_IN_VENV) -m pytest $(ARGS)
endif

test-alone: $(STAMP)
	@$(PYTHON_IN_VENV) -m pytest -m "alone and $(USUAL)" $(ALONE)

test-others: $(STAMP)
	@$(PYTHON_IN_VENV) -m pytest -m "not alone and $(USUAL)" -n 3 --dist loadfile --no-loadscope-reorder

full: $(STAMP)
	@$(PYTHON_IN_VENV) -m pytest -m "not device" --timeout 600 $(ARGS)

lint: $(STAMP)
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) ci/check_prose.py

types: $(STAMP)
	@$(PYTHON_IN_VENV) -m mypy

layers: $(STAMP)
	@.venv/bin/lint-imports --no-logo --no-cache
	@$(PYTHON_IN_VENV) ci/check_source.py

# Warnings are errors. The variable turns off a note of the theme about its own future.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_IN_VENV) -m mkdocs build --strict --quiet
	@echo "the documentation is in build/site/index.html"

# Needs gcc and makes an environment of its own in build/; see backends/ascend/README.md.
conform-ascend:
	@sh backends/ascend/standin/conform.sh $(ARGS)

clean:
	rm -rf report build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
