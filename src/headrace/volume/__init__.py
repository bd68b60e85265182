"""The volume: named, immutable, checksummed objects, striped over block devices. Format: `docs/volume-format.md`."""

from headrace.volume.fence import Ticket
from headrace.volume.grant import Grant, Receipt
from headrace.volume.info import MemberInfo, VolumeInfo, WriterInfo
from headrace.volume.listing import Listing
from headrace.volume.objects import ObjectInfo
from headrace.volume.session import Session
from headrace.volume.transaction import Transaction
from headrace.volume.transfer import VolumeTransfer
from headrace.volume.volume import Volume

__all__ = [
    "Grant",
    "Listing",
    "MemberInfo",
    "ObjectInfo",
    "Receipt",
    "Session",
    "Ticket",
    "Transaction",
    "Volume",
    "VolumeInfo",
    "VolumeTransfer",
    "WriterInfo",
]
