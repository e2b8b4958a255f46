"""The optimizers, a row each: what one keeps for each parameter, what its step takes, and what frameworks call it.

Sources: torch 2.13 `optim/{adamw,sgd,_adafactor}.py`, bitsandbytes 0.50 `optim/optimizer.py`, lion-pytorch, and
transformers 5.23 `training_args.py`, of which `OptimizerNames` has the names, and `trainer_optimizer.py`, which builds
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class Step(NamedTuple):
    """The memory and traffic of one implementation of an optimizer's step, for each parameter.

    `temporaries`: tensors of a parameter's size, in the type that it steps in, that it allocates, for all parameters at
    once where it is foreach, else for one after another. `moved`: numbers that it reads and writes, moments of 8 bits
    apart. Fused kernels pass once, foreach and single tensors once for each operation.
    """

    temporaries: int
    moved: int


class Optim(NamedTuple):
    """The `optim` of Transformers' TrainingArguments, with its `optim_args`."""

    optim: str
    optim_args: str = ""


class Spelling(NamedTuple):
    """The name of an optimizer in each framework; empty where it has none.

    `torch`: the class. `openrlhf`: `--optim` (cli/train_sft.py of 0.11.0). `verl`: the key `optim.optimizer`
    (workers/config/optimizer.py of 0.9.1). `trl`: Transformers' names, by implementation. `slime`: Megatron-LM's
    `--optimizer`. `swift`: ms-swift's own `--optimizer` beside Transformers' (swift/optimizers of 4.6.0), and
    `llamafactory` its switch (hparams/finetuning_args.py of 0.9.6). `megatron_swift`: the `--optimizer` of ms-swift's
    `megatron` (swift/megatron/arguments/megatron_args.py of 4.1.0). `swift_switch`: ms-swift's switch
    (swift/trainers/arguments.py of 4.6.0).
    """

    torch: str
    openrlhf: str
    verl: str
    trl: Mapping[str, Optim]
    slime: str = ""
    swift: str = ""
    llamafactory: str = ""
    megatron_swift: str = ""
    swift_switch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """The properties of an optimizer.

    `moments`: states of each element, in the type that it steps in, or in fp32 (`wide`), or `packed`: so many bytes
    each, an fp32 scale for each block of elements included; tensors of fewer than 4,096 stay in fp32 if it is `wide`,
    else in their own type. `factored`: a matrix keeps a row and a column in place of a moment. `paged`: states may
    leave the GPU under pressure. `implementations`: those that its class offers, its default first; `steps` also has
    others that a scenario may name. `deepspeed`: on flat partitions DeepSpeed's own fused kernel is counted.
    `in_backward`: it can only step each parameter as soon as backward has made its gradient. `scratch`: bytes an
    element that its step of one parameter takes, whatever the type, in place of `temporaries`. `widens`: it steps in
    fp32 copies of gradient and weight, whatever their type, once the next gradient is there. `narrow`: its states are
    bf16 whatever it steps in, which is counted for weights of that type. `orthogonal`: it steps matrices alone, but for
    embeddings and heads, each made orthogonal; AdamW steps the rest. `low_rank`: it steps the matrices of layers
    through projections of their gradients. `aware`: Transformer Engine steps it with masters and moments of formats of
    their own. `trainer`: the class that Transformers' Trainer builds for the name, where that is another.
    """

    label: str
    moments: int
    packed: float = 0
    wide: bool = False
    factored: bool = False
    paged: bool = False
    deepspeed: bool = False
    in_backward: bool = False
    scratch: int = 0
    widens: bool = False
    narrow: bool = False
    orthogonal: bool = False
    low_rank: bool = False
    aware: bool = False
    implementations: tuple[str, ...]
    steps: Mapping[str, Step]
    spelled: Spelling
    trainer: Facts | None = None

    @property
    def usual(self) -> str:
        """The implementation that steps unless another is asked for."""
        return self.implementations[0]

    @property
    def eight_bit(self) -> bool:
        """True if its states are packed, in 8 bits or fewer."""
        return self.packed > 0

    @property
    def bits(self) -> int:
        """The bits of a packed state, without its scale; 0 if states are not packed."""
        return int(self.packed * 2) * 4

    @property
    def in_bits(self) -> str:
        """The same in words, as ` in 8 bits`; empty if states are not packed."""
        return f" in {self.bits} bits" if self.packed else ""

    @property
    def bitsandbytes(self) -> bool:
        """True if bitsandbytes steps it, whose kernels run on a GPU."""
        return self.spelled.torch.startswith("bitsandbytes.")


