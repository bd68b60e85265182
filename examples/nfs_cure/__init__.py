"""Multimodal training that starves over NFS, and what cures it; and text, which storage does not hold up.

world.py      the cloud that is stood for, and how much slower it runs here
data.py       the same samples as files on ext4 and as a volume of headrace, on two disks of one medium
guest.sh      in the guest: link, file server, NVMe/TCP target, mounts
loaders.py    who reads: files by many threads, and headrace
bench.py      `headrace bench accelerators` on each path
inside.py     in the guest: each path measured, and trained over
judge.py      watch, bench and plan held against each other
picture.py    the table, and the page
run.py        the whole of it
"""
