"""The black box of a rank: what its devices did lately and what training was at, kept for when it goes wrong."""

from headrace.measure.blackbox.box import BlackBox, DumpFailed
from headrace.measure.blackbox.dump import (
    Clocks,
    Dump,
    DumpedDevice,
    DumpedPath,
    DumpedStep,
    dump_name,
    read_dump,
    write_dump,
)

__all__ = [
    "BlackBox",
    "Clocks",
    "Dump",
    "DumpFailed",
    "DumpedDevice",
    "DumpedPath",
    "DumpedStep",
    "dump_name",
    "read_dump",
    "write_dump",
]
