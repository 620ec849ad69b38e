"""A CUDA driver that launches nothing and remembers what it was told to launch.

Triton's own launcher, in C, runs against it on a machine without a GPU: so the host's side of a
launch can be timed (``benchmarks.launch``), and what reaches the driver can be compared
(``tests/kernels/test_prepared.py``). It needs a C compiler, as Triton does on a GPU machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver

from specpool_kernels import launch

_MOST = 24  # arguments of a kernel
_SOURCE = r"""
#include <cuda.h>
#include <string.h>

struct {
    unsigned long long calls, function, stream;
    unsigned int grid[3], block[3], shared;
    unsigned int sizes[MOST];
    unsigned long long values[MOST];
} launched;

CUresult cuGetErrorString(CUresult e, const char **s) { *s = "stub"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
    *c = (CUcontext)1;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
    *v = 232448;  /* bytes of shared memory; nothing else is looked at */
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *v) { *v = 13000; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *v, CUfunction f, const CUlaunchConfig *c) {
    *v = 1;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
    *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) {
    *m = (CUmodule)image;
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
    *f = (CUfunction)m;  /* each image is its own function */
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
    *(CUdeviceptr *)v = p;
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **arguments, void **extra) {
    launched.calls++;
    launched.function = (unsigned long long)f;
    launched.stream = (unsigned long long)c->hStream;
    launched.grid[0] = c->gridDimX;
    launched.grid[1] = c->gridDimY;
    launched.grid[2] = c->gridDimZ;
    launched.block[0] = c->blockDimX;
    launched.block[1] = c->blockDimY;
    launched.block[2] = c->blockDimZ;
    launched.shared = c->sharedMemBytes;
    for (int i = 0; i < MOST && launched.sizes[i]; i++) {
        launched.values[i] = 0;
        memcpy(&launched.values[i], arguments[i], launched.sizes[i]);
    }
    return CUDA_SUCCESS;
}
"""


class _Launched(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_ulonglong),
        ("function", ctypes.c_ulonglong),
        ("stream", ctypes.c_ulonglong),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("sizes", ctypes.c_uint * _MOST),
        ("values", ctypes.c_ulonglong * _MOST),
    )


class Launch(NamedTuple):
    """What the driver was told: the function by its image, the grid, and the arguments' bits."""

    function: int
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    arguments: tuple[int, ...]


class StubDriver(CudaDriver):
    """Triton's driver for one sm_90 device that is not there.

    Attributes:
        stream: what launches see as the current stream.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._launched = _Launched.in_dll(library, "launched")
        self.stream = 0
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: self.stream

    @property
    def calls(self) -> int:
        """Launches so far."""
        return int(self._launched.calls)

    def expect(self, sizes: list[int]) -> None:
        """Have the arguments of the next launches kept, of these sizes in bytes."""
        self._launched.sizes[:] = sizes + [0] * (_MOST - len(sizes))

    def last(self) -> Launch:
        """The last launch."""
        seen = self._launched
        arguments = [v for v, size in zip(seen.values, seen.sizes, strict=True) if size]
        return Launch(
            seen.function,
            seen.stream,
            tuple(seen.grid),
            tuple(seen.block),
            seen.shared,
            tuple(arguments),
        )


@contextmanager
def no_gpu(folder: Path) -> Iterator[StubDriver]:
    """Inside, Triton compiles for sm_90 and launches into the stub; TritonMove takes CPU tensors.

    Once a process: Triton's launcher stays bound to the library that it was loaded with.

    Args:
        folder: an empty one, for the stub and for Triton's cache.

    Raises:
        RuntimeError: there is a GPU, whose driver the launcher would find instead, or no C
            compiler.
    """
    if shutil.which("cc") is None:
        raise RuntimeError("Triton's launcher is built with a C compiler, and there is no cc")
    if torch.cuda.is_available():
        raise RuntimeError("the stub stands in for a driver only where there is no GPU")
    (folder / "cuda.c").write_text(_SOURCE)
    library = folder / "libcuda.so.1"
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    command = ["cc", "-O2", "-shared", "-fPIC", f"-DMOST={_MOST}", f"-I{include}"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", str(library), str(folder / "cuda.c")]
    subprocess.run(command, check=True)
    # Triton's launcher finds the library by its name once it is loaded for everyone
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    settings = {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    with mock.patch.dict(os.environ, settings):
        active = triton.runtime.driver
        driver = StubDriver(loaded)
        with (
            mock.patch.object(active, "_active", driver),
            mock.patch.object(launch, "_target", return_value=(32, False, 132)),
        ):
            yield driver
