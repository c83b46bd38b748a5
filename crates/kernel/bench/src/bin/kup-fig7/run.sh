#!/bin/bash
# In the machine: takes COUNT workers of MIB each into images one WAY, all at once, brings them back, and says how long what
# took. usage: once WAY MIB RATE COUNT
set -eu
way=$1 mib=$2 rate=$3 last=$(($4 - 1))
images=/disk/image
case $way in *pmem) images=/pmem/image ;; esac
rm -rf /disk/image /pmem/image
mkdir -p "$images"
now() { worker now; }
everyone() { seq 0 "$last"; }

# Runs something for each worker at the same time.
each() {
  local n jobs=()
  for n in $(everyone); do "$1" "$n" & jobs+=($!); done
  for n in "${jobs[@]}"; do wait "$n"; done
}

# Requests that all of them answer in a second.
load() { each load_one; awk '{ sum += $1 } END { print sum }' /run/load.*; }
load_one() { worker load 0.5 "$1" >"/run/load.$1"; }

take() {
  local dir=$images/$1 pid=${pids[$1]}
  mkdir "$dir"
  case $way in
    basic* | on-demand*) criu dump -t "$pid" -D "$dir" -j --network-lock skip -o dump.log ;;
    incremental*)
      mkdir "$dir/1" "$dir/2" "$dir/3"
      criu pre-dump -t "$pid" -D "$dir/1" -j --track-mem -o dump.log
      criu pre-dump -t "$pid" -D "$dir/2" -j --track-mem --prev-images-dir ../1 -o dump.log
      criu dump -t "$pid" -D "$dir/3" -j --network-lock skip --track-mem --prev-images-dir ../2 -o dump.log
      ;;
    foam*)
      rmdir "$dir"
      stillpoint --json kernel checkpoint --criu /usr/local/bin/criu --pid "$pid" --image "$dir" --guard none >"/run/taken.$1"
      ;;
  esac
}

# What was written while they stood.
frozen() {
  case $way in
    incremental*) cat <(du -sB1 "$images"/*/3) ;;
    foam*) sed -n 's/.*"event":"checkpointed".*"bytes_written":\([0-9]*\),"bytes_zero.*/\1/p' /run/taken.* ;;
    *) du -sB1 "$images" ;;
  esac | awk '{ sum += $1 } END { printf "%d\n", sum }'
}

# When the last image was sealed.
sealed() { sed -n 's/.*"t_ns":\([0-9]*\)[0-9]\{3\},.*"event":"phase-ended".*"phase":"seal".*/\1/p' /run/taken.* | sort -n | tail -n 1; }

bring() {
  local dir=$images/$1 filler=
  case $way in
    basic*) criu restore -d -D "$dir" -j -o restore.log ;;
    incremental*) criu restore -d -D "$dir/3" -j -o restore.log ;;
    on-demand*)
      criu lazy-pages -D "$dir" -o lazy.log &
      filler=$!
      until [ -e "$dir/lazy-pages.socket" ]; do sleep 0.01; done
      criu restore -d --lazy-pages -D "$dir" -j -o restore.log
      ;;
    foam*)
      stillpoint --json kernel restore --criu /usr/local/bin/criu --image "$dir" --guard none --verify-on-demand --fill-rate 0 >"/run/restored.$1"
      filler=$(sed -n 's/.*"event":"restored".*"keeper":\([0-9]*\).*/\1/p' "/run/restored.$1")
      ;;
  esac
  echo "$filler" >"/run/filler.$1"
}

filled() {
  local filler
  filler=$(cat "/run/filler.$1")
  while [ -n "$filler" ] && [ -e "/proc/$filler" ] && ! grep -q '^State:.*Z' "/proc/$filler/status"; do sleep 0.02; done
}

pids=() probes=()
for n in $(everyone); do
  setsid worker serve "$mib" "$rate" "$n" </dev/null >/dev/null 2>&1 &
  pids+=($!)
done
for n in $(everyone); do until [ "$(worker load 0.2 "$n")" != 0 ]; do sleep 0.1; done; done
for n in $(everyone); do
  worker probe "/run/probe.$n" "$n" &
  probes+=($!)
done
before=$(load)

begun=$(now)
each take
taken=$(now)
# what is not on disk is gone with the kernel
sync
complete=$(now)
# A switch jumps while the programs still stand: that they end has no part in it. criu's own image is whole when they have.
case $way in foam*) complete=$((complete - taken + $(sealed))) ;; esac
for n in "${pids[@]}"; do wait "$n" 2>/dev/null || true; done
stored=$(du -sB1 "$images" | cut -f1)
frozen=$(frozen)
# and so is what the kernel remembers of files; but a boot has used the programs before it comes to restore
echo 3 >/proc/sys/vm/drop_caches
find /opt/criu /usr/local/bin -type f -exec cat {} + >/dev/null

begin=$(now)
each bring
running=$(now)
each filled
filled=$(now)
after=$(load)
kill "${probes[@]}"
wait "${probes[@]}"
# the first one to fall silent, and the last one to answer again
silent=$(sort -n /run/probe.* | awk 'NR == 1 { print $1 }')
again=$(awk '$2 > most { most = $2 } END { print most }' /run/probe.*)
kill -9 "${pids[@]}"
for n in "${pids[@]}"; do while [ -e "/proc/$n" ]; do sleep 0.02; done; done
# what it takes to copy to the same place what was left for the freeze
copy=null
case $way in foam*)
  copying=$(now)
  head -c "$frozen" /dev/zero >"$images/copy"
  sync "$images/copy"
  copy=$(($(now) - copying))
  ;;
esac
printf '{"way":"%s","mib":%s,"count":%s,"passes_us":%s,"frozen_us":%s,"first_us":%s,"running_us":%s,"filled_us":%s,"copy_us":%s,"frozen_bytes":%s,"stored_bytes":%s,"before":%s,"after":%s}\n' \
  "$way" "$mib" $((last + 1)) $((silent - begun)) $((complete - silent)) $((again - begin)) $((running - begin)) $((filled - begin)) "$copy" "$frozen" "$stored" "$before" "$after"
