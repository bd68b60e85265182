# Scripts that run in one guest, one after another, each as in a guest of its own: PARTS names them.
nothing_left() { ! ls -d /sys/class/nvme/nvme* /sys/class/nvme-subsystem/nvme-subsys* >/dev/null 2>&1; }

for part in $PARTS; do
  dmesg -c >/dev/null
  echo "==== $part"
  (set -a; SHARE=/share/$part; . "$SHARE/env"; exec bash "$SHARE/script")
  # What failed in the middle is still connected, or has written to a disk that was gone: into a file of its name.
  umount /mnt/v 2>/dev/null
  nvme disconnect-all
  for file in /dev/nvme*n*; do [ ! -f "$file" ] || rm "$file"; done
  until_ 30 nothing_left
done
