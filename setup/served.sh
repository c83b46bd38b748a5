#!/usr/bin/env bash
# Sourced: apt-get and mmdebstrap for an archive whose lists name versions that it does not serve.
#   served_apt ARGUMENT...               runs `apt-get ARGUMENT...`
#   served_file OPTION... URL FILE SUM   downloads one file, whose exit code is 75 where the archive answers 404
#   served_mmdebstrap ROOT ARGUMENT...   runs `mmdebstrap ARGUMENT...`, which makes the directory ROOT
# A version of which a file answers 404 is pinned away, with all packages of the same source and version, and the command runs
# again, several times if need be; what is left out is printed. Any other failure to fetch (name resolution, time-out, proxy) says
# nothing about the archive: the command fails as it did. Exit code 75: the archive withholds what the command needs.
# The array served_by (sudo, say) precedes apt-get. Executed, not sourced, it is one command: setup/served.sh apt ARGUMENT...

served_by=()
# Preferences for apt, and what they leave out, for the rest of the script.
served_preferences=
served_left_out=()
SERVED_ROUNDS=12

# Reads what apt printed. A line `SOURCE PACKAGE VERSION` for each file that was not found; fails where anything else was not fetched.
served_not_found() {
  local url answer file name package version source
  sed -nE "s/^[EW]: Failed to fetch ([^ ]+) +/\1 /p" | sort -u | while read -r url answer; do
    case $answer in 404\ * | 410\ *) ;; *) return 1 ;; esac
    # a source or a list is not for preferences to leave out
    case $url in *_*_*.deb) ;; *) return 1 ;; esac
    printf -v file '%b' "$(sed 's/\\/\\\\/g; s/%\([0-9A-Fa-f][0-9A-Fa-f]\)/\\x\1/g' <<<"$url")"
    name=${file##*/} source=${file%/*} package=${name%%_*} version=${name#*_}
    version=${version%_*}
    case $file in */pool/*) source=${source##*/} ;; *) source=$package ;; esac
    [[ $source =~ ^[a-z0-9][a-z0-9.+-]*$ && $package =~ ^[a-z0-9][a-z0-9.+-]*$ && $version =~ ^[A-Za-z0-9][A-Za-z0-9.+~:-]*$ ]] || return 1
    printf '%s %s %s\n' "$source" "$package" "$version"
  done
}

# Adds preferences for what the output in file $1 names. 0: run it again; 75: nothing is left to leave out; else it is another failure.
served_leave_out() {
  local found source package version entry new=
  found=$(served_not_found <"$1") || return 1
  # All was fetched that was asked for; what was left out may be all that there is.
  [ -n "$found" ] || { [ "${#served_left_out[@]}" -eq 0 ] && return 1; return 75; }
  while read -r source package version; do
    entry="$package $version"
    case " ${served_left_out[*]/%/,} " in *" $entry, "*) continue ;; esac
    new=1
    served_left_out+=("$entry")
    printf 'setup: %s %s is listed, and the archive does not serve it (404); left out\n' "$package" "$version" >&2
    # In a file's name there is no epoch.
    served_preferences+="Package: src:$source $package"$'\n'"Pin: version $version"$'\n'"Pin-Priority: -1"$'\n\n'
    served_preferences+="Package: src:$source $package"$'\n'"Pin: version /^[0-9]+:$(sed 's/[.+]/[&]/g' <<<"$version")$/"$'\n'"Pin-Priority: -1"$'\n\n'
  done <<<"$found"
  [ -n "$new" ] || return 75
}

# Writes the preferences to file $1, before the system's own: of two that match, the first one counts.
served_write() {
  printf '%s' "$served_preferences" >"$1"
  [ ! -f /etc/apt/preferences ] || cat /etc/apt/preferences >>"$1"
  chmod 644 "$1"
}

served_apt() {
  local work code=0 round
  work=$(mktemp -d) || return 1
  chmod 755 "$work"
  for ((round = 0; round < SERVED_ROUNDS; round++)); do
    code=0
    served_write "$work/preferences"
    "${served_by[@]}" env LC_ALL=C apt-get -o Dir::Etc::Preferences="$work/preferences" "$@" 2>"$work/errors" || code=$?
    [ "$code" -ne 0 ] || break
    served_leave_out "$work/errors" && continue
    [ $? -ne 75 ] || code=75
    break
  done
  cat "$work/errors" >&2
  rm -rf "$work"
  return "$code"
}

served_file() {
  local errors code=0
  errors=$(LC_ALL=C /usr/lib/apt/apt-helper "${@:1:$#-3}" download-file "${@: -3}" 2>&1) || code=$?
  [ "$code" -ne 0 ] || return 0
  printf '%s\n' "$errors" >&2
  ! grep -qE '^E: Failed to fetch [^ ]+ +(404|410) ' <<<"$errors" || return 75
  return "$code"
}

served_mmdebstrap() {
  local root=$1 work code=0 round argument arguments=()
  shift
  # With it mmdebstrap keeps to itself what apt printed.
  for argument in "$@"; do [ "$argument" = --quiet ] || arguments+=("$argument"); done
  work=$(mktemp -d) || return 1
  chmod 755 "$work"
  # shellcheck disable=SC2016 # $1 is for mmdebstrap's shell
  local remove='rm -f "$1/etc/apt/preferences.d/00served"'
  for ((round = 0; round < SERVED_ROUNDS; round++)); do
    code=0
    printf '%s' "$served_preferences" >"$work/preferences"
    chmod 644 "$work/preferences"
    LC_ALL=C mmdebstrap --setup-hook="mkdir -p \"\$1/etc/apt/preferences.d\"" \
      --setup-hook="cp '$work/preferences' \"\$1/etc/apt/preferences.d/00served\"" --customize-hook="$remove" \
      "${arguments[@]}" >"$work/output" 2>&1 || code=$?
    [ "$code" -ne 0 ] || break
    served_leave_out "$work/output" && { served_clear "$root"; continue; }
    [ $? -ne 75 ] || code=75
    break
  done
  [ "$code" -eq 0 ] || tail -n 40 "$work/output" >&2
  rm -rf "$work"
  return "$code"
}

# Empties a root that was not finished. Never into what is mounted below.
served_clear() {
  [ ! -e "$1" ] || rm -rf --one-file-system "$1"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  what=${1:-}
  shift || true
  case $what in apt | mmdebstrap) "served_$what" "$@" ;; *) echo 'usage: setup/served.sh apt|mmdebstrap ARGUMENT...' >&2; exit 2 ;; esac
fi
