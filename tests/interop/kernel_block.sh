# Block devices of this kernel, connected over TCP and RDMA, used by headrace's own Python: `kernel_block_cases.py`.
for m in nvme-tcp nvme-rdma nvmet nvmet-tcp nvmet-rdma rdma_rxe dm-flakey dm-delay sd_mod target_core_mod tcm_loop; do
  modprobe $m || exit 1
done
modprobe null_blk nr_devices=0
rdma link add rxe0 type rxe netdev eth0 || exit 1

disk() {  # name: a null_blk of 64 MiB that keeps its bytes, with a volatile cache
  local n=/sys/kernel/config/nullb/$1; mkdir $n
  echo 64 > $n/size; echo 4096 > $n/blocksize; echo 1 > $n/memory_backed; echo 1 > $n/discard; echo 1 > $n/cache_size; echo 1 > $n/power
}

disk nullb1; disk nullb2
cd /sys/kernel/config/nvmet
sub=subsystems/$RDMA_NQN; mkdir $sub; echo 1 > $sub/attr_allow_any_host
ns=$sub/namespaces/1; mkdir $ns; echo -n /dev/nullb1 > $ns/device_path; echo 1 > $ns/resv_enable; echo 1 > $ns/enable
i=0
for transport in rdma tcp; do
  i=$((i + 1)); d=ports/$i; mkdir $d
  echo $transport > $d/addr_trtype; echo ipv4 > $d/addr_adrfam; echo 10.0.2.15 > $d/addr_traddr; echo $((4419 + i)) > $d/addr_trsvcid
  ln -s $PWD/$sub $d/subsystems/ || exit 1
done
grep -q tracefs /proc/mounts || mount -t tracefs trace /sys/kernel/tracing || exit 1
cd /sys/kernel/tracing/events/nvmet/nvmet_req_complete
# Commands that the kernel's target answers with Reservation Conflict, with Do Not Retry and More, and without.
echo 'status == 0x83 || status == 0x2083 || status == 0x4083 || status == 0x6083' > filter && echo 1 > enable || exit 1
cd /
(. "/share2$SETUP") || echo "no NFS"  # for a case of its own
machine_python "$CASES"
echo "---- kernel messages"; dmesg | tail -40
echo FINISHED