BLOCK = 256  # elements that share a scale (bitsandbytes `blocksize` since 0.44, 2048 before; torchao 0.18)
BYTE = 1 + 4 / BLOCK
USUAL = "adamw"  # the frameworks' default

_ADAMW = Facts(
    label="AdamW",
    moments=2,  # exp_avg, exp_avg_sq: `zeros_like(param)`
    deepspeed=True,  # FusedAdam (deepspeed ops/adam/fused_adam.py)
    aware=True,  # FusedAdam (transformer_engine pytorch/optimizers/fused_adam.py)
    implementations=("foreach", "fused", "single"),
    # foreach holds the list of denominators (`_foreach_sqrt`), a single tensor a denominator and a quotient. The fused
    # kernel moves gradient, weight and two moments; otherwise weight decay moves 2, the moments 3 and 5, the square
    # root 2, two divisions 4, the update 4.
    steps={"fused": Step(0, 7), "foreach": Step(1, 20), "single": Step(2, 20)},
    spelled=Spelling(
        torch="torch.optim.AdamW",
        openrlhf="adam",
        verl="AdamW",
        trl={"fused": Optim("adamw_torch_fused"), "foreach": Optim("adamw_torch")},
        slime="adam",
        megatron_swift="adam",
    ),
)
_ADAMW_8BIT = Facts(
    label="AdamW",
    moments=2,  # state1, state2: a byte each, and absmax1, absmax2
    packed=BYTE,
    wide=True,  # tensors below min_8bit_size
    implementations=("foreach",),  # no choice: a kernel of its own steps tensor by tensor, in place
    steps=dict.fromkeys(("fused", "foreach", "single"), Step(0, 3)),
    spelled=Spelling(
        torch="bitsandbytes.optim.AdamW8bit",
        openrlhf="",
        verl="",
        trl={"foreach": Optim("adamw_bnb_8bit")},
    ),
)
_TORCHAO = Facts(
    label="torchao's AdamW",
    moments=2,  # exp_avg, exp_avg_sq: codes and scales (torchao 0.18 `optim/subclass_8bit.py`)
    packed=BYTE,
    scratch=8,  # both moments in fp32, as torch 2.13 compiles the step for a CPU
    implementations=("foreach",),  # a compiled step of its own, tensor by tensor (`optim/adam.py`, single_param_adam)
    steps=dict.fromkeys(("fused", "foreach", "single"), Step(0, 3)),
    spelled=Spelling(
        torch="torchao.optim.AdamW8bit",
        openrlhf="",
        verl="",
        trl={"foreach": Optim("adamw_torch_8bit")},
    ),
)
_SGD = Facts(
    label="SGD",
    moments=0,
    implementations=("foreach", "fused", "single"),
    steps={"fused": Step(0, 3), "foreach": Step(0, 5), "single": Step(0, 5)},  # in place
    spelled=Spelling(torch="torch.optim.SGD", openrlhf="", verl="", trl={"foreach": Optim("sgd")}),
)
_ADAFACTOR = Facts(
    label="Adafactor",
    moments=1,  # variance, of a vector or a flat partition; row_var and col_var of a matrix
    factored=True,
    implementations=("single", "foreach"),  # foreach only on request (`_adafactor.py`)
    # one by one a single estimate, which becomes the update in place
    steps={"fused": Step(0, 7), "foreach": Step(1, 14), "single": Step(1, 14)},
    spelled=Spelling(torch="torch.optim.Adafactor", openrlhf="", verl="", trl={"single": Optim("adafactor")}),
)
_LION = Facts(
    label="Lion",
    moments=1,  # exp_avg
    implementations=("single",),
    # one by one a clone and a sum; foreach the updates
    steps={"fused": Step(0, 5), "foreach": Step(1, 12), "single": Step(2, 12)},
    spelled=Spelling(torch="lion_pytorch.Lion", openrlhf="", verl="", trl={"single": Optim("lion_32bit")}),
)

