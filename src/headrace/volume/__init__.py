"""The volume: named, immutable, checksummed objects, striped over block devices. Format: `docs/volume-format.md`."""

from headrace.volume.catalog.listing import Listing
from headrace.volume.data.objects import ObjectInfo
from headrace.volume.info import MemberInfo, VolumeInfo, WriterInfo
from headrace.volume.transfer import VolumeTransfer
from headrace.volume.volume import Volume
from headrace.volume.writing.fence import Ticket
from headrace.volume.writing.grant import Grant, Receipt
from headrace.volume.writing.parts import Parts
from headrace.volume.writing.session import Session
from headrace.volume.writing.transaction import Transaction

__all__ = [
    "Grant",
    "Listing",
    "MemberInfo",
    "ObjectInfo",
    "Parts",
    "Receipt",
    "Session",
    "Ticket",
    "Transaction",
    "Volume",
    "VolumeInfo",
    "VolumeTransfer",
    "WriterInfo",
]
