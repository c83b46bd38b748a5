# container.sh IMAGE DIRECTORY GROUP: systemd of a file system's image as the first process of its own namespaces. Run as the first
# process of new mount, PID, IPC, UTS and network namespaces. The image stays as it is: what is written goes to memory.
set -eu
image=$1 at=$2 group=$3

# Systemd takes the group that it is in for the whole tree.
if [ -n "$group" ]; then
  echo 0 >"$group/cgroup.procs"
  exec unshare --cgroup -- sh "$0" "$image" "$at" ''
fi

mount -t tmpfs -o mode=0755 tmpfs "$at"
cd "$at"
mkdir lower upper work root
mount -o loop,ro,noload "$image" lower
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay root
cd root
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for memory in run tmp dev; do mount -t tmpfs -o mode=0755 tmpfs "$memory"; done
chmod 1777 tmp
mkdir dev/pts dev/shm run/old
chmod 1777 dev/shm
for device in null zero full random urandom tty; do
  : >"dev/$device"
  mount --bind "/dev/$device" "dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
# Units of the emulated machine, which has a network card and a second serial line.
for unit in guest-network guest-shell; do ln -sf /dev/null "etc/systemd/system/$unit.service"; done
ip link set lo up
# In a changed root no process may make a user namespace, and units with PrivateUsers= could not start.
pivot_root . run/old
cd /
umount -l /run/old
exec env -i container=stillpoint PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --log-target=null systemd.unit=multi-user.target
