# packages.sh run|install VERSION: run in a fresh root, with packages in /packages/old (of that version) and /packages/new, and the program
# of `make install` as /packages/stillpoint.
set -eu

what=$1 before=$2
fail() { echo "packages: $*" >&2; exit 1; }
# Everything that is there, except the state of dpkg and apt.
files() {
  find / -xdev \( -path /proc -o -path /dev -o -path /packages -o -path /tmp -o -path /var/lib/dpkg -o -path /var/lib/apt \
    -o -path /var/cache/apt -o -path /var/cache/debconf -o -path /var/cache/ldconfig -o -path /var/log -o -path '/etc/*-' \
    -o -path /etc/ld.so.cache -o -path /etc/.pwd.lock -o -path /run/systemd \) -prune -o -print | sort
  cat /etc/passwd /etc/group
}
works() {
  "$@" --version | grep -q '^stillpoint [0-9]' || fail "$1 has no version"
  "$@" patch list >/dev/null || fail "$1 lists no patches"
  "$@" migrate run --help >/dev/null
  # a name is looked up by the C library that is part of it: this system may have another
  said=$("$@" measure redis --addr localhost:1 --rate 1 --duration 1 2>&1) && fail 'a load without a server'
  case $said in *efused* | *onnect*) ;; *) fail "localhost: $said" ;; esac
}

works /packages/stillpoint
[ "$what" = install ] || exit 0

files >/tmp/before
apt-get install -qq -y /packages/old/stillpoint_*.deb >/tmp/log 2>&1 || { cat /tmp/log; fail 'apt does not install it'; }
works stillpoint
[ "$(dpkg-query -W -f '${Version}' stillpoint)" = "$before" ] || fail 'not the version before'
[ "$(dpkg-query -W -f '${Conffiles}' stillpoint | wc -w)" -ge 4 ] || fail 'its configuration is none of dpkg'
echo '# mine' >>/etc/default/stillpoint
touch /etc/stillpoint/keys/mine.pub

apt-get install -qq -y /packages/new/*.deb >/tmp/log 2>&1 || { cat /tmp/log; fail 'apt does not upgrade it'; }
works stillpoint
[ "$(dpkg-query -W -f '${Version}' stillpoint)" != "$before" ] || fail 'not upgraded'
grep -q '^# mine$' /etc/default/stillpoint || fail 'the upgrade changed the configuration'
id -u _stillpoint >/dev/null || fail 'there is no user for the proxy'
[ "$(stat -c %U /run/stillpoint /run/stillpoint/proxy | paste -sd,)" = root,_stillpoint ] || fail 'directories of sockets'
systemd-analyze verify --man=no /usr/lib/systemd/system/stillpoint-exec.socket /usr/lib/systemd/system/stillpoint-proxy@.service \
  >/tmp/log 2>&1 || { cat /tmp/log; fail 'a unit is not valid'; }
bash -c '. /usr/share/bash-completion/completions/stillpoint && COMP_WORDS=(stillpoint patch app) COMP_CWORD=2 &&
  _stillpoint stillpoint app patch && [ "${COMPREPLY[*]}" = apply ]' || fail 'bash completes nothing'
[ -s /usr/share/zsh/vendor-completions/_stillpoint ] && [ -s /usr/share/fish/vendor_completions.d/stillpoint.fish ] || fail 'completions'

# state that a life with it leaves, and a unit that starts through it
mkdir -p /var/lib/stillpoint/switch /var/cache/stillpoint/setup /etc/systemd/system/served.service.d
touch /var/lib/stillpoint/image.key /var/lib/stillpoint/switch/journal /run/stillpoint/exec.sock
ln -s /usr/lib/systemd/system/stillpoint-proxy@.service /etc/systemd/system/multi-user.target.wants/stillpoint-proxy@a.service
printf '[Service]\nExecStart=/bin/true\n' >/etc/systemd/system/served.service
printf '[Service]\nExecStart=\nExecStart=/usr/bin/stillpoint patch exec -- /bin/true\n' >/etc/systemd/system/served.service.d/90-stillpoint.conf

apt-get remove -qq -y stillpoint >/tmp/log 2>&1 || { cat /tmp/log; fail 'apt does not remove it'; }
[ ! -e /usr/bin/stillpoint ] || fail 'the program is still there'
[ ! -e /etc/systemd/system/served.service.d ] || fail 'a unit starts through a program that is gone'
[ -e /etc/default/stillpoint ] && [ -e /etc/stillpoint/keys/mine.pub ] && [ -e /var/lib/stillpoint/image.key ] || fail 'removed what belongs to a purge'
rm /etc/systemd/system/served.service

apt-get purge -qq -y stillpoint libstillpoint1 libstillpoint-dev >/tmp/log 2>&1 || { cat /tmp/log; fail 'apt does not purge it'; }
files >/tmp/after
diff /tmp/before /tmp/after >/tmp/log || { cat /tmp/log; fail 'the purge left something, or took it'; }
