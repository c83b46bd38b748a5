#!/bin/sh
# Stands in for gcc's lto-wrapper: calls the real one, and keeps a copy of each object that it hands to the linker.
made=$("$STILLPOINT_LTO_WRAPPER" "$@") || exit
number=100000
printf '%s\n' "$made" | while read -r object; do
    if [ -n "$object" ]; then cp -- "$object" "$STILLPOINT_PARTITIONS/$number.o" || exit; fi
    number=$((number + 1))
done || exit
printf '%s\n' "$made"
