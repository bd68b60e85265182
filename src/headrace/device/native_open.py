"""How the native engine opens what an address names."""

from __future__ import annotations

from pathlib import Path

from headrace import _native
from headrace.device.address import Address, BlockAddress, FileAddress, MemoryAddress
from headrace.device.kernel import users_of
from headrace.errors import DeviceError, UsageError
from headrace.settings import HostIdentity, host_identity, inflight_bytes, kept_events


def open_native(address: Address, read_only: bool, identity: HostIdentity | None) -> _native.Device:
    if isinstance(address, MemoryAddress):
        if read_only:
            raise UsageError(
                "a new mem: device holds nothing to read", where=address.uri, next_step="open it without read_only"
            )
        return _native.open_memory(address.size_bytes, block_bytes=address.block_bytes, **_ring())
    if isinstance(address, FileAddress):
        return _open_file(address, read_only)
    if isinstance(address, BlockAddress):
        return _open_block(address, read_only)
    identity = identity or host_identity()
    options = address.options
    return _native.open_nvme_tcp(
        list(address.portals),
        address.subsysnqn,
        options.nsid,
        uuid=options.uuid.bytes if options.uuid else None,
        nguid=bytes.fromhex(options.nguid) if options.nguid else None,
        hostnqn=identity.hostnqn,
        hostid=identity.hostid.bytes,
        header_digest=options.header_digest,
        data_digest=options.data_digest,
        queues=options.queues,
        depth=options.depth,
        policy=options.policy,
        host_traddr=options.host_traddr,
        host_iface=options.host_iface,
        tos=options.tos,
        hpda=options.hpda,
        maxr2t=options.maxr2t,
        poll_us=options.poll_us,
        inflight_bytes=inflight_bytes(),
        keep_alive_s=options.keep_alive_s,
        connect_timeout_s=options.connect_timeout_s,
        io_timeout_s=options.io_timeout_s,
        loss_timeout_s=options.loss_timeout_s,
        **_ring(),
    )


def _open_block(address: BlockAddress, read_only: bool) -> _native.Device:
    if not read_only and (users := users_of(address.path)):
        # The kernel refuses these too, without a name.
        raise UsageError(
            "the block device is in use on this machine",
            where=address.path,
            expected="one that nobody has claimed",
            found=", ".join(users),
            next_step="open it read_only, or free it first",
        )
    return _native.open_block(
        address.path, block_bytes=address.block_bytes, read_only=read_only, io_engine=address.engine, **_ring()
    )


def _ring() -> dict[str, int]:
    events = kept_events()
    return {} if events is None else {"events": events}


def _open_file(address: FileAddress, read_only: bool) -> _native.Device:
    create = address.create_bytes
    if create is not None:
        if read_only:
            raise UsageError("create and read_only exclude each other", where=address.path)
        if not Path(address.path).exists():
            try:
                _native.create_file(address.path, create)
            except DeviceError:
                # Somebody else may have made it meanwhile; if it has the right size, that is what was asked for.
                if not Path(address.path).exists():
                    raise
    device = _native.open_file(
        address.path, block_bytes=address.block_bytes, read_only=read_only, io_engine=address.engine, **_ring()
    )
    if create is not None and device.size_bytes != create:
        found = device.size_bytes
        device.close()
        raise UsageError(
            "the file exists with another size", where=address.path, expected=f"{create} bytes", found=f"{found} bytes"
        )
    return device
