"""Which copies of the log count, and whether the members have one history.

An **epoch** is a time in which the same copies of the log count. A session that finds one of them missing writes the
next epoch on the members that are there before it writes a record; so does one that has rebuilt a copy. Every member
says which epoch it knows as the current one, and which there were before. So

* the member with the highest epoch is right, if the epochs of all others are among those before: they were left behind,
  and a copy of the log on such a member is not read, and rebuilt by the next session;
* else two sets of members went on without each other, and neither is right: the volume is refused, until somebody says
  whose history goes on (`keep`). The other one is given up by the next epoch, which names it among those before.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone

from headrace.errors import MemberMissing, VolumeDiverged
from headrace.volume import layout
from headrace.volume.layout import Epoch, Superblock


def newest(blocks: Mapping[int, Superblock], keep: int | None = None) -> tuple[Superblock, list[Epoch]]:
    """Of the members' own superblocks, by member: the one that is right, and the epochs of those that have another
    history, where `keep` is the member whose history goes on. VolumeDiverged; MemberMissing where `keep` is."""
    said = [*blocks.values()]
    if keep is not None:
        if keep not in blocks:
            raise MemberMissing("the member whose history is to be kept is missing", found=f"no member {keep}")
        said = [block for block in said if known(block, blocks[keep])]
    best = max(said, key=lambda block: (block.epoch.number, block.generation, -block.member_index))
    strangers = [block for block in blocks.values() if not known(best, block)]
    if strangers and keep is None:
        other = strangers[0]
        raise VolumeDiverged(
            "members of the volume went on without each other, and each side has commits that the other does not know",
            where=f"member {best.member_index} and member {other.member_index}",
            found=f"{_told(best)}; {_told(other)}",
            next_step="look at each side without the other (degraded=True, --degraded), copy what only one of them has "
            "(`headrace volume cp`, `headrace volume salvage`), then give that one up: keep=MEMBER "
            "(`headrace volume takeover --keep MEMBER`) names a member of the side that goes on",
        )
    return best, [block.epoch for block in strangers]


def known(best: Superblock, block: Superblock) -> bool:
    """Is the current epoch of `block` that of `best`, or one before?"""
    if any(epoch.same(block.epoch) for epoch in best.epochs):
        return True
    # Kept are the last ones: what is older is not told apart any more. It matters where there is a log copy.
    oldest = best.epochs[-1].number
    forgotten = len(best.epochs) == layout.MAX_EPOCHS and block.epoch.number < oldest
    return forgotten and block.member_index not in block.log_member


def counting(superblock: Superblock, blocks: Mapping[int, Superblock]) -> tuple[int, ...]:
    """The log copies that count and are there. MemberMissing where none of them is."""
    epoch = superblock.epoch
    copies = tuple(
        copy
        for copy in range(layout.LOG_COPIES)
        if epoch.counts(copy) and (own := blocks.get(superblock.log_member[copy])) is not None and own.epoch.same(epoch)
    )
    if not copies:
        wanted = sorted({superblock.log_member[copy] for copy in range(layout.LOG_COPIES) if epoch.counts(copy)})
        left = [block for index, block in sorted(blocks.items()) if index in superblock.log_member]
        raise MemberMissing(
            "no copy of the volume's log is there that counts",
            expected=f"{_told(superblock)}: member {' or '.join(map(str, wanted))}",
            found="; ".join(map(_told, left)) or "no member with a copy of the log",
            next_step="give that member's address, too; `headrace volume salvage` shows what an older copy knows",
        )
    return copies


def lagging(superblock: Superblock, blocks: Mapping[int, Superblock]) -> list[int]:
    """Members that were not there when the current epoch began."""
    return [index for index, block in sorted(blocks.items()) if not block.epoch.same(superblock.epoch)]


def _told(block: Superblock) -> str:
    return f"member {block.member_index} knows {said(block.epoch)}"


def said(epoch: Epoch) -> str:
    """For people."""
    began = datetime.fromtimestamp(epoch.began_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"epoch {epoch.number} ({epoch.identity[:4].hex()}, since {began})"
