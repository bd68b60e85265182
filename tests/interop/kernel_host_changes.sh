#!/bin/bash
# Runs as root in the guest: the Linux kernel host with two paths to a subsystem that changes while it is connected.
# The target is changed outside, when this script prints OUTSIDE; see guest.py.
set -u
modprobe nvme-tcp

outside() {
  echo "OUTSIDE $1"
  for _ in $(seq 600); do [ -e "/share/$1.done" ] && return 0; usleep 50000; done
  echo "nobody did $1"; return 1
}

until_so() {  # words...: a command that succeeds in the end
  for _ in $(seq 300); do "$@" > /dev/null 2>&1 && return 0; usleep 100000; done
  echo "never: $*"; return 1
}

state_is() { [ "$(cat /sys/class/nvme/nvme$1/nvme0c$1n1/ana_state)" = "$2" ]; }
size_is() { [ "$(cat /sys/block/nvme0n1/size)" = "$1" ]; }
gone() { [ ! -e "$1" ]; }
reads() { dd if="$1" of=/dev/null bs=4096 count=16 iflag=direct 2> /dev/null || { echo "cannot read $1"; return 1; }; }

connected() {
  nvme connect -t tcp -a 10.0.2.2 -s "$PORT" -n "$NQN" --nr-io-queues=1 || return 1
  nvme connect -t tcp -a 10.0.2.2 -s "$SECOND" -n "$NQN" --nr-io-queues=1 || return 1
  until_so state_is 0 optimized && until_so state_is 1 non-optimized && until_so reads /dev/nvme0n1
}

ana() {
  outside inaccessible && until_so state_is 0 inaccessible && reads /dev/nvme0n1 || return 1
  nvme ana-log /dev/nvme0 | grep -q "state.*inaccessible" || { nvme ana-log /dev/nvme0; return 1; }
  outside optimized && until_so state_is 0 optimized && reads /dev/nvme0n1
}

resize() {
  size_is 32768 && outside grow && until_so size_is 65536 && reads /dev/nvme0n1
}

namespaces() {
  outside add && until_so test -b /dev/nvme0n2 && until_so reads /dev/nvme0n2 || return 1
  outside remove && until_so gone /sys/block/nvme0n2 && reads /dev/nvme0n1
}

for case in connected ana resize namespaces; do
  echo "---- $case"
  if $case; then echo "CASE $case ok"; else echo "CASE $case FAILED"; fi
done
nvme disconnect -n "$NQN"
echo "---- kernel messages"; dmesg | grep -i nvme
echo FINISHED
