# shellcheck shell=bash
# Sourced by what builds kernels of Debian's linux-source. Beforehand: here (this directory), and for source_tree dir (an empty
# directory), package, version; for configure source (the tree).

. "$here/served.sh"

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
# What $2 names cannot be had. Exit code 75: the archive withholds it ($1 is 75); 69: another reason, the network say.
cannot_be_had() { printf 'setup: %s cannot be had\n' "$2" >&2; [ "$1" -eq 75 ] || exit 69; exit 75; }
say() { printf 'setup: %s\n' "$*" >&2; }

tools() {
  local tool
  for tool in bc bison flex gcc make xz; do command -v "$tool" >/dev/null || fail "$tool is missing: run setup/install"; done
  [ -e /usr/include/libelf.h ] || fail 'libelf-dev is missing: run setup/install'
}

# What a build for this processor does not read: it would be 1.2 GB more.
not_needed=(--exclude='*/Documentation/*.rst' --exclude='*/Documentation/*.yaml' --exclude='*/Documentation/*.txt'
  --exclude='*/tools/testing' --exclude='*/tools/perf' --exclude='*/arch/[!x]*/*.[chS]' --exclude='*.dts' --exclude='*.dtsi'
  --exclude='*/sound/*.[ch]' --exclude='*/drivers/gpu/*.[ch]' --exclude='*/drivers/net/*/*.[ch]' --exclude='*/drivers/media/*.[ch]'
  --exclude='*/drivers/infiniband/*.[ch]' --exclude='*/drivers/staging/*.[ch]' --exclude='*/drivers/scsi/*.[ch]')

# Unpacks it into $dir/source. Asked at the places that the system's own lists name: bookworm's security archive or its backports
# have 6.12, later ones are in trixie's.
source_tree() {
  local work release backports
  case $version in
    6.12) release=bookworm backports=bookworm-backports ;;
    *) release=trixie backports=trixie-backports ;;
  esac
  work=$(mktemp -d "$dir/unpack.XXXXXX")
  # shellcheck disable=SC2064 # the directory of now
  trap "rm -rf --one-file-system '$work'" EXIT
  chmod 755 "$work"
  say "$package"
  if ! (cd "$work" && served_apt download "$package" >&2); then
    command -v mmdebstrap >/dev/null || fail 'mmdebstrap is missing: run setup/install'
    local archive lists
    archive=$("$here/archive") || cannot_be_had 1 "$package"
    mapfile -t lists < <("$here/archive" "$release")
    served_mmdebstrap "$work/root" --variant=extract --include="$package" --aptopt='Acquire::Check-Valid-Until "false"' "$release" \
      "$work/root" "${lists[@]}" "$archive $backports main" </dev/null || cannot_be_had $? "$package"
  fi
  mkdir "$work/tree"
  if [ -d "$work/root" ]; then
    cat "$work"/root/usr/src/"$package".tar.xz
  else
    dpkg-deb --fsys-tarfile "$work/$package"_*.deb | tar -xO "./usr/src/$package.tar.xz"
  fi | xz -dc -T0 | tar -x -C "$work/tree" --strip-components=1 --wildcards "${not_needed[@]}"
  mv "$work/tree" "$dir/source"
  rm -rf "$work"
  trap - EXIT
}

# Configures $1, the directory of a build, by the files behind it. Of two lines about the same option the last one counts.
configure() {
  local build=$1 line asked=$1/asked
  shift
  mkdir -p "$build"
  cat "$@" >"$asked"
  KCONFIG_ALLCONFIG=$asked make -s -C "$source" O="$build" allnoconfig >&2
  tac "$asked" | awk -F= '/^CONFIG_/ && !seen[$1]++' | while read -r line; do
    case $line in *=n) ! grep -q "^${line%=n}=" "$build/.config" ;; *) grep -qx "$line" "$build/.config" ;; esac \
      || fail "the kernel refuses $line"
  done
}
