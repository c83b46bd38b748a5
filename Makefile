# stillpoint: `make help` lists what there is. Every target may be run alone and installs what it needs first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PREFIX ?= /usr/local
DESTDIR ?=
CARGO ?= cargo
# A rustup toolchain is found even by a shell that has not read its profile.
export PATH := $(PATH):$(HOME)/.cargo/bin
RELEASE := $(or $(CARGO_TARGET_DIR),target)/release

.PHONY: help setup build test test-full check demo demo-migrate demo-kernel test-generations bench bench-kernel experiments soak fuzz install uninstall clean clean-cache

help: ## this list
	@echo 'stillpoint: live patches for running programs, live migration of PostgreSQL databases. Start with `make demo`.'
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1 \t\2/p' Makefile | expand -t 18

setup: ## install what building and testing needs (Debian 12 or 13; no service is started)
	@setup/install test

build: ## build the `stillpoint` binary (target/release/stillpoint); installs compilers alone
	@setup/install build
	@$(CARGO) build --locked --release -p stillpoint

# The runner is built with the tests: by itself it would have other features, and its dependencies would be compiled twice.
BUILD_TESTS = $(CARGO) build --locked --workspace --lib --bins --tests
XTASK = $(or $(CARGO_TARGET_DIR),target)/debug/xtask

test: setup ## a short case of each kind; the last line is the count (REQUIRE_ALL=1: what cannot run fails; FRESH=1: also what passed before; TEST_ONLY=kernel: some)
	@began=$$(date +%s); $(BUILD_TESTS); TEST_BEGAN=$$began $(XTASK) test

test-full: setup ## every test in its long form, all matrices, minutes of fuzzing; goes on where it stopped (many hours)
	@$(BUILD_TESTS)
	@STILLPOINT_ALL=1 STILLPOINT_FUZZ_SECONDS="$${FUZZ_SECONDS:-60}" $(XTASK) test-full

test-generations: setup ## build a kernel with address-space generations and run its tests in an emulated machine, root
	@$(CARGO) build --quiet --locked -p stillpoint
	@$(CARGO) run --quiet --locked -p xtask -- generations

check: setup ## formatting, lints, and the rules of the tree (layers, purity, words)
	@$(CARGO) run --quiet --locked -p xtask -- check

demo: build ## patch a running redis 17 times under load and show what its clients noticed
	@setup/install patch
	@$(CARGO) build --locked --release -p stillpoint-patch-tests --bin demo
	@STILLPOINT_BIN="$(abspath $(RELEASE)/stillpoint)" $(RELEASE)/demo $(DEMO_ARGS)

demo-migrate: build ## move a PostgreSQL database to another server and back under load (DEMO_ARGS=--short: a minute)
	@setup/install migrate
	@$(CARGO) build --locked --release -p stillpoint-migrate-demo
	@STILLPOINT_BIN="$(abspath $(RELEASE)/stillpoint)" $(RELEASE)/demo-migrate $(DEMO_ARGS)

demo-kernel: build ## change the kernel of an emulated machine under three databases, root (DEMO_ARGS=--short: no faults)
	@setup/install kernel
	@$(CARGO) build --locked --release -p stillpoint-kernel-demo
	@STILLPOINT_BIN="$(abspath $(RELEASE)/stillpoint)" $(RELEASE)/demo-kernel $(DEMO_ARGS)

bench: setup build ## measure what docs/numbers.md states (about an hour; BENCH_ARGS=--short: 10 minutes)
	@$(CARGO) build --locked --release -p stillpoint-patch-tests --bin bench
	@$(CARGO) build --locked --release -p stillpoint-migrate-tests --bin migrate-rivals
	@STILLPOINT_BIN="$(abspath $(RELEASE)/stillpoint)" $(RELEASE)/bench $(BENCH_ARGS)

