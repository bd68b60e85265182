# The Linux kernel host against a target at 10.0.2.2:$PORT: for each digest setting connect, make a file system, write and
# verify with fio, check the file system, read it again after a new connect, disconnect.
modprobe nvme-tcp; modprobe ext4

attach() { connect -s "$PORT" --nr-io-queues=2 "$@"; }

discover() {
  nvme discover -t tcp -a 10.0.2.2 -s "$PORT" | tee /tmp/discovered
  grep -q "^subnqn:  *$NQN\$" /tmp/discovered || { echo "the discovery log does not name $NQN"; return 1; }
  grep -q "^trtype:  *tcp" /tmp/discovered
}

identify() {
  attach || return 1
  step nvme id-ctrl /dev/nvme0 || return 1
  step nvme id-ns "$device" || return 1
  step nvme smart-log /dev/nvme0 || return 1
  step nvme error-log /dev/nvme0 -e 1 || return 1
  step nvme get-feature /dev/nvme0 -f 7 || return 1
  cat /sys/block/${device##*/}/queue/{logical_block_size,max_hw_sectors_kb,write_cache} || return 1
  disconnect
}

filesystem() {  # options...
  attach "$@" || return 1
  step mkfs.ext4 -q -F "$device" || return 1
  mkdir -p /mnt/v; step mount -t ext4 "$device" /mnt/v || return 1
  step fio --name=random --directory=/mnt/v --size=4M --rw=randwrite --bsrange=4k-256k --ioengine=libaio --iodepth=16 \
    --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=16 --minimal --output=/tmp/fio || { cat /tmp/fio; return 1; }
  step fio --name=large --directory=/mnt/v --size=6M --rw=write --bs=1M --ioengine=libaio --iodepth=4 --direct=1 \
    --verify=crc32c --verify_fatal=1 --do_verify=1 --minimal --output=/tmp/fio || { cat /tmp/fio; return 1; }
  (cd /mnt/v && sha256sum ./*.0) > /tmp/sums
  step umount /mnt/v || return 1
  step e2fsck -f -n "$device" || return 1
  disconnect || return 1
  attach "$@" || return 1
  step mount -t ext4 -o ro "$device" /mnt/v || return 1
  (cd /mnt/v && step sha256sum -c /tmp/sums) || return 1
  step umount /mnt/v || return 1
  disconnect
}

case_ discover discover
case_ identify identify
case_ plain filesystem
case_ header-digest filesystem --hdr-digest
case_ data-digest filesystem --data-digest
case_ both-digests filesystem --hdr-digest --data-digest
finished
