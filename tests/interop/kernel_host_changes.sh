# The Linux kernel host with two paths to a subsystem that changes while it is connected.
modprobe nvme-tcp

state_is() { [ "$(cat /sys/class/nvme/nvme$1/nvme0c$1n1/ana_state)" = "$2" ]; }
size_is() { [ "$(cat /sys/block/nvme0n1/size)" = "$1" ]; }
gone() { [ ! -e "$1" ]; }
reads() { dd if="$1" of=/dev/null bs=4096 count=16 iflag=direct 2> /dev/null || { echo "cannot read $1"; return 1; }; }

connected() {
  connect -s "$PORT" --nr-io-queues=1 && connect -s "$SECOND" --nr-io-queues=1 || return 1
  until_ 30 state_is 0 optimized && until_ 30 state_is 1 non-optimized && until_ 30 reads /dev/nvme0n1
}

ana() {
  outside inaccessible && until_ 30 state_is 0 inaccessible && reads /dev/nvme0n1 || return 1
  nvme ana-log /dev/nvme0 | grep -q "state.*inaccessible" || { nvme ana-log /dev/nvme0; return 1; }
  outside optimized && until_ 30 state_is 0 optimized && reads /dev/nvme0n1
}

resize() {
  size_is 32768 && outside grow && until_ 30 size_is 65536 && reads /dev/nvme0n1
}

namespaces() {
  outside add && until_ 30 test -b /dev/nvme0n2 && until_ 30 reads /dev/nvme0n2 || return 1
  outside remove && until_ 30 gone /sys/block/nvme0n2 && reads /dev/nvme0n1
}

for case in connected ana resize namespaces; do case_ $case $case; done
nvme disconnect -n "$NQN"
finished
