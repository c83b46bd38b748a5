#!/bin/bash
# In the machine: takes a worker of MIB into an image one WAY and brings it back, and says how long what took.
# usage: once WAY MIB RATE
set -eu
way=$1 mib=$2 rate=$3
dir=/disk/image
case $way in *pmem) dir=/pmem/image ;; esac
rm -rf /disk/image /pmem/image
mkdir -p "$dir"
now() { worker now; }

setsid worker serve "$mib" "$rate" </dev/null >/dev/null 2>&1 &
pid=$!
until [ "$(worker load 0.2)" != 0 ]; do sleep 0.1; done
worker probe /run/probe &
probe=$!
before=$(worker load 3)

begun=$(now)
last=$dir
case $way in
  basic* | on-demand*) criu dump -t $pid -D "$dir" -j --network-lock skip -o dump.log ;;
  incremental*)
    mkdir "$dir/1" "$dir/2" "$dir/3"
    last=$dir/3
    criu pre-dump -t $pid -D "$dir/1" -j --track-mem -o dump.log
    criu pre-dump -t $pid -D "$dir/2" -j --track-mem --prev-images-dir ../1 -o dump.log
    criu dump -t $pid -D "$last" -j --network-lock skip --track-mem --prev-images-dir ../2 -o dump.log
    ;;
  foam*)
    rmdir "$dir"
    stillpoint --json kernel checkpoint --criu /usr/local/bin/criu --pid $pid --image "$dir" --guard none >/run/taken
    ;;
esac
# what is not on disk is gone with the kernel
sync
complete=$(now)
wait $pid 2>/dev/null || true
stored=$(du -sB1 "$dir" | cut -f1)
frozen=$(du -sB1 "$last" | cut -f1)
case $way in foam*) frozen=$(sed -n 's/.*"event":"checkpointed".*"bytes_written":\([0-9]*\),"bytes_zero.*/\1/p' /run/taken) ;; esac
# and so is what the kernel remembers of files
echo 3 >/proc/sys/vm/drop_caches

begin=$(now)
filler=
case $way in
  basic* | incremental*) criu restore -d -D "$last" -j -o restore.log ;;
  on-demand*)
    criu lazy-pages -D "$dir" -o lazy.log &
    filler=$!
    until [ -e "$dir/lazy-pages.socket" ]; do sleep 0.01; done
    criu restore -d --lazy-pages -D "$dir" -j -o restore.log
    ;;
  foam*)
    stillpoint --json kernel restore --criu /usr/local/bin/criu --image "$dir" --guard none --verify-on-demand --fill-rate 0 >/run/restored
    filler=$(sed -n 's/.*"event":"restored".*"keeper":\([0-9]*\).*/\1/p' /run/restored)
    ;;
esac
running=$(now)
while [ -n "$filler" ] && [ -e "/proc/$filler" ] && ! grep -q '^State:.*Z' "/proc/$filler/status"; do sleep 0.02; done
filled=$(now)
after=$(worker load 3)
kill $probe
wait $probe
read -r silent again </run/probe
kill -9 $pid
while [ -e /proc/$pid ]; do sleep 0.02; done
printf '{"way":"%s","mib":%s,"passes_us":%s,"frozen_us":%s,"first_us":%s,"running_us":%s,"filled_us":%s,"frozen_bytes":%s,"stored_bytes":%s,"before":%s,"after":%s}\n' \
  "$way" "$mib" $((silent - begun)) $((complete - silent)) $((again - begin)) $((running - begin)) $((filled - begin)) "$frozen" "$stored" "$before" "$after"
