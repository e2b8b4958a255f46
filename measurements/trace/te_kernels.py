"""Transformer Engine's Python code without its compiled parts: what of its kernels takes memory, on fake tensors.

The package's own modules decide what forward keeps and when backward drops it. Its extension is stood in for here,
`transformer_engine_torch`: each kernel that a layer calls makes the tensors which the real one makes (TransformerEngine
2.20.2 `pytorch/csrc/extensions/{gemm,normalization,attention,apply_rope}.cpp`). One that is not here raises an error.
Import this module before anything imports Transformer Engine.
"""

import enum
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

CUDA = "cuda"
NAMES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
DType = enum.IntEnum("DType", NAMES, start=0)  # type: ignore[misc]
TYPES = {DType.kInt32: torch.int32, DType.kFloat32: torch.float32, DType.kBFloat16: torch.bfloat16}


class Absent:
    """A function or constant of a compiled library that no step here needs."""

    made = 0

    def __init__(self, name: str) -> None:
        """Number it, as constants are keys of tables."""
        self.name = self.__name__ = name
        Absent.made += 1
        self._number = Absent.made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error that names it."""
        raise NotImplementedError(f"{self.name} has no stand-in for fake tensors")

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        found = Absent(f"{self.name}.{name}")
        setattr(self, name, found)
        return found

    def __int__(self) -> int:
        return self._number

    def __or__(self, other: Any) -> "Absent":  # annotations have alternatives
        return self

    __ror__ = __or__


class Library(ModuleType):
    """A module that has everything it is asked for, most of it absent."""

    def __init__(self, name: str, **given: Any) -> None:
        """Become importable under `name`."""
        super().__init__(name)
        self.__file__ = name
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__dict__.update(given)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        found = Absent(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=CUDA)


def generic_gemm(
    a: torch.Tensor, turned_a: bool, b: torch.Tensor, turned_b: bool, out: torch.Tensor | None, quantizer: Any,
    dtype: int | None, bias: torch.Tensor | None, bias_dtype: int, gelu: bool, gelu_in: Any, grad: bool, *_: Any,
    **__: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """A product: its output, if there is none to write into, and in backward the gradient of the bias."""
    if out is None:
        shape = (b.shape[-1], a.shape[-1]) if turned_b else (*b.shape[:-1], a.shape[0] if turned_a else a.shape[1])
        out = torch.empty(shape, dtype=a.dtype if dtype is None else TYPES[DType(int(dtype))], device=CUDA)
    summed = grad and bias is not None
    gradient = torch.empty(b.shape[-1], dtype=TYPES[DType(int(bias_dtype))], device=CUDA) if summed else None
    return out, gradient, None, None


def te_general_grouped_gemm(*args: Any) -> Any:
    """The products of several experts, which all write into tensors that are there; returns the biases' gradients."""
    return args[7]


def rmsnorm_fwd(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None, *_: Any) -> Any:
    """The norm of each row, and the scale of each in fp32."""
    return torch.empty_like(x) if out is None else out, None, _floats(x.numel() // x.shape[-1])


def rmsnorm_bwd(dz: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, *_: Any) -> Any:
    """The gradients of the input and of the weight."""
    return torch.empty_like(x), torch.empty_like(weight)


def fused_attn_fwd(*args: Any) -> list[torch.Tensor]:
    """The output, the log-sum-exp of each row of scores, and the state of the random numbers."""
    q, _, v = args[16:19]
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=CUDA)
    state = torch.empty(2, dtype=torch.int64, device=CUDA)
    return [out, _floats(q.numel() // q.shape[-1]), state]


def fused_attn_bwd(*args: Any) -> list[Any]:
    """The gradients of queries, keys and values.

    cuDNN sums that of the queries in fp32, and has a sum for each row of scores (cudnn-frontend 1.14
    `node/scaled_dot_product_flash_attention.h`, `CompositeSDPABackwardNode`: `dQ_accum`, `softmax_sum`).
    """
    made = [torch.empty(x.shape, dtype=x.dtype, device=CUDA) for x in args[19:22]]
    _sums = _floats(*args[19].shape), _floats(args[19].numel() // args[19].shape[-1])
    return [*made, None, None]


def fused_rope(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Rotated queries or keys, or their gradient: another tensor, contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=CUDA)


def multi_tensor_l2norm(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of many tensors, and no norms of each."""
    return _floats(1), _floats(0)


def _decorates(*args: Any, **kwargs: Any) -> Any:
    """Triton's decorators leave functions as they are: none of its kernels runs here."""
    return args[0] if args and callable(args[0]) else lambda function: function


def stand_in() -> None:
    """Make Transformer Engine importable without its extension, CUDA's libraries, Triton and ONNX Script."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # `common/__init__.py`: no shared objects are loaded
    backends = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    extension = Library(
        "transformer_engine_torch",
        DType=DType,
        NVTE_Fused_Attn_Backend=enum.IntEnum("NVTE_Fused_Attn_Backend", backends),
        get_stream_priority_range=_answer((0, -1)),
        get_cudnn_version=_answer(91_300),
        get_cublasLt_version=_answer(130_000),
        get_num_cublas_streams=_answer(4),
        device_supports_multicast=_answer(False),
        generic_gemm=generic_gemm,
        te_general_grouped_gemm=te_general_grouped_gemm,
        rmsnorm_fwd=rmsnorm_fwd,
        rmsnorm_bwd=rmsnorm_bwd,
        fused_attn_fwd=fused_attn_fwd,
        fused_attn_bwd=fused_attn_bwd,
        fused_rope_forward=fused_rope,
        fused_rope_backward=fused_rope,
        multi_tensor_l2norm=multi_tensor_l2norm,
        multi_tensor_adam=_answer(None),
        multi_tensor_scale=_answer(None),
    )
    for name in ("layernorm_fwd", "layernorm_bwd"):  # in a table beside those of RMSNorm
        getattr(extension, name)
    Library("transformer_engine.pytorch.onnx_extensions")
    # Apex's product that adds a weight's gradient to the buffer of gradients, for the head
    added = {"wgrad_gemm_accum_fp32": _answer(None), "wgrad_gemm_accum_fp16": _answer(None)}
    Library("fused_weight_gradient_mlp_cuda", **added)
    with warnings.catch_warnings():  # it tells of the extension that it does not find
        warnings.simplefilter("ignore")
        import transformer_engine.common as common
    common.load_framework_extension = _answer(None)
    decorators = {name: _decorates for name in ("jit", "autotune", "heuristics")}
    Library("triton", __version__="3.4.0", Config=_answer(None), **decorators)
    for name in ("language", "language.core", "language.standard", "language.extra", "runtime", "testing"):
        Library(f"triton.{name}")
    import transformer_engine.pytorch  # noqa: F401

    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]  # nobody else takes it to be there
