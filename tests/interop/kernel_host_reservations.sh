#!/bin/bash
# Runs as root in the guest: the Linux kernel host and nvme-cli hold a reservation of our target, and lose it to a host
# outside. `outside NAME` has something done outside and waits until it is done. Prints "CASE name ok" or "CASE name FAILED".
set -u
modprobe nvme-tcp
KEY=0x1234

step() { echo "+ $*"; "$@" || { echo "failed: $*"; return 1; }; }

outside() {
  echo "OUTSIDE $1"
  for _ in $(seq 600); do [ -e "/share/$1.done" ] && return 0; usleep 100000; done
  echo "nobody did $1"; return 1
}

connect() {
  step nvme connect -t tcp -a 10.0.2.2 -s "$PORT" -n "$NQN" --nr-io-queues=1 --keep-alive-tmo=5 || return 1
  device=
  for _ in $(seq 200); do
    for d in /sys/block/nvme*n1; do [ -b "/dev/${d##*/}" ] && device=/dev/${d##*/}; done
    [ -n "$device" ] && return 0
    usleep 100000
  done
  echo "no device"; return 1
}

put() { dd if=/dev/zero of="$device" bs=4096 count=1 seek="$1" oflag=direct status=none; }

hold() {
  connect || return 1
  step nvme id-ns "$device" | grep -E "^(nmic|rescap)" || return 1
  step nvme resv-register "$device" --nrkey=$KEY --rrega=0 || return 1
  step nvme resv-acquire "$device" --crkey=$KEY --rtype=3 --racqa=0 || return 1
  step nvme resv-report "$device" --eds -o json > /tmp/report || return 1
  cat /tmp/report
  grep -q '"rtype": *3' /tmp/report && grep -q '"regctl": *1' /tmp/report && grep -q '"rcsts": *1' /tmp/report || return 1
  step put 0
}

others_are_shut_out() { outside refused; }

preempted() {
  step outside preempt || return 1
  ! put 0 || { echo "written after the preempt"; return 1; }
  ! nvme resv-release "$device" --crkey=$KEY --rtype=3 --rrela=0 || { echo "released what is not held"; return 1; }
  step dd if="$device" of=/dev/null bs=4096 count=1 iflag=direct status=none
}

back_again() {
  step nvme resv-register "$device" --nrkey=$KEY --rrega=0 || return 1
  step put 0 || return 1
  step nvme resv-register "$device" --crkey=$KEY --rrega=1 || return 1
  ! put 0 || { echo "written without a registration"; return 1; }
  step nvme disconnect -n "$NQN"
}

for case in hold others_are_shut_out preempted back_again; do
  echo "---- $case"
  if $case; then echo "CASE $case ok"; else echo "CASE $case FAILED"; fi
done
echo FINISHED
