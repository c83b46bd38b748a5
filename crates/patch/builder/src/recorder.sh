#!/bin/sh
name=${0##*/}
record=/stillpoint/records/$$
while [ -e "$record.command" ]; do record=$record+; done
{
    printf '%s\0' "$PWD" "$name" "$SOURCE_DATE_EPOCH" "$CPATH" "$C_INCLUDE_PATH" "$CPLUS_INCLUDE_PATH"
    for argument; do printf '%s\0' "$argument"; done
} > "$record.command"
for argument; do
    case $argument in
        @?*) [ -r "${argument#@}" ] && { cat "${argument#@}"; echo; } >> "$record.response" ;;
    esac
done
case " $* " in
    *" -M"* | *" -Wp,-M"*) ;;
    *" -c "*) exec "/usr/bin/$name" "$@" -MMD -MF "$record.d" ;;
esac
exec "/usr/bin/$name" "$@"
