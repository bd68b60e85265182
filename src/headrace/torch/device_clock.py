"""The clock of a CUDA device, for `headrace.measure.Watch`: marks in the stream between the work."""

from __future__ import annotations

import torch


class CudaClock:
    """Of the current stream of `device`: what runs on other streams is seen where this one waits for it, as it does for
    collectives of PyTorch."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        self.gpu: str | None = None if uuid is None else f"GPU-{uuid}"

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def between_s(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        second.synchronize()
        return float(first.elapsed_time(second)) * 1e-3


def current_clock() -> CudaClock | None:
    """Of the current CUDA device; None where PyTorch can use none."""
    if not torch.cuda.is_available():
        return None
    return CudaClock(torch.device("cuda", torch.cuda.current_device()))
