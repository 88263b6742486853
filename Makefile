# Everything installs itself into $(VENV) on first use; a stamp makes the second run instant.
#   make demo    tune, look into the database, call the winner   (with or without a GPU)
#   make test    lint, types, tests                              (no GPU needed)
#   make test-quick    tests without compile sweeps and slow ones, for the inner loop
#   make bench   gemm's main suites and silu_mul, with peers     (needs a GPU)
#   make plots   every picture of recorded rows                  (no GPU needed)
#   make docs    the site, into site/                            (no GPU needed)
#   make test-versions   the lowest and the newest versions, and vLLM's; engines resolved beside us; an hour
#   make lock    requirements.lock, the hashes of what constraints.txt names

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
GPU ?= l40s# the GPU to predict for where none is present
WORKERS ?= 2

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
TORCH_ALONE := torch cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile \
    curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)# what only torch's CUDA builds need
TYPES := build/types
DEMO_PROBLEM := m=4096 n=4096 k=4096

export PATH := $(BIN):$(PATH)
# The tests start hundreds of processes, which would compile our modules anew where an image sets this.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tests test-quick test-versions every-model lock lint format types plots docs bench install clean

install: $(STAMP)

# The lock is whole, down to setuptools, and has each file's hash: nothing else is resolved or fetched. torch comes apart,
# with the CUDA libraries that it needs: pip takes the build that fits the machine, and each build has hashes of its own.
$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	pip install --quiet --disable-pip-version-check $(TORCH) -c constraints.txt
	pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The hashes of the files that PyPI has of the versions in constraints.txt, for Linux and Python 3.11 to 3.13.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	build/lock/bin/uv pip compile pyproject.toml --extra dev -c constraints.txt --universal --python-version 3.11 \
	    --generate-hashes --no-annotate --quiet --custom-compile-command "make lock" \
	    $(addprefix --no-emit-package ,$(TORCH_ALONE)) -o build/lock/requirements.txt
	sed 's/ ; .* \\$$/ \\/' build/lock/requirements.txt >requirements.lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check packaging
	build/lock/bin/python -m tests.lock requirements.lock

demo: $(STAMP)
	@if python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	    $(MAKE) --no-print-directory demo-gpu; else $(MAKE) --no-print-directory demo-cpu; fi

.PHONY: demo-gpu demo-cpu
demo-gpu: $(STAMP)
	cutekernels tune demo --gpu auto
	cutekernels db query --gpu auto --local
	python -c 'import torch, cutekernels as ck; \
	    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)); \
	    print("gemm agrees with torch.mm:", torch.allclose(ck.gemm(a, b), a @ b, rtol=2e-2, atol=1))'
	cutekernels explain gemm "$(DEMO_PROBLEM)"

# No GPU: candidates are compiled for one that is elsewhere and ranked; then: where, and why, they are not the default.
demo-cpu: $(STAMP)
	cutekernels tune examples/absent-gpu.toml --gpu $(GPU) --limit 12
	python -m cutekernels.autotune.departures examples/absent-gpu.toml $(GPU)
	python -c 'import torch, cutekernels as ck; \
	    a, b = (torch.randn(256, 256, dtype=torch.bfloat16) for _ in range(2)); \
	    print("gemm agrees with torch.mm:", torch.allclose(ck.gemm(a, b), a @ b, rtol=2e-2, atol=1))'
	cutekernels explain rope "batch=1 seq=1024 heads_q=32 head_dim=128 rotary=128 dtype=fp16" --gpu $(GPU)

# mypy, which takes one processor, runs beside the tests.
test: $(STAMP)
	ruff check .
	ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types tests
	@python -m tests.gpu_ledger --count

tests: $(STAMP)
	OMP_NUM_THREADS=1 pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# torch's 2.11 with CUDA's libraries, the newest and vLLM's: 15 GB in .venv-versions. WORKERS as in `make test`.
test-versions: $(STAMP)
	WORKERS=$(WORKERS) python -m tests.versions

# Each causal model class of transformers, patched: minutes. It writes the table in docs/transformers.md.
every-model: $(STAMP)
	mkdir -p build && python -m tests.every_model > build/every_model.tsv
	python -m tests.every_model --write build/every_model.tsv

test-quick: $(STAMP)
	OMP_NUM_THREADS=1 pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not sweep"

lint: $(STAMP)
	ruff check .
	ruff format --check .
	@$(MAKE) --no-print-directory types

# mypy does not see through the mapping of autotune/ and db/ to cutekernels.*; a tree of links lays it out.
types: $(STAMP)
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/cutekernels
	@ln -s $(CURDIR)/cutekernels/* $(CURDIR)/autotune $(CURDIR)/db $(TYPES)/cutekernels/
	@ln -s $(CURDIR)/bench $(CURDIR)/tests/typing/calls.py $(TYPES)/
	cd $(TYPES) && mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache \
	    -p cutekernels -p bench -m calls

format: $(STAMP)
	ruff check --fix .
	ruff format .

plots: $(STAMP)
	python -m bench.plots

docs: $(STAMP)
	pip install --quiet --disable-pip-version-check -e ".[docs]"
	python -m docs.generate
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

bench: $(STAMP)
	python -m bench gemm --suite square
	python -m bench gemm --suite llm
	python -m bench gemm --suite alphabeta
	python -m bench silu_mul

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
