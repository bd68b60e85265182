#!/bin/bash
# Runs as root in the guest: what the Linux kernel host lives through with this target. PORT and SECOND are
# two ways to one portal, OTHER_PORTAL is another.
# `outside NAME` has something done outside and waits until it is done. Prints "CASE name ok" or "CASE name FAILED".
set -u
modprobe nvme-tcp; modprobe ext4; modprobe xfs
mkdir -p /mnt/v
options="--nr-io-queues=2 --keep-alive-tmo=5 --reconnect-delay=1 --ctrl-loss-tmo=120"

step() { echo "+ $*"; "$@" || { echo "failed: $*"; return 1; }; }

outside() {
  echo "OUTSIDE $1"
  for _ in $(seq 600); do [ -e "/share/$1.done" ] && return 0; usleep 100000; done
  echo "nobody did $1"; return 1
}

until_() {  # seconds, command...
  local tries=$(($1 * 10)); shift
  for _ in $(seq $tries); do "$@" >/dev/null 2>&1 && return 0; usleep 100000; done
  echo "never came true: $*"; return 1
}

connect() {  # port...
  local port; device=
  for port in "$@"; do step nvme connect -t tcp -a 10.0.2.2 -s "$port" -n "$NQN" $options || return 1; done
  found() { for d in /sys/block/nvme*n1; do [ -b /dev/${d##*/} ] && device=/dev/${d##*/}; done; [ -n "$device" ]; }
  until_ 20 found
}

disconnect() { step nvme disconnect -n "$NQN"; }

live() { [ "$(cat /sys/class/nvme/nvme*/state | grep -c '^live$')" = "$1" ]; }

fio_verify() {  # name, seconds
  fio --name="$1" --filename="$device" --size=24M --rw=randwrite --bsrange=4k-128k --ioengine=libaio --iodepth=8 --direct=1 \
    --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_backlog=256 --time_based --runtime="$2" \
    --minimal --output="/tmp/$1.fio" || { cat "/tmp/$1.fio"; return 1; }
}

xfs() {
  connect "$PORT" || return 1
  step mkfs.xfs -q -f "$device" || return 1
  step mount -t xfs "$device" /mnt/v || return 1
  step fio --name=data --directory=/mnt/v --size=16M --rw=randwrite --bsrange=4k-256k --ioengine=libaio --iodepth=16 \
    --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=64 --minimal --output=/tmp/fio || { cat /tmp/fio; return 1; }
  (cd /mnt/v && sha256sum ./*.0) > /tmp/sums
  step umount /mnt/v || return 1
  step xfs_repair -n "$device" || return 1
  disconnect || return 1
  connect "$PORT" || return 1
  step mount -t xfs -o ro "$device" /mnt/v || return 1
  (cd /mnt/v && step sha256sum -c /tmp/sums) || return 1
  step umount /mnt/v && disconnect
}

restart() {
  connect "$PORT" || return 1
  fio_verify restart 12 & local fio=$!
  sleep 3; outside restart || return 1
  step wait $fio || return 1
  until_ 20 live 1 && disconnect
}

two_paths() {
  connect "$PORT" "$SECOND" || return 1
  live 2 || { echo "not two paths"; return 1; }
  fio_verify paths 14 & local fio=$!
  sleep 3; outside cut || return 1
  sleep 3; live 1 || { echo "the path is not seen as cut"; cat /sys/class/nvme/nvme*/state; return 1; }
  outside heal || return 1
  until_ 30 live 2 || return 1
  step wait $fio && disconnect
}

controller() { echo "/dev/$(basename "$(ls -d /sys/class/nvme/nvme* | head -1)")"; }

logs() {
  connect "$PORT" || return 1
  local c; c=$(controller)
  step nvme id-ctrl "$c" || return 1
  step nvme id-ns "$device" || return 1
  step nvme ns-descs "$device" || return 1
  step nvme list-ns "$c" || return 1
  step nvme smart-log "$c" || return 1
  step nvme error-log "$c" -e 1 || return 1
  step nvme effects-log "$c" || return 1
  step nvme changed-ns-list-log "$c" || return 1
  step nvme ana-log "$c" | tee /tmp/ana || return 1
  grep -q -i optimized /tmp/ana || return 1
  step nvme resv-report "$device" --eds || return 1
  disconnect
}

inaccessible() { [ "$(cat /sys/class/nvme/nvme*/nvme*/ana_state | grep -c '^inaccessible$')" = "$1" ]; }

ana() {
  connect "$PORT" "$OTHER_PORTAL" || return 1
  fio_verify ana 14 & local fio=$!
  sleep 2; outside ana-away || return 1
  until_ 20 inaccessible 1 || { cat /sys/class/nvme/nvme*/nvme*/ana_state; return 1; }
  sleep 3; outside ana-back || return 1
  until_ 20 inaccessible 0 || return 1
  step wait $fio && disconnect
}

sectors() { [ "$(cat "/sys/block/${device##*/}/size")" = "$1" ]; }

namespaces() {
  connect "$PORT" || return 1
  local first=$device
  device=${first%n1}n2
  outside add || return 1
  until_ 20 test -b "$device" || return 1
  step fio --name=added --filename="$device" --size=2M --rw=write --bs=64k --ioengine=libaio --direct=1 --verify=crc32c \
    --do_verify=1 --minimal --output=/tmp/fio || return 1
  until_ 5 sectors 16384 || return 1
  outside resize || return 1
  until_ 20 sectors 32768 || { cat "/sys/block/${device##*/}/size"; return 1; }
  outside remove || return 1
  until_ 20 test ! -b "$device" || return 1
  device=$first
  disconnect
}

reservations() {
  connect "$PORT" || return 1
  step nvme resv-register "$device" --nrkey=0xabc --rrega=0 || return 1
  step nvme resv-acquire "$device" --crkey=0xabc --rtype=1 --racqa=0 || return 1
  step nvme resv-report "$device" --eds | tee /tmp/report || return 1
  grep -q -i 'rkey *: *abc\|rkey *: *0xabc' /tmp/report || { echo "the key is not in the report"; return 1; }
  outside conflict || return 1
  step nvme resv-release "$device" --crkey=0xabc --rtype=1 --rrela=0 || return 1
  outside no-conflict || return 1
  step nvme resv-register "$device" --crkey=0xabc --rrega=1 || return 1
  disconnect
}

case_() {  # name, command...
  local name=$1 begun=$(cut -d. -f1 /proc/uptime); shift
  echo "---- $name"
  if "$@"; then echo "CASE $name ok ($(($(cut -d. -f1 /proc/uptime) - begun)) s)"; else
    echo "CASE $name FAILED"; dmesg | tail -25 | cut -c1-160
    umount /mnt/v 2>/dev/null; nvme disconnect -n "$NQN" >/dev/null 2>&1
  fi
}

case_ xfs xfs
case_ restart restart
case_ two-paths two_paths
case_ logs logs
case_ ana ana
case_ namespaces namespaces
case_ reservations reservations
echo "---- kernel messages"
dmesg | grep -i -E "nvme|i/o error|ext4|xfs|call trace" | tail -60
echo FINISHED
