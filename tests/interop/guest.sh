#!/bin/bash
# What the scripts that run in the guest share; `run_in_guest` puts it in front of each. A script is cases, run by `case_`:
# "CASE name ok" or "CASE name FAILED" is what the tests look for, everything else is for whoever reads a failure.
set -u
: "${SHARE:=/share}"

step() { echo "+ $*"; "$@" || { echo "failed: $*"; return 1; }; }

outside() {  # name: has something done outside, see guest.py, and waits until it is done
  echo "OUTSIDE $1"
  for _ in $(seq 600); do
    [ -e "$SHARE/$1.done" ] && return 0
    [ -e "$SHARE/$1.failed" ] && { echo "$1 failed outside"; return 1; }
    usleep 100000
  done
  echo "nobody did $1"; return 1
}

until_() {  # seconds, command...: until it succeeds
  local tries=$(($1 * 10)); shift
  for _ in $(seq $tries); do "$@" >/dev/null 2>&1 && return 0; usleep 100000; done
  echo "never came true: $*"; return 1
}

connect() {  # options...: nvme connect; `device` is the namespace's disk
  step nvme connect -t tcp -a 10.0.2.2 -n "$NQN" --keep-alive-tmo=5 "$@" || return 1
  until_ 20 find_device
}

find_device() {
  device=
  for d in /sys/block/nvme*n1; do [ -b "/dev/${d##*/}" ] && device=/dev/${d##*/}; done
  [ -n "$device" ]
}

disconnect() { step nvme disconnect -n "$NQN"; }

machine_python() {  # arguments...: the Python outside with its packages, here; /share is its /mnt, our programs are in /proc/1/root
  local d
  for d in proc sys dev run; do mount --bind /$d /share2/$d; done
  mount --bind /share /share2/mnt
  chroot /share2 /usr/bin/env PYTHONPATH="$MACHINE_PATH" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TMPDIR=/run \
    "$MACHINE_PYTHON" "$@"
}

case_() {  # name, command...
  local name=$1 begun=$(cut -d. -f1 /proc/uptime); shift
  echo "---- $name"
  if "$@"; then echo "CASE $name ok ($(($(cut -d. -f1 /proc/uptime) - begun)) s)"; else
    echo "CASE $name FAILED"; dmesg | tail -25 | cut -c1-160
    umount /mnt/v 2>/dev/null; nvme disconnect -n "$NQN" >/dev/null 2>&1
  fi
}

finished() {
  echo "---- kernel messages"
  dmesg | grep -i -E "nvme|i/o error|ext4|xfs|call trace" | grep -v -E "new ctrl|Removing ctrl|mapped|creating|Supports|mount" | tail -60
  echo FINISHED
}
