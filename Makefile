# Thin fronts over CMake: each installs the packages that are missing, builds what it needs, runs.
#   make run     the main job: measure this machine, run the pipelines, write report.html
#   make build   build/rafter
#   make test    build and run every test of this machine
#   make bench   the benchmark grid, predicted and measured side by side
#   make python  the Python package in build/python, for .cache/venv/bin/python
#   make install PREFIX=DIR   the tool, the library, its headers and CMake package
BUILD := build
JOBS := $(shell nproc)
PREFIX := /usr/local
QKV := $(firstword $(wildcard tests/data/*_qkv.safetensors))
LAUNCHER := $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
# The compiler's own messages only: a recipe line that says what it runs is enough.
CONFIGURE = tools/install_packages.sh build && \
  cmake --preset default -B $(BUILD) $(LAUNCHER) --log-level=WARNING

.PHONY: run build test bench python install clean

run: build
	$(BUILD)/rafter report --out report.html $(if $(QKV),--qkv $(QKV))

build:
	$(CONFIGURE)
	cmake --build $(BUILD) --parallel $(JOBS) --target rafter_tool

test:
	$(CONFIGURE)
	cmake --build $(BUILD) --parallel $(JOBS)
	tools/run_tests $(BUILD) --summary $(BUILD)/test_totals.json

bench: build
	$(BUILD)/rafter bench attention

python:
	tools/install_packages.sh python
	cmake --preset default -B $(BUILD) $(LAUNCHER) --log-level=WARNING -DRAFTER_PYTHON=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/.cache/venv/bin/python
	cmake --build $(BUILD) --parallel $(JOBS) --target rafter_python_stub

install:
	$(CONFIGURE)
	cmake --build $(BUILD) --parallel $(JOBS) --target rafter rafter_c rafter_tool
	cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf $(BUILD) build-*
