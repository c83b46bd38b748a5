#!/bin/sh
# The PostgreSQL rows of OSDI'20 Table 1: experiments/postgres.sh [changes|fixes]
#   changes  our own, to Debian 12's unmodified PostgreSQL 15 with 100 idle connections and pgbench (minutes)
#   fixes    upstream's, to Debian 11's PostgreSQL 13.23, built here without them (the first time: half an hour)
# Prints a table, and keeps it beside this script with the machine and the commit in its first line. Needs root.
set -eu
here=$(dirname "$(readlink -f "$0")")
cd "$here/.."
for which in ${1:-changes fixes}; do
    out="$here/postgres-$which.md"
    {
        echo "\`experiments/postgres.sh $which\`, $(git describe --always --dirty), $(date -u +%F), $(nproc) processors," \
            "$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
        echo
        cargo run --quiet --locked -p stillpoint-patch-bench --bin postgres -- "$which"
    } > "$out.part"
    mv "$out.part" "$out"
    cat "$out"
done
