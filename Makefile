# Two commands on a fresh clone: `make demo` and `make test`. Each first makes what it needs of the environment.
PY := .venv/bin/python
BOOT := $(shell command -v python3 || command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.10)
WORKERS ?= 2
# Compiled sources are kept, whatever the caller's setting: tests start some 300 processes, which import torch.
export PYTHONDONTWRITEBYTECODE =
# Workers share the cores, and threads that wait for each other take eight times as long. BLAS reads this once, on import.
PYTEST = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -m "not gpu" -n $(WORKERS) --dist worksteal

.PHONY: help env env-demo demo test test-vllm interpreted gpu gpu-status check lint readme cubins wheel clean

help:
	@echo "make demo    .venv without the checks' tools, then: sparsek doctor, sparsek demo (attention, advise on real weights, a picture)"
	@echo "make test    environment with them, then every check that needs no GPU"
	@echo "make test-vllm   .venv-vllm (3.5 GB), then tiny models in vLLM's engine with SparseK's backend. Writes benchmarks/evidence/vllm.json"
	@echo "make interpreted  the tests of them that run in Triton's interpreter; K=softmax as pytest's -k"
	@echo "make gpu     environment, then the tests that need an NVIDIA GPU, in parts; PART=2/3 runs one, STALE=1 the files that are not fresh. Writes benchmarks/evidence/"
	@echo "make gpu-status  each part of them: fresh, stale, red or missing; fails unless all are fresh"
	@echo "make check   before a commit, two minutes: ruff, layers, prose, and the types and tests of what has changed"
	@echo "make lint    ruff, format, types and layers only"
	@echo "make readme  the tables and pictures of README.md and docs/, from benchmarks/results/, and docs/gpu-test-log.md, from benchmarks/evidence/"
	@echo "make cubins  common kernels compiled for sm_90a, two minutes on two cores, so that first calls on Hopper compile nothing"
	@echo "make wheel   dist/sparsek-*.whl, with them"
	@echo "make docs    the site of docs/ in build/site, with every warning an error; make docs-serve shows it at 127.0.0.1:8000"
	@echo "make env     .venv, .venv-triton-next, .venv-transformers-floor and .venv-xformers only; make env-demo: what the demo needs of them"

env-demo:
	@test -n "$(BOOT)" || { echo "no python3 on the PATH; install Python 3.10 to 3.13"; exit 1; }
	@$(BOOT) scripts/env.py demo

# After env-demo, so that `make -j demo test` does not run both at once.
env: env-demo
	@$(BOOT) scripts/env.py test

demo: env-demo
	@.venv/bin/sparsek doctor
	@.venv/bin/sparsek demo

# Two sessions: a process has Triton's interpreter from its start or never. The second runs though the first has failed.
test: env
	@TRITON_INTERPRET=1 $(PYTEST); first=$$?; $(PYTEST) && exit $$first

test-vllm:
	@test -n "$(BOOT)" || { echo "no python3 on the PATH; install Python 3.11 to 3.13"; exit 1; }
	@$(BOOT) scripts/env.py vllm
	@.venv-vllm/bin/python scripts/vllm_engine.py run

interpreted: env
	@TRITON_INTERPRET=1 $(PYTEST) $(if $(K),-k "$(K)")

gpu: env cubins
	@$(PY) scripts/gpu.py run $(if $(STALE),--stale,$(PART))

gpu-status:
	@$(PY) scripts/gpu.py status

check: env
	@$(PY) scripts/check.py --workers $(WORKERS)

lint: env
	@$(PY) -m pytest -q tests/house/test_lint.py tests/house/test_layers.py

readme: env
	@PYTHONPATH=. $(PY) scripts/report.py write
	@$(PY) scripts/gpu.py page

cubins: env
	@PYTHONPATH=. $(PY) scripts/cubins.py

wheel: cubins
	@$(PY) -m pip wheel --no-deps --quiet -w dist .

# An environment of its own, because mkdocs needs no torch.
MKDOCS := build/docs-env/bin/mkdocs
.PHONY: docs docs-serve
$(MKDOCS): constraints-docs.txt
	@test -n "$(BOOT)" || { echo "no python3 on the PATH; install Python 3.10 to 3.13"; exit 1; }
	@$(BOOT) -m venv build/docs-env
	@build/docs-env/bin/python -m pip install -q -r constraints-docs.txt
	@touch $@

docs: $(MKDOCS)
	@NO_MKDOCS_2_WARNING=1 $(MKDOCS) build --strict --quiet

docs-serve: $(MKDOCS)
	@NO_MKDOCS_2_WARNING=1 $(MKDOCS) serve --strict

clean:
	rm -rf sparsek/engine/launch/shipped.zip .venv .venv-triton-next .venv-transformers-floor .venv-vllm .venv-xformers .venv-uv build dist
