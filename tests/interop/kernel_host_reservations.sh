# The Linux kernel host and nvme-cli hold a reservation of our target, and lose it to a host outside.
modprobe nvme-tcp
KEY=0x1234

put() { dd if=/dev/zero of="$device" bs=4096 count=1 seek="$1" oflag=direct status=none; }

hold() {
  connect -s "$PORT" --nr-io-queues=1 || return 1
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
  disconnect
}

for case in hold others_are_shut_out preempted back_again; do case_ $case $case; done
finished
