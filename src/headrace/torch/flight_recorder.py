"""PyTorch's Flight Recorder: what it has recorded of collectives, for a file beside that of the black box.

The recorder is on where `TORCH_FR_BUFFER_SIZE` (older: `TORCH_NCCL_TRACE_BUFFER_SIZE`) is not 0; its default depends on
the version of PyTorch.
"""

from __future__ import annotations

import torch.distributed as dist


def flight_recorder_trace() -> bytes | None:
    """As PyTorch would write it (a pickle of dicts and lists); None: there is no process group, or nothing is recorded
    by this version. For any thread."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    import torch._C._distributed_c10d as native

    backend = str(dist.get_backend())
    nccl, general = getattr(native, "_dump_nccl_trace", None), getattr(native, "_dump_fr_trace", None)
    if backend == "nccl" and nccl is not None:
        return bytes(nccl(True, True, False))
    return bytes(general(True, True, False)) if general is not None else None
