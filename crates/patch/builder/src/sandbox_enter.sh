root=$1; directory=$2; mounts=$3; shift 3
while [ "$mounts" -gt 0 ]; do
    if [ -n "$root" ] && [ ! -e "$2" ]; then mkdir -p "$2" || exit 125; fi
    mount --bind "$1" "$2" || exit 125
    shift 2; mounts=$((mounts - 1))
done
if [ -n "$root" ]; then
    mount -t proc proc "$root/proc" 2>/dev/null
    mount --rbind /dev "$root/dev" || exit 125
    exec chroot "$root" /bin/sh -c 'cd "$1" || exit 125; shift; exec "$@"' sh "$directory" "$@"
fi
cd "$directory" || exit 125
exec "$@"
