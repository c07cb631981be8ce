# make demo   install, train the seven encodings of the quick sweep, print table and curves
# make test   install, run the tests
# make lint   install, ruff and pyright
# make lock   write requirements.lock anew from setup.cfg
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := runs/extrapolation-quick

.PHONY: demo test lint lock
.DEFAULT_GOAL := demo

$(INSTALLED): requirements.lock setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else \
	  "pe_ablation needs Python 3.11 to 3.13, this is %d.%d; name another: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: $(INSTALLED)
	$(BIN)/pe-ablation launch --config configs/extrapolation.py:quick --workdir $(DEMO); code=$$?; \
	  $(BIN)/pe-ablation report $(DEMO) && exit $$code

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

lock: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --universal --python-version 3.11 --extra dev --no-header -o requirements.lock setup.cfg