bench-kernel: setup build ## criu's own against ours (BENCH_ARGS='MIB ROUNDS': 1024 3), and all ways by size of memory, root (BENCH_SIZES, in MiB)
	@experiments/kernel-rivals $(BENCH_ARGS)
	@experiments/kup-fig7 $(BENCH_SIZES)

experiments: setup build ## the papers' experiments, one after another (experiments/README.md; some hours)
	@export STILLPOINT_BIN="$(abspath $(RELEASE)/stillpoint)"; failed=; \
	for script in $$(find -L experiments -maxdepth 1 -type f -perm -u+x | sort); do \
	  echo "== $$script"; "$$script" || failed="$$failed $$script"; \
	done; \
	[ -z "$$failed" ] || { echo "experiments that failed:$$failed" >&2; exit 1; }

soak: setup ## the long tests, round after round; goes on where it stopped (SOAK_HOURS=8)
	@$(CARGO) run --quiet --locked -p xtask -- soak

fuzz: setup ## feed every decoder of outside bytes with garbage (FUZZ_SECONDS=60 for each)
	@STILLPOINT_FUZZ_SECONDS="$${FUZZ_SECONDS:-60}" $(CARGO) run --quiet --locked -p xtask -- fuzz

# libstillpoint, built beside the binary
LIBSTILLPOINT = $(MAKE) -C crates/patch/runtime BUILD='$(abspath $(RELEASE))/libstillpoint' PREFIX='$(PREFIX)' DESTDIR='$(if $(DESTDIR),$(abspath $(DESTDIR)))'

install: build ## install the binary, libstillpoint, the man pages and the key directory (PREFIX, DESTDIR)
	@install -D -m 755 $(RELEASE)/stillpoint '$(DESTDIR)$(PREFIX)/bin/stillpoint'
	@$(LIBSTILLPOINT) install >/dev/null
	@install -d '$(DESTDIR)$(PREFIX)/share/man/man1' '$(DESTDIR)$(PREFIX)/share/man/man7'
	@for page in man/*.[1-8]; do install -m 644 "$$page" "$(DESTDIR)$(PREFIX)/share/man/man$${page##*.}/"; done
	@install -d -m 755 '$(DESTDIR)/etc/stillpoint/keys' '$(DESTDIR)$(PREFIX)/lib/systemd/system'
	@for unit in packaging/systemd/*; do sed 's|@PREFIX@|$(PREFIX)|' "$$unit" >"$(DESTDIR)$(PREFIX)/lib/systemd/system/$${unit##*/}"; done
	@install -d -m 755 '$(DESTDIR)$(PREFIX)/lib/systemd/system-generators'
	@for file in packaging/generators/*; do to="$(DESTDIR)$(PREFIX)/lib/systemd/system-generators/$${file##*/}"; sed 's|@PREFIX@|$(PREFIX)|' "$$file" >"$$to"; chmod 755 "$$to"; done
	@echo 'installed $(DESTDIR)$(PREFIX)/bin/stillpoint and $(DESTDIR)$(PREFIX)/lib/libstillpoint.so.1'

uninstall: ## remove what `install` put there (the key directory stays)
	@rm -f '$(DESTDIR)$(PREFIX)/bin/stillpoint'
	@for unit in packaging/systemd/*; do rm -f "$(DESTDIR)$(PREFIX)/lib/systemd/system/$${unit##*/}"; done
	@for file in packaging/generators/*; do rm -f "$(DESTDIR)$(PREFIX)/lib/systemd/system-generators/$${file##*/}"; done
	@for page in man/*.[1-8]; do rm -f "$(DESTDIR)$(PREFIX)/share/man/man$${page##*.}/$${page##*/}"; done
	@$(LIBSTILLPOINT) uninstall >/dev/null

clean: ## remove everything built
	@rm -rf target fuzz/target

clean-cache: ## remove everything in the cache that no process uses (STILLPOINT_CACHE; see man stillpoint-patch-build)
	@$(CARGO) run --quiet --locked -p xtask -- cache clean
