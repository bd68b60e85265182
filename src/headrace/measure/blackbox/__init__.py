"""The black box of a rank: what its devices did lately and what training was at, kept for when it goes wrong."""

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
    "Clocks",
    "Dump",
    "DumpedDevice",
    "DumpedPath",
    "DumpedStep",
    "dump_name",
    "read_dump",
    "write_dump",
]
