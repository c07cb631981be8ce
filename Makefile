# make demo   install, train the seven encodings of the quick sweep, print table and curves
# make test   install, run the tests
# make lint   install, ruff and pyright
# make study-streaming  install, experiments/streaming: the quick sweep's models on one long text (20 minutes)
# make study-catalogue  install, experiments/catalogue: every encoding and variant at one scale
# make study-scaling    install, experiments/rope_scaling: one RoPE under every transform, then trained on
# make bench  install, measure training, evaluation, decoding and streaming on this machine: runs/bench (15 minutes);
#             ARGS="training --rounds 9"; what stands beside it: .venv/bin/pip install -e '.[bench]'
# make lock   write requirements.lock anew from setup.cfg
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := runs/extrapolation-quick

.PHONY: demo test lint bench lock study-streaming study-catalogue study-scaling
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
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

STREAM := $(BIN)/pe-ablation evaluate $(DEMO) --protocols stream --stream.tokens=131072
study-streaming: $(INSTALLED)
	$(BIN)/pe-ablation launch --config configs/extrapolation.py:quick --workdir $(DEMO)
	for W in 31 63 127; do $(STREAM) --stream.window=$$W --stream.sinks=0,1,2,4,8 || exit; done
	for how in saturate ring layer0_fix; do \
	  $(STREAM) --stream.window=63 --stream.sinks=0,4 --stream.baselines= --stream.absolute=$$how || exit; done
	$(BIN)/pe-ablation report $(DEMO)

study-catalogue: $(INSTALLED)
	$(BIN)/pe-ablation launch --config configs/catalogue.py:cpu --workers 2
	$(BIN)/pe-ablation report runs/catalogue-cpu

SCALED := runs/rope_scaling-cpu
study-scaling: $(INSTALLED)
	$(BIN)/pe-ablation launch --config configs/rope_scaling.py:cpu
	$(BIN)/pe-ablation transforms --run $(SCALED) --length 4096
	$(BIN)/pe-ablation report $(SCALED)
	$(BIN)/pe-ablation launch --config configs/fine_tuning.py:cpu --config.start.run=$$(echo $(SCALED)/rope-L512-*)
	$(BIN)/pe-ablation report runs/fine_tuning-cpu

bench: $(INSTALLED)
	$(BIN)/pe-ablation bench $(ARGS)

lock: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --universal --python-version 3.11 --extra dev --no-header -o requirements.lock setup.cfg
