"""Whether tensor cores work, as a supervisor sees it. Without a GPU, NVML is a fake, but for the last test."""

import subprocess
import sys
import time
from ctypes import POINTER, Structure, c_double, c_uint, pointer
from types import SimpleNamespace

import pytest
import torch

from distflow.recovery.detectors import tensor_cores


class Metric(Structure):
    _fields_ = [("metricId", c_uint), ("nvmlReturn", c_uint), ("value", c_double)]


class Asked(Structure):
    _fields_ = [("version", c_uint), ("numMetrics", c_uint), ("sample1", POINTER(c_double)),
                ("sample2", POINTER(c_double)), ("metrics", Metric * 4)]


class Nvml:
    """A made-up NVML of one GPU. A sample is the percentage of time, summed up, in which tensor cores have worked."""

    class NVMLError(Exception):
        pass

    NVML_SUCCESS, NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 0, 1, 3
    c_nvmlGpmMetricsGet_t = Asked

    def __init__(self):
        self.supported, self.worked, self.trouble, self.lost = True, 0.0, 0, False

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1":
            raise self.NVMLError("Not Found")
        return 0

    def nvmlGpmQueryDeviceSupport(self, device):
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self):
        return pointer(c_double())

    def nvmlGpmSampleGet(self, device, sample):
        if self.lost:
            raise self.NVMLError("GPU is lost")
        sample.contents.value = self.worked
        return sample

    def nvmlGpmMetricsGet(self, asked):
        assert asked.numMetrics == 1
        assert asked.metrics[0].metricId == self.NVML_GPM_METRIC_ANY_TENSOR_UTIL
        asked.metrics[0].value = asked.sample2.contents.value - asked.sample1.contents.value
        asked.metrics[0].nvmlReturn = self.trouble
        return asked


@pytest.fixture
def nvml(monkeypatch):
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    tensor_cores.cache_clear()
    yield made
    tensor_cores.cache_clear()


def test_work_since_the_last_question_counts(nvml):
    worked = tensor_cores("GPU-1")
    assert not worked()
    nvml.worked = 1
    assert worked()
    assert not worked()
    nvml.worked = 5
    assert worked()


@pytest.mark.parametrize("change", [{"trouble": 3}, {"lost": True}])
def test_a_gpu_that_tells_nothing_any_more_is_not_seen_at_work(nvml, change):
    worked = tensor_cores("GPU-1")
    vars(nvml).update(change, worked=50.0)
    assert not worked()


def test_it_is_not_measured(nvml, monkeypatch):
    assert tensor_cores("GPU-other") is None
    nvml.supported = False
    assert tensor_cores("GPU-1") is None
    tensor_cores.cache_clear()
    old = SimpleNamespace(NVMLError=ValueError, nvmlInit=lambda: None)
    monkeypatch.setitem(sys.modules, "pynvml", old)
    assert tensor_cores("GPU-1") is None
    tensor_cores.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert tensor_cores("GPU-1") is None


WORK = """
import sys, torch
print(f"GPU-{torch.cuda.get_device_properties().uuid}", flush=True)
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
for _ in sys.stdin:
    for _ in range(300):
        a @ a
    torch.cuda.synchronize()
    print("done", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_that_multiplies_matrices_and_one_that_does_not():
    pytest.importorskip("pynvml")
    worker = subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        worked = tensor_cores(worker.stdout.readline().strip())
        if worked is None:
            pytest.skip("this GPU does not tell")
        time.sleep(0.5)  # a share of the time needs some
        assert not worked()
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "done\n"
        assert worked()
    finally:
        worker.kill()
        worker.communicate()
