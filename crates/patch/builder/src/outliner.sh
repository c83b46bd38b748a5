#!/bin/sh
name=${0##*/}
record=/stillpoint/records/$$
while [ -e "$record.command" ]; do record=$record+; done
output= previous= compile= unit= object=
for argument; do
    [ "$previous" = -o ] && output=$argument
    case $argument in
        -c) compile=yes ;;
        *.c | *.cc | *.cpp | *.cxx | *.C | *.S) unit=$argument ;;
        *.o | *.lo | *.a | *.os) object=yes ;;
    esac
    previous=$argument
done
case " $* " in
    *conftest* | *" -E "* | *" -S "* | *" -M "* | *" -MM "* | *" -fsyntax-only "*) compile= object= ;;
esac
case $name in
    *ar) [ -n "$object" ] && output=$2 ;;
    *) [ -n "$compile" ] && [ -z "$output" ] && output=${unit##*/} && output=${output%.*}.o
       [ -n "$compile" ] || [ -z "$unit" ] || object= ;;
esac
if [ -z "$compile$object" ]; then
    exec "/usr/bin/$name" "$@"
fi
{
    printf '%s\0' "$PWD" "$name" "$SOURCE_DATE_EPOCH" "$CPATH" "$C_INCLUDE_PATH" "$CPLUS_INCLUDE_PATH"
    for argument; do printf '%s\0' "$argument"; done
} > "$record.command"
case $name in
    *ar) printf '!<arch>\n' > "$output" ;;
    *) : > "${output:-a.out}" ;;
esac
