# Sets up, in a guest: a server with a file system and a volume of one medium, a link to it, and what a client mounts.
# The server has a network namespace of its own; whoever calls this is the client. FILES and VOLUME are the two disks.
at() { echo "at $(cut -d' ' -f1 /proc/uptime) s: $*"; }
on_server() { nsenter --net=/run/netns/server "$@"; }

# An emulated CPU's own clock goes wrong where the machine is busy as it is held against another one; the medium's is outside.
echo acpi_pm > /sys/devices/system/clocksource/clocksource0/current_clocksource || exit 1
modprobe -a nvmet nvmet-tcp nfsd nfsv4 veth sch_netem ext4 || exit 1
at "modules are there"

# The link. How long and narrow it is, `inside.shape` says when all is set up.
ip netns add server
ip link add c0 mtu 9000 type veth peer name s0 mtu 9000 netns server
ip addr add 192.0.2.2/24 dev c0; ip link set c0 up
ip -n server addr add 192.0.2.1/24 dev s0; ip -n server link set s0 up; ip -n server link set lo up
# Connections as if they were long warm, for both: what waits in a queue is not lost, a pause does not make them slow, and
# nobody takes for lost what only comes late: TCP's least time-out is 200 ms, which is long beside any delay but these.
echo 0 > /sys/module/tcp_cubic/parameters/hystart
for space in "" on_server; do
  for name in tcp_slow_start_after_idle tcp_early_retrans; do $space sh -c "echo 0 > /proc/sys/net/ipv4/$name"; done
done
ip route replace 192.0.2.0/24 dev c0 src 192.0.2.2 rto_min 30s || exit 1
ip -n server route replace 192.0.2.0/24 dev s0 src 192.0.2.1 rto_min 30s || exit 1

# The file server, as good as it gets: 64 threads, transfers of 1 MiB; no delegations, for a file that is read once is none
# the faster for one, which has to be given back. Nobody has anything to reclaim.
echo 0 > /proc/sys/fs/leases-enable
mkdir -p /srv/data /nfs /var/lib/nfs; mount -o ro,noatime $FILES /srv/data || exit 1
echo 'nfs 2049/tcp' > /etc/services
printf 'tcp tpi_cots_ord v inet tcp - -\nudp tpi_clts v inet udp - -\n' > /etc/netconfig
echo '/srv/data *(ro,no_subtree_check,fsid=0,insecure,no_root_squash)' > /etc/exports
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
on_server mount -t nfsd nfsd /proc/fs/nfsd || exit 1
echo 1048576 > /proc/fs/nfsd/max_block_size
echo 10 > /proc/fs/nfsd/nfsv4leasetime; echo 10 > /proc/fs/nfsd/nfsv4gracetime
exportfs -a && on_server rpc.mountd -N 3 && on_server rpc.nfsd -N 3 64 || exit 1
at "NFS is served"

# The target, the kernel's.
cure=/sys/kernel/config/nvmet/subsystems/$CURE_NQN; port=/sys/kernel/config/nvmet/ports/77
mkdir $cure; echo 1 > $cure/attr_allow_any_host
mkdir $cure/namespaces/1; echo -n $VOLUME > $cure/namespaces/1/device_path; echo 1 > $cure/namespaces/1/enable || exit 1
mkdir $port; echo tcp > $port/addr_trtype; echo ipv4 > $port/addr_adrfam
echo 192.0.2.1 > $port/addr_traddr; echo 4420 > $port/addr_trsvcid
on_server ln -s $cure $port/subsystems/ || exit 1

# The client's mount, as good as it gets: the most connections, large transfers, attributes kept, read-ahead.
mount.nfs 192.0.2.1:/ /nfs \
  -o ro,vers=4.1,nconnect=16,rsize=1048576,wsize=1048576,noatime,nodiratime,nocto,actimeo=3600 || { dmesg | tail; exit 1; }
echo 4096 > /sys/class/bdi/$(awk '$5 == "/nfs" {print $3}' /proc/self/mountinfo)/read_ahead_kb || exit 1
grep ' /nfs ' /proc/mounts
at "mounted"
