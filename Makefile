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
# What is installed has its C library in it: a program linked with that of this machine would start on no older system, and at each start
# would spend more time on loading libraries than on relocating itself.
TARGET := x86_64-unknown-linux-gnu
RELEASE := $(or $(CARGO_TARGET_DIR),target)/$(TARGET)/release
BUILD_RELEASE = RUSTFLAGS="$${RUSTFLAGS:-} -C target-feature=+crt-static" $(CARGO) build --locked --release --target $(TARGET)

.PHONY: help setup build test test-full check demo demo-migrate demo-kernel test-generations bench bench-kernel experiments soak fuzz deb install install-files uninstall clean clean-cache

help: ## this list
	@echo 'stillpoint: live patches for running programs, live migration of PostgreSQL databases. Start with `make demo`.'
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1 \t\2/p' Makefile | expand -t 18

setup: ## install what building and testing needs (Debian 12 or 13; no service is started)
	@setup/install test

build: ## build the `stillpoint` binary (target/*/release/stillpoint); installs compilers alone
	@setup/install build
	@$(BUILD_RELEASE) -p stillpoint

# The runner is built with the tests: by itself it would have other features, and its dependencies would be compiled twice.
BUILD_TESTS = $(CARGO) build --locked --workspace --lib --bins --tests
XTASK = $(or $(CARGO_TARGET_DIR),target)/debug/xtask

test: setup ## a short case of each kind; the last line is the count (REQUIRE_ALL=1: what cannot run fails; FRESH=1: also what passed before; TEST_ONLY=kernel: some)
	@began=$$(date +%s); $(BUILD_TESTS); TEST_BEGAN=$$began $(XTASK) test

test-full: setup ## every test in its long form, all matrices, minutes of fuzzing; goes on where it stopped (many hours)
	@setup/install test deb full
	@$(BUILD_TESTS)
	@STILLPOINT_ALL=1 STILLPOINT_FUZZ_SECONDS="$${FUZZ_SECONDS:-60}" $(XTASK) test-full

test-generations: setup ## build a kernel with address-space generations and run its tests in an emulated machine, root
	@$(CARGO) build --quiet --locked -p stillpoint
	@$(CARGO) run --quiet --locked -p xtask -- generations

check: setup ## formatting, lints, and the rules of the tree (layers, purity, words)
	@$(CARGO) run --quiet --locked -p xtask -- check

demo: build ## patch a running redis 17 times under load and show what its clients noticed
	@setup/install patch
	@$(BUILD_RELEASE) -p stillpoint-patch-bench --bin demo
	@STILLPOINT_BIN="$(abspath $(RELEASE)/stillpoint)" $(RELEASE)/demo $(DEMO_ARGS)

demo-migrate: build ## move a PostgreSQL database to another server and back under load (DEMO_ARGS=--short: a minute)
	@setup/install migrate
	@$(BUILD_RELEASE) -p stillpoint-migrate-bench --bin demo-migrate
	@STILLPOINT_BIN="$(abspath $(RELEASE)/stillpoint)" $(RELEASE)/demo-migrate $(DEMO_ARGS)

demo-kernel: build ## change the kernel of an emulated machine under three databases, root (DEMO_ARGS=--short: no faults)
	@setup/install kernel
	@$(BUILD_RELEASE) -p stillpoint-kernel-bench --bin demo-kernel
	@STILLPOINT_BIN="$(abspath $(RELEASE)/stillpoint)" $(RELEASE)/demo-kernel $(DEMO_ARGS)

bench: setup build ## measure what docs/numbers.md states (about an hour; BENCH_ARGS=--short: 10 minutes)
	@$(BUILD_RELEASE) -p stillpoint-patch-bench --bin bench
	@$(BUILD_RELEASE) -p stillpoint-migrate-bench --bin migrate-rivals
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
LIBDIR ?= $(PREFIX)/lib
LIBBUILD ?= $(abspath $(RELEASE))/libstillpoint
LIBSTILLPOINT = $(MAKE) -C crates/patch/runtime BUILD='$(LIBBUILD)' PREFIX='$(PREFIX)' LIBDIR='$(LIBDIR)' DESTDIR='$(if $(DESTDIR),$(abspath $(DESTDIR)))'

