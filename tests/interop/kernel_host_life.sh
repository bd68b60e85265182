# What the Linux kernel host lives through with this target. PORT and SECOND are two ways to one portal, OTHER_PORTAL is
# another. fio verifies what it reads.
modprobe nvme-tcp; modprobe xfs
mkdir -p /mnt/v

connect_all() {  # port...
  local port
  for port in "$@"; do connect -s "$port" --nr-io-queues=2 --reconnect-delay=1 --ctrl-loss-tmo=120 || return 1; done
}

live() { [ "$(cat /sys/class/nvme/nvme*/state | grep -c '^live$')" = "$1" ]; }

fio_verify() {  # name, seconds
  fio --name="$1" --filename="$device" --size=24M --rw=randwrite --bsrange=4k-128k --ioengine=libaio --iodepth=8 --direct=1 \
    --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_backlog=256 --time_based --runtime="$2" \
    --minimal --output="/tmp/$1.fio" || { cat "/tmp/$1.fio"; return 1; }
}

xfs() {
  connect_all "$PORT" || return 1
  step mkfs.xfs -q -f "$device" || return 1
  step mount -t xfs "$device" /mnt/v || return 1
  step fio --name=data --directory=/mnt/v --size=16M --rw=randwrite --bsrange=4k-256k --ioengine=libaio --iodepth=16 \
    --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=64 --minimal --output=/tmp/fio || { cat /tmp/fio; return 1; }
  (cd /mnt/v && sha256sum ./*.0) > /tmp/sums
  step umount /mnt/v || return 1
  step xfs_repair -n "$device" || return 1
  disconnect || return 1
  connect_all "$PORT" || return 1
  step mount -t xfs -o ro "$device" /mnt/v || return 1
  (cd /mnt/v && step sha256sum -c /tmp/sums) || return 1
  step umount /mnt/v && disconnect
}

restart() {
  connect_all "$PORT" || return 1
  fio_verify restart 8 & local fio=$!
  sleep 2; outside restart || return 1
  step wait $fio || return 1
  until_ 20 live 1 && disconnect
}

two_paths() {
  connect_all "$PORT" "$SECOND" || return 1
  live 2 || { echo "not two paths"; return 1; }
  fio_verify paths 11 & local fio=$!
  sleep 2; outside cut || return 1
  until_ 20 live 1 || { echo "the path is not seen as cut"; cat /sys/class/nvme/nvme*/state; return 1; }
  sleep 3; outside heal || return 1
  until_ 30 live 2 || return 1
  step wait $fio && disconnect
}

logs() {
  connect_all "$PORT" || return 1
  local c; c=/dev/$(basename "$(ls -d /sys/class/nvme/nvme* | head -1)")
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
  connect_all "$PORT" "$OTHER_PORTAL" || return 1
  fio_verify ana 9 & local fio=$!
  sleep 2; outside ana-away || return 1
  until_ 20 inaccessible 1 || { cat /sys/class/nvme/nvme*/nvme*/ana_state; return 1; }
  sleep 3; outside ana-back || return 1
  until_ 20 inaccessible 0 || return 1
  step wait $fio && disconnect
}

case_ xfs xfs
case_ restart restart
case_ two-paths two_paths
case_ logs logs
case_ ana ana
finished
