"""Fake `cuda` tensors on a PyTorch built without CUDA: a stand-in device, and the checks that would need a real one.

Import this module before `torch`: ATen asks for the device's hooks once, when it loads.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")


def _load_device() -> None:
    """Compile `device.cpp` against the installed PyTorch (once; a C++20 compiler is needed) and load it."""
    if "torch" in sys.modules:
        raise ImportError("measurements.trace.fake must be imported before torch")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed here: make trace sets it up")
    torch_dir = Path(spec.origin).parent
    version = (torch_dir / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + str(torch_dir).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"trace-device-{os.getuid()}-{key}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        lib = torch_dir / "lib"
        subprocess.run(
            [
                *(os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", "-O1"),
                *(f"-I{torch_dir / 'include'}", str(SOURCE), "-o", str(unfinished)),
                *(f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"),
            ],
            check=True,
        )
        unfinished.rename(library)
    ctypes.CDLL(str(library))


_load_device()

import torch  # noqa: E402
import torch.cuda.amp.common  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.utils.logging import set_verbosity_error  # noqa: E402


def _answer(value: object) -> object:
    return lambda *args, **kwargs: value


def _set_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other.data


# Nothing may allocate memory on the stand-in device, so it must not count as available.
torch.accelerator.is_available = _answer(False)  # type: ignore[assignment]
# One thread, so that the ledger's dispatch mode sees backward's operators.
torch.autograd.set_multithreading_enabled(False)
# The stand-in device is an A100: bf16, autocast and grouped matrix products work on it.
torch.cuda.amp.common.amp_definitely_not_available = _answer(False)  # type: ignore[assignment]
torch.cuda.is_bf16_supported = _answer(True)  # type: ignore[assignment]
torch.cuda.get_device_capability = _answer((8, 0))  # type: ignore[assignment]
# Changing a module's dtype swaps its fake parameters, which fails while anything refers to them.
torch.utils.swap_tensors = _set_data
# Transformers cannot read fake position ids and would build a mask for packed rows, of which there are none.
masking_utils.find_packed_sequence_indices = _answer(None)  # type: ignore[assignment]
set_verbosity_error()  # type: ignore[no-untyped-call]
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of what it lacks on the CPU

# Operators that have a kernel of their own on CUDA and are composed of others elsewhere.
_cuda: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
for _name in ("silu_backward",):
    _cuda.impl(_name, _answer(None), "CUDA")
