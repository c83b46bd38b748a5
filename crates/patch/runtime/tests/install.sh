#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# install.sh - what `make install` puts there, used as the author of a program would: found by pkg-config, compiled,
# linked both ways and run; what it exports is what the map and the headers say; every function has its page.
#
# usage: install.sh BUILD
set -eu
build=$1
cd "$(dirname "$0")/.."
prefix=/opt/stillpoint
root=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || :; rm -rf "$root"' EXIT

fail() { echo "install: $*" >&2; exit 1; }
# a tool that a machine for tests need not have
lacks() {
    ! command -v "$1" >/dev/null || return 1
    [ "${REQUIRE_ALL:-0}" != 1 ] || [ "$1" = man ] || fail "$1 is not installed"
    echo "install: no $1: $2"
}

${MAKE:-make} -s install BUILD="$build" PREFIX="$prefix" DESTDIR="$root"
there=$root$prefix

exported=$(nm -D --defined-only --with-symbol-versions "$there/lib/libstillpoint.so.1" | awk '$2 != "A" {print $3}' | sort)
mapped=$(sed -n '/global:/,/local:/p' runtime.map | grep -o 'sp_[a-z_]*' | sed 's/$/@@STILLPOINT_1/' | sort)
[ "$exported" = "$mapped" ] || fail "exported: $exported; by the map: $mapped"
archived=$(nm -g --defined-only "$there/lib/libstillpoint.a" | awk 'NF == 3 && $3 !~ /^sp_/ {print $3}')
[ -z "$archived" ] || fail "names of the archive that are not its own: $archived"
# a function is declared where a line that does not begin a comment ends in its parameters
declared=$(sed -n 's/^[a-z][a-z ]*[ *]\(sp_[a-z_]*\)(.*);$/\1/p' "$there"/include/*.h | sort)
[ "$(echo "$declared" | wc -l)" -gt 10 ] || fail "declared: $declared"
for name in $declared; do
    echo "$mapped" | grep -qx "$name@@STILLPOINT_1" || fail "$name is declared and not exported"
done

pages=$(sed -n 's/^static inline void \(sp_[a-z_]*\)(void)$/\1/p' "$there/include/stillpoint.h"; echo "$declared" | grep -vx sp_quiescence_slow)
if ! lacks man "its pages are not rendered"; then
    for page in $pages; do
        # section by section: one that leads to another page is followed
        told=$(MANPAGER=cat LC_ALL=C.UTF-8 man --warnings -M "$there/share/man" 3 "$page" 2>&1 >"$root/page") || fail "$page(3): $told"
        [ -z "$told" ] || fail "$page(3): $told"
        grep -q "$page" "$root/page" || fail "$page(3) does not name it"
    done
fi

lacks pkg-config "the example is not compiled against what was installed" && exit 0
export PKG_CONFIG_LIBDIR="$there/lib/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$root"
[ "$(pkg-config --modversion libstillpoint)" = 1 ] || fail "pkg-config tells no version"
# words are meant to be split
# shellcheck disable=SC2046
for way in shared static; do
    if [ $way = shared ]; then
        ${CC:-cc} -O2 -Wall -Wextra -Werror examples/hash_server.c -o "$root/server" $(pkg-config --cflags --libs libstillpoint) -pthread
    else
        ${CC:-cc} -O2 $(pkg-config --cflags libstillpoint) examples/hash_server.c -o "$root/server" \
            -Wl,-Bstatic $(pkg-config --libs --static libstillpoint) -Wl,-Bdynamic -pthread
    fi
    needed=$(readelf -d "$root/server" | grep -c 'NEEDED.*libstillpoint.so.1') || :
    [ "$needed" = "$([ $way = shared ] && echo 1 || echo 0)" ] || fail "$way: libstillpoint.so.1 is needed $needed times"
    : >"$root/said"
    LD_LIBRARY_PATH=$there/lib "$root/server" 0 4 >>"$root/said" &
    server=$!
    # the library's own thread is there: sp_init was the installed one's
    patience=1200
    until grep -q 'listening on port' "$root/said" && grep -qx stillpoint /proc/"$server"/task/*/comm 2>/dev/null; do
        kill -0 "$server" 2>/dev/null || fail "$way: the example ended"
        patience=$((patience - 1))
        [ $patience -gt 0 ] || fail "$way: the example does not listen, or has no thread of the library: $(cat "$root/said")"
        sleep 0.1
    done
    kill "$server"
    wait "$server" 2>/dev/null || :
    server=
done

rm -f "$root/server" "$root/said" "$root/page"
${MAKE:-make} -s uninstall PREFIX="$prefix" DESTDIR="$root"
left=$(find "$root" ! -type d)
[ -z "$left" ] || fail "left behind: $left"
echo "install: ok"
