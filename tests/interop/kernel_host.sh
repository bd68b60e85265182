#!/bin/bash
# Runs as root in the guest. The Linux kernel host against a target at 10.0.2.2:$PORT: for each digest setting connect,
# make a file system, write and verify with fio, check the file system, read it again after a new connect, disconnect.
# Prints "CASE name ok" or "CASE name FAILED: why"; everything else is for whoever reads a failure.
set -u
modprobe nvme-tcp; modprobe ext4
target="-t tcp -a 10.0.2.2 -s $PORT"

wait_for_device() {
  for _ in $(seq 100); do
    [ -b "$device" ] && return 0
    usleep 100000
  done
  echo "no $device after connect"; return 1
}

connect() {  # options...
  nvme connect $target -n "$NQN" --nr-io-queues=2 --keep-alive-tmo=5 "$@" || return 1
  device=
  for _ in $(seq 100); do
    for d in /sys/block/nvme*n1; do [ -e "$d" ] && device=/dev/${d##*/}; done
    [ -n "$device" ] && break
    usleep 100000
  done
  [ -n "$device" ] && wait_for_device
}

step() { echo "+ $*"; "$@" || { echo "failed: $*"; return 1; }; }

discover() {
  nvme discover $target | tee /tmp/discovered
  grep -q "^subnqn:  *$NQN\$" /tmp/discovered || { echo "the discovery log does not name $NQN"; return 1; }
  grep -q "^trtype:  *tcp" /tmp/discovered
}

identify() {
  connect || return 1
  step nvme id-ctrl /dev/nvme0 || return 1
  step nvme id-ns "$device" || return 1
  step nvme smart-log /dev/nvme0 || return 1
  step nvme error-log /dev/nvme0 -e 1 || return 1
  step nvme get-feature /dev/nvme0 -f 7 || return 1
  cat /sys/block/${device##*/}/queue/{logical_block_size,max_hw_sectors_kb,write_cache} || return 1
  step nvme disconnect -n "$NQN"
}

filesystem() {  # options...
  connect "$@" || return 1
  step mkfs.ext4 -q -F "$device" || return 1
  mkdir -p /mnt/v; step mount -t ext4 "$device" /mnt/v || return 1
  step fio --name=random --directory=/mnt/v --size=12M --rw=randwrite --bsrange=4k-256k --ioengine=libaio --iodepth=16 \
    --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=64 --minimal --output=/tmp/fio || { cat /tmp/fio; return 1; }
  step fio --name=large --directory=/mnt/v --size=16M --rw=write --bs=1M --ioengine=libaio --iodepth=4 --direct=1 \
    --verify=crc32c --verify_fatal=1 --do_verify=1 --minimal --output=/tmp/fio || { cat /tmp/fio; return 1; }
  (cd /mnt/v && sha256sum ./*.0) > /tmp/sums
  step umount /mnt/v || return 1
  step e2fsck -f -n "$device" || return 1
  step nvme disconnect -n "$NQN" || return 1
  connect "$@" || return 1
  step mount -t ext4 -o ro "$device" /mnt/v || return 1
  (cd /mnt/v && step sha256sum -c /tmp/sums) || return 1
  step umount /mnt/v || return 1
  step nvme disconnect -n "$NQN"
}

case_() {  # name, command...
  local name=$1 begun=$(cut -d. -f1 /proc/uptime); shift
  echo "---- $name"
  if "$@"; then echo "CASE $name ok ($(($(cut -d. -f1 /proc/uptime) - begun)) s)"; else
    echo "CASE $name FAILED"; dmesg | tail -12 | cut -c1-160
    umount /mnt/v 2>/dev/null; nvme disconnect -n "$NQN" >/dev/null 2>&1
  fi
}

case_ discover discover
case_ identify identify
case_ plain filesystem
case_ header-digest filesystem --hdr-digest
case_ data-digest filesystem --data-digest
case_ both-digests filesystem --hdr-digest --data-digest
echo "---- kernel messages"
dmesg | grep -i -E "nvme|i/o error|ext4|call trace" | grep -v -E "new ctrl|Removing ctrl|mapped|creating|Supports|mount" | tail -40
echo FINISHED