# Where it all goes, below DESTDIR. SYMBOLS= leaves the binary as it was built, for a packager who strips it.
BIN = $(DESTDIR)$(PREFIX)/bin
MAN = $(DESTDIR)$(PREFIX)/share/man
SYSTEMD = $(DESTDIR)$(PREFIX)/lib/systemd
BASH = $(DESTDIR)$(PREFIX)/share/bash-completion/completions/stillpoint
ZSHDIR ?= $(PREFIX)/share/zsh/site-functions
ZSH = $(DESTDIR)$(ZSHDIR)/_stillpoint
FISH = $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/stillpoint.fish
SYMBOLS ?= $(BIN)/.debug/stillpoint.debug
# each file of packaging/ that is installed, and where; a file of configuration is never overwritten
PLACES = systemd:$(SYSTEMD)/system:644 generators:$(SYSTEMD)/system-generators:755 sysusers.d:$(DESTDIR)$(PREFIX)/lib/sysusers.d:644 \
  tmpfiles.d:$(DESTDIR)$(PREFIX)/lib/tmpfiles.d:644

install: build ## install the binary, libstillpoint, man pages, completions, units and configuration (PREFIX, DESTDIR)
	@$(MAKE) install-files
	@echo 'installed $(BIN)/stillpoint and $(DESTDIR)$(LIBDIR)/libstillpoint.so.1'

install-files:
	@install -D -m 755 $(RELEASE)/stillpoint '$(BIN)/stillpoint'
	@[ -z '$(SYMBOLS)' ] || { install -d '$(dir $(SYMBOLS))'; objcopy --only-keep-debug --compress-debug-sections '$(BIN)/stillpoint' '$(SYMBOLS)'; \
	  chmod 644 '$(SYMBOLS)'; strip --strip-all '$(BIN)/stillpoint'; objcopy --add-gnu-debuglink='$(SYMBOLS)' '$(BIN)/stillpoint'; }
	@$(LIBSTILLPOINT) install >/dev/null
	@install -d '$(MAN)/man1' '$(MAN)/man7'
	@for page in man/*.[1-8]; do install -m 644 "$$page" "$(MAN)/man$${page##*.}/"; done
	@install -d '$(dir $(BASH))' '$(dir $(ZSH))' '$(dir $(FISH))'
	@$(RELEASE)/stillpoint completions bash >'$(BASH)'; $(RELEASE)/stillpoint completions zsh >'$(ZSH)'; $(RELEASE)/stillpoint completions fish >'$(FISH)'
	@chmod 644 '$(BASH)' '$(ZSH)' '$(FISH)'
	@for place in $(PLACES); do IFS=: read -r from to mode <<<"$$place"; install -d -m 755 "$$to"; for file in packaging/$$from/*; do \
	  sed 's|@PREFIX@|$(PREFIX)|' "$$file" >"$$to/$${file##*/}"; chmod "$$mode" "$$to/$${file##*/}"; done; done
	@install -d -m 755 '$(DESTDIR)/etc/default' '$(DESTDIR)/etc/stillpoint/keys'
	@for file in default/stillpoint stillpoint/kernel.toml; do [ -e "$(DESTDIR)/etc/$$file" ] || install -m 644 "packaging/etc/$$file" "$(DESTDIR)/etc/$$file"; done

uninstall: ## remove what `install` put there (configuration and keys stay)
	@rm -f '$(BIN)/stillpoint' '$(SYMBOLS)' '$(BASH)' '$(ZSH)' '$(FISH)'
	@rmdir --ignore-fail-on-non-empty '$(dir $(SYMBOLS))' 2>/dev/null || :
	@for place in $(PLACES); do IFS=: read -r from to mode <<<"$$place"; for file in packaging/$$from/*; do rm -f "$$to/$${file##*/}"; done; done
	@for page in man/*.[1-8]; do rm -f "$(MAN)/man$${page##*.}/$${page##*/}"; done
	@$(LIBSTILLPOINT) uninstall >/dev/null

deb: build ## build Debian packages (target/*/release/deb): stillpoint and its symbols, libstillpoint1, libstillpoint-dev
	@setup/install deb
	@packaging/deb '$(abspath $(RELEASE))' $(DEB_VERSION)

clean: ## remove everything built
	@rm -rf target fuzz/target

clean-cache: ## remove everything in the cache that no process uses (STILLPOINT_CACHE; see man stillpoint-patch-build)
	@$(CARGO) run --quiet --locked -p xtask -- cache clean