OPTIMIZERS: Mapping[str, Facts] = {
    "adamw": _ADAMW,
    "adamw-8bit": _ADAMW_8BIT,
    "adamw-paged-8bit": replace(
        _ADAMW_8BIT,
        paged=True,  # managed memory (`get_paged`)
        spelled=Spelling(
            torch="bitsandbytes.optim.PagedAdamW8bit",
            openrlhf="",
            verl="",
            trl={"foreach": Optim("paged_adamw_8bit")},
        ),
    ),
    "adamw-paged": replace(
        _ADAMW_8BIT,
        label="paged AdamW",
        packed=0,  # fp32 whatever a parameter's type (bitsandbytes 0.50 `optim/optimizer.py:508`)
        paged=True,
        steps=dict.fromkeys(("fused", "foreach", "single"), Step(0, 7)),
        spelled=Spelling(
            torch="bitsandbytes.optim.PagedAdamW32bit",
            openrlhf="",
            verl="",
            trl={"foreach": Optim("paged_adamw_32bit")},
        ),
    ),
    "adamw-torchao-8bit": _TORCHAO,
    "adamw-bf16": Facts(
        label="AdamW with Kahan summation",
        narrow=True,
        moments=3,  # exp_avg, exp_avg_sq, compensation, in bf16 (llama-cookbook 0.0.5 `anyprecision_optimizer.py`)
        implementations=("single",),
        # the denominator and a copy of the weight. Weight decay moves 2, the moments 5 and 5, the denominator 6, the
        # update 4, the copy 2, weight, difference and compensation 3 each.
        steps=dict.fromkeys(("fused", "foreach", "single"), Step(2, 33)),
        spelled=Spelling(torch="llama_cookbook.policies.AnyPrecisionAdamW", openrlhf="", verl="", trl={}),
    ),
    "adafactor": replace(
        _ADAFACTOR,
        trainer=replace(
            _ADAFACTOR,
            wide=True,
            # squares of the gradient, and beside them their sum with epsilon, then the estimate (`optimization.py`)
            steps=dict.fromkeys(("fused", "foreach", "single"), Step(2, 20)),
            spelled=_ADAFACTOR.spelled._replace(torch="transformers.optimization.Adafactor"),
        ),
    ),
    "sgd": _SGD,
    "sgd-momentum": replace(
        _SGD,
        label="SGD with momentum",
        moments=1,  # momentum_buffer
        # in place: `_foreach_mul_` and `_foreach_add_` into the buffers
        steps={"fused": Step(0, 5), "foreach": Step(0, 8), "single": Step(0, 8)},
        spelled=_SGD.spelled._replace(trl={"foreach": Optim("sgd", "momentum=0.9")}),
    ),
    "lion": replace(
        _LION,
        trainer=replace(
            _LION,
            wide=True,
            steps=dict.fromkeys(("fused", "foreach", "single"), Step(0, 5)),  # one kernel, in place
            spelled=_LION.spelled._replace(torch="bitsandbytes.optim.Lion"),
        ),
    ),
    "lomo": Facts(
        label="LOMO",
        moments=0,
        in_backward=True,
        widens=True,  # grad_fp32, then p_fp32 in the gradient's place (lomo_optim 0.1.1 `lomo.py:fuse_update`)
        implementations=("single",),
        steps=dict.fromkeys(("fused", "foreach", "single"), Step(0, 6)),
        spelled=Spelling(torch="lomo_optim.Lomo", openrlhf="", verl="", trl={}),
    ),
    "muon": Facts(
        label="Muon",
        # momentum_buffer (Emerging-Optimizers `orthogonalized_optimizer.py`; Moonlight abaa96ec
        # `examples/toy_train.py`, which ms-swift and LLaMA-Factory run)
        moments=1,
        orthogonal=True,
        implementations=("fused",),  # a class of its own, beside Transformer Engine's AdamW
        # in place: weight decay moves 2, the momentum 3, the update 3
        steps=dict.fromkeys(("fused", "foreach", "single"), Step(0, 8)),
        spelled=Spelling(
            torch="emerging_optimizers.Muon",
            openrlhf="",
            verl="",
            trl={},
            swift="muon",
            llamafactory="use_muon",
            megatron_swift="dist_muon",
        ),
    ),
    "galore": Facts(
        label="AdamW in GaLore's low rank",
        moments=2,  # exp_avg, exp_avg_sq, of a projected gradient where there is one (galore-torch 1.0 `adamw.py`)
        low_rank=True,
        implementations=("single",),
        # a denominator and a quotient of the largest tensor that is not projected
        steps=dict.fromkeys(("fused", "foreach", "single"), Step(2, 20)),
        spelled=Spelling(torch="galore_torch.GaLoreAdamW", openrlhf="", verl="", trl={}, swift_switch="use_galore"),
    ),
    "none": Facts(  # nothing is trained
        label="none",
        moments=0,
        implementations=("foreach",),
        steps=dict.fromkeys(("fused", "foreach", "single"), Step(0, 0)),
        spelled=Spelling(torch="", openrlhf="", verl="", trl={}),
    ),
}
