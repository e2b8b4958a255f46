"""State spaces in Megatron-core on a tape: Mamba-2 between one product to all that it reads and one behind its norm.

A rank's heads see all positions: with context parallelism an all-to-all gives each of its ranks some of the heads for
that, and another gives them back. Widths are those of `calc.memory.ssm`. Read in Megatron-LM d98e8a64dd
`megatron/core/ssm/{mamba_mixer,mamba_layer,mamba_context_parallel}.py` and mamba-ssm 2.2
`ops/triton/ssd_combined.py`, `MambaSplitConv1dScanCombinedFn` without a norm and without an output projection.
"""

from __future__ import annotations

from calc.autograd.tape import Size, Tensor, of
from calc.memory.megatron_adapters import BF16
from calc.memory.megatron_linears import MegatronLinears
from calc.memory.ssm import CHANNELS, GROUP_PAIRS, HEADS, INNER

FP32 = 4
PROJECTED = INNER + CHANNELS + HEADS  # gate; input, B and C; time steps


class MegatronStateSpace(MegatronLinears):
    """Writes the state space of one of Megatron-core's layers."""

    def state_space(self, x: Tensor, norm: str) -> Tensor:
        """The block, from the residual stream to the residual stream."""
        tape, ssm = self.tape, self.arch.ssm
        assert ssm
        joined = self.column("in_proj", self.normed(x, norm), PROJECTED, self.trained_elements("ssm_in_proj"))
        mixed = tape.op("ssm: batch first", [self.swapped_heads(joined, "heads", PROJECTED)], PROJECTED, BF16)
        y = tape.op("ssm: batch last", [self.scanned(mixed)], INNER, BF16)
        y = self.swapped_heads(y, "heads back", INNER)
        n = tape.op("ssm_norm", [y], INNER, BF16, saves=[y, Tensor(of(**{"": ssm.groups}), FP32)],
                    weight=self.trained_elements("ssm_norm"))  # fmt: skip
        return self.added(x, self.row("out_proj", n, self.trained_elements("ssm_out_proj")), "mixer")

    def scanned(self, mixed: Tensor) -> Tensor:
        """Convolution, scan and gate in one operation, which scans again for its backward.

        It keeps its input and the scanned output before its gate. For the rest see
        `calc.memory.ssm.StateSpace.scanned_by_kernel`, whose norm and projection are apart here.
        """
        ssm = self.arch.ssm
        assert ssm
        states = of(s_s=1 / ssm.chunk)
        beside = HEADS * (2 * FP32) + GROUP_PAIRS * FP32
        return self.tape.op(
            "ssm: scan",
            [mixed],
            INNER,
            BF16,
            saves=[mixed, Tensor(INNER, BF16)],
            scratch=(CHANNELS + states) * BF16 + states * FP32 + beside,
            backward_scratch=(CHANNELS * 2 + INNER) * BF16 + states * (2 * FP32 + 2 * BF16) + beside,
            weight=self.trained_elements("ssm_conv1d", "ssm_dt_bias", "ssm_A_log", "ssm_D"),
        )

    def swapped_heads(self, x: Tensor, name: str, width: Size) -> Tensor:
        """Some of the heads for all positions, in order, or back; what is sent and what has come are copies."""
        if self.run.context == 1:
            return x
        sent = width * BF16
        for step in ("all-to-all", "order"):
            x = self.tape.op(f"ssm: {name}: {step}", [x], width, BF16, scratch=sent, backward_scratch=sent)
        return x
