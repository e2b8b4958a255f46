"""Every allocation and release of a training step, in order, with the peak and the blocks alive at it."""

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .case import LAYERS
from .scratch import rounded, scratch

aten = torch.ops.aten

# For tensor subclasses, backward formulas write into fresh zeros out of place; for plain tensors in place.
_IN_PLACE = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
}
_PICKING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
_LAYER = re.compile(rf"\b{LAYERS}\.(\d+)\b")


@dataclass(slots=True, eq=False)
class Block:
    """One storage on the device: its rounded bytes and its origin."""

    bytes: int
    kind: str  # params, optim, grads, ...; `made in <phase>` for what a step makes
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def layer(self) -> int | None:
        """The decoder layer whose forward made it."""
        found = _LAYER.search(self.module)
        return int(found[1]) if found else None


class Event(NamedTuple):
    """The start (+1) or end (-1) of a block, or a change of its kind (0)."""

    sign: int
    block: Block
    phase: str
    op: str
    kind: str = ""
    note: str = ""


@dataclass
class Moment:
    """The live blocks at one instant of the step, with the kind that each had then."""

    bytes: int
    index: int
    phase: str
    op: str
    live: list[tuple[Block, str]] = field(default_factory=list)

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind; they add up to `bytes`."""
        total: dict[str, int] = {}
        for block, kind in self.live:
            total[kind] = total.get(kind, 0) + block.bytes
        return total


class Ledger(TorchDispatchMode):
    """Follows every storage of the fake device from its first tensor to its last.

    Blocks made while `recording` is off are known but leave no events: they are resident before the step.
    """

    def __init__(self, workspace: bool = True) -> None:
        super().__init__()
        self.workspace = workspace
        self.events: list[Event] = []
        self.phase = "setup"
        self.recording = False
        self.modules: list[str] = []
        self.picked = 0  # the True of a mask that picks tokens, whose fake values cannot be counted
        self.within = False  # one kernel runs, though its operators pass here one by one
        self._live: dict[int, tuple[Block, Any]] = {}
        self._op = ""

    # -- live blocks --------------------------------------------------------------------------------------------------

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The block that holds a tensor, or this rank's shard of it; None if it is not on the device."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        held = self._live.get(tensor.untyped_storage()._cdata)
        return held[0] if held else None

    def mark(self, tensor: torch.Tensor, kind: str, note: str = "") -> None:
        """Give the tensor's block a kind from now on."""
        block = self.block(tensor)
        if block is None or block.kind == kind:
            return
        block.kind = kind
        if self.recording:
            self.events.append(Event(0, block, self.phase, self._op, kind, note))

    def start(self) -> None:
        """Start recording: the blocks alive now become the first events."""
        self.events = [Event(1, block, self.phase, "", block.kind) for block, _ in self._live.values()]
        self.recording = True

    def note(self, text: str) -> None:
        """Add a mark without bytes to the events."""
        self.events.append(Event(0, _NOTHING, self.phase, "", "", text))

    @contextlib.contextmanager
    def fused(self, name: str) -> Iterator[Callable[[Any], None]]:
        """Operators of one kernel, of which only what it returns, given to what this yields, takes memory."""

        def returns(found: Any) -> None:
            self.within, self._op = False, name
            self._follow_all(found)

        self.within = True
        try:
            yield returns
        finally:
            self.within = False

    def _now(self) -> str:
        """The phase now; in backward, gradients are enabled only while a checkpointed layer is recomputed."""
        return "recompute" if self.phase == "backward" and torch.is_grad_enabled() and _in_backward() else self.phase

    def _module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def _follow_all(self, found: Any) -> None:
        """Follow what an operator returns, as far as it is on the device."""
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self._follow(leaf)

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or self.within:
            return
        size = rounded(storage.nbytes())
        phase = self._now()
        dtype = str(tensor.dtype).removeprefix("torch.")
        block = Block(size, f"made in {phase}", self._op, self._module(), tuple(tensor.shape), dtype)
        self._begin(key, block, storage)

    def _begin(self, key: int, block: Block, storage: torch.UntypedStorage) -> None:
        self._live[key] = (block, weakref.ref(storage, lambda _: self._gone(key, block)))
        if self.recording:
            self.events.append(Event(1, block, self._now(), self._op, block.kind))

    def _end(self, block: Block) -> None:
        if self.recording:
            self.events.append(Event(-1, block, self._now(), self._op))

    def _gone(self, key: int, block: Block) -> None:
        self._live.pop(key, None)
        self._end(block)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Follows FSDP2, which gives a storage its memory and takes it away."""
        key = storage._cdata
        if key in self._live:
            block = self._live[key][0]
            self._end(block)
            self._begin(key, replace(block, bytes=rounded(storage.nbytes())), storage)

    def __enter__(self) -> "Ledger":
        self._resize, self._copy = torch.UntypedStorage.resize_, torch.UntypedStorage.copy_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            self._resized(storage)

        def copy(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> torch.UntypedStorage:
            """Copies nothing; PyTorch's own is an operator, and the cache of fake tensors would hold both storages."""
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        torch.UntypedStorage.copy_ = copy  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        torch.UntypedStorage.copy_ = self._copy  # type: ignore[method-assign]
        super().__exit__(*args)

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:  # let it turn into operators on local tensors first
            return NotImplemented
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith(("prim.", "profiler.")):
            return func(*args, **kwargs)
        self._op = name
        if func in _PICKING:
            args = (args[0], self._places(args[1]), *args[2:])
        if self.phase == "backward" and not torch.is_grad_enabled() and _in_backward():
            in_place = self._as_plain_eager(func, args, kwargs)
            if in_place is not None:
                return in_place
        if func is aten._local_scalar_dense.default and args[0].device.type == "cuda":
            # the host asks for a gradient's norm or an overflow flag: nothing overflowed
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        if name == "_c10d_functional.wait_tensor.default":  # its fake kernel copies, its real one passes the tensor on
            return args[0]
        if func is aten._fused_sgd_.default:  # it has no fake kernel; it works in place and allocates nothing
            return None
        if func is aten.masked_select.default:
            func, args, kwargs = aten.new_empty.default, (args[0], [self.picked]), {}
        out = func(*args, **kwargs)
        self._follow_all(out)
        if self.recording and self.workspace and (n := scratch(func, args)):
            block = Block(n, "workspace", name, self._module(), (), "")
            self.events.append(Event(1, block, self._now(), name, "workspace"))
            self.events.append(Event(-1, block, self._now(), name))
        return out

    def _places(self, indices: list[Any]) -> list[Any]:
        """The indices with masks as kernels read them: one row of numbers for each dimension of a mask.

        A mask of one dimension says which squares have pixels: all of them.
        """
        found = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                found.append(index)
            else:
                picked = self.picked if index.dim() > 1 else len(index)
                found += [torch.zeros(picked, dtype=torch.long, device=index.device) for _ in index.shape]
        return found

    def _as_plain_eager(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do in place what autograd does in place on plain tensors, but out of place under a dispatch mode.

        Returns None for any other operator. Sources: torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`),
        FunctionsManual.cpp (`isTensorSubclassLike`).
        """
        if func is aten.add.Tensor and _by_engine():
            into, other = args
            same = isinstance(other, torch.Tensor) and into.shape == other.shape and into.dtype == other.dtype
            if same and not kwargs and _sole(into):
                return aten.add_.Tensor(into, other)
        elif func in _IN_PLACE and (block := self.block(args[0])) and "zeros" in block.op:
            return _IN_PLACE[func](*args, **kwargs)
        return None


_NOTHING = Block(0, "", "", "", (), "")
# The reference counts of a gradient that only autograd's buffer holds, as seen by an operator that the engine calls.
# The tensor is held by the buffer, the operator's arguments and the Python object, the storage by the tensor and the
# Python object.
_SOLE_TENSOR, _SOLE_STORAGE = 4, 2
_BETWEEN = (__file__, torch._compile.__file__, torch._dynamo.eval_frame.__file__)


def _sole(tensor: torch.Tensor) -> bool:
    tensor_uses = tensor._use_count()  # type: ignore[attr-defined]
    storage_uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor_uses <= _SOLE_TENSOR and storage_uses <= _SOLE_STORAGE


def _by_engine() -> bool:
    """True if autograd's engine adds by itself, and not Python code that it runs, as DTensor's parallel loss.

    Between it and a dispatch mode are the frames with which PyTorch keeps the mode from being compiled.
    """
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# -- reading the events -----------------------------------------------------------------------------------------------


def walk(events: Iterable[Event]) -> Iterator[tuple[int, int, Event]]:
    """(index, bytes live after the event, event) of each event."""
    total = 0
    for index, event in enumerate(events):
        total += event.sign * event.block.bytes
        yield index, total, event


def highest(events: list[Event], where: Callable[[int, Event], bool] = lambda i, e: True) -> Moment:
    """The instant with the most live bytes among the allocations and marks that `where` accepts."""
    best = Moment(0, -1, "", "")
    for index, total, event in walk(events):
        if (event.sign > 0 or event.note) and total > best.bytes and where(index, event):
            best = Moment(total, index, event.phase, event.op)
    best.live = alive(events, best.index)
    return best


def alive(events: list[Event], index: int) -> list[tuple[Block, str]]:
    """The live blocks after the event at `index`, each with its kind at that time."""
    live: dict[int, tuple[Block, str]] = {}
    for event in events[: index + 1]:
        if event.sign > 0:
            live[id(event.block)] = (event.block, event.kind)
        elif event.sign < 0:
            live.pop(id(event.block), None)
        elif id(event.block) in live:
            live[id(event.block)] = (event.block, event.kind)
    return list(live.values())
