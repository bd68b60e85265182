"""How many of the multiprocessors of a GPU were busy, from NVML's GPM counters, where the package nvidia-ml-py is.

"GPU utilisation" is not asked for: it says only that some kernel was there, and is high where that one waits.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

#: `NVML_GPM_METRIC_SM_UTIL`: percentage of multiprocessors that had at least one warp, on average over the window.
_SM_UTIL = 2


class SmActivity:
    """`why_not`: why it is not measured; empty where it is."""

    def __init__(self, gpu: str | None) -> None:
        """`gpu`: identifier of the GPU (`GPU-...`), None where there is none."""
        self.why_not = "there is no GPU" if gpu is None else ""
        self._nvml: Any = None
        self._samples: list[Any] = []
        if gpu is None:
            return
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            self.why_not = "the package nvidia-ml-py is not installed"
            return
        try:
            self._nvml.nvmlInit()
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(gpu)
            if not self._nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                self.why_not = "this GPU has no GPM counters (Hopper and later have)"
                return
            self._samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]
            self._nvml.nvmlGpmSampleGet(self._device, self._samples[0])
        except self._nvml.NVMLError as error:
            self.why_not = f"NVML: {error}"

    def since(self) -> float | None:
        """From 0 to 1, since the last call; None where it is not measured."""
        if self.why_not:
            return None
        try:
            self._nvml.nvmlGpmSampleGet(self._device, self._samples[1])
            asked = self._nvml.c_nvmlGpmMetricsGet_t()
            asked.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = 1
            asked.sample1, asked.sample2 = self._samples
            asked.metrics[0].metricId = _SM_UTIL
            self._nvml.nvmlGpmMetricsGet(asked)
        except self._nvml.NVMLError as error:
            self.why_not = f"NVML: {error}"
            return None
        self._samples.reverse()
        if asked.metrics[0].nvmlReturn != 0:
            return None
        return min(1.0, max(0.0, float(asked.metrics[0].value) / 100))

    def close(self) -> None:
        for sample in self._samples:
            with contextlib.suppress(Exception):
                self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []
        self.why_not = self.why_not or "it is closed"
