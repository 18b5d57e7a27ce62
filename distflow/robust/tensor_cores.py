"""Whether a worker's GPU computes, as its seat sees it (RobustRL §4: no TensorCore activity for a window of time).

NVML tells it from Hopper on, as a share of the time between two samples (GPM). That a GPU is not idle means nothing: a
collective that waits for a rank that has died keeps it busy, and no tensor core works. A seat may ask NVML, but never
CUDA, or it could not fork workers that use it. Package nvidia-ml-py, extra `gpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

_WORKS = 0.1
"""Percent of the time; what is less is noise."""


@functools.cache
def tensor_cores(uuid: str) -> Callable[[], bool] | None:
    """A function that tells whether those of a GPU were seen at work since it was last called; None if nobody can tell.

    Args:
        uuid: of the GPU, as NVML calls it: GPU-….
    """
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
            return None
        old, new = (nvml.nvmlGpmSampleGet(device, nvml.nvmlGpmSampleAlloc()) for _ in range(2))
    except (nvml.NVMLError, AttributeError):  # no driver, a part of a GPU, or an older package
        return None

    def worked() -> bool:
        nonlocal old, new
        try:
            old, new = new, nvml.nvmlGpmSampleGet(device, old)
            asked = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=1, sample1=old,
                                               sample2=new)
            asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
            found = nvml.nvmlGpmMetricsGet(asked).metrics[0]
        except nvml.NVMLError:  # as of a GPU that is lost, which does not work any more
            return False
        return found.nvmlReturn == nvml.NVML_SUCCESS and found.value > _WORKS

    return worked
