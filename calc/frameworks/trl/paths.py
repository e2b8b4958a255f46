"""The way from logits to a loss in TRL's trainers, by release: what they copy, keep and measure.

Files are those of the release named. Log-probabilities were taken of whole logits until 0.14
(`logits.log_softmax(-1)`, then gather), since 0.15 by `selective_log_softmax` (trainer/utils.py): of fp32 logits by a
logsumexp for each row, of others by each row's log-softmax. 1.14 has a kernel for both (kernels/logprob_entropy.py),
and 1.15 a head that is folded into the loss, in tiles.
"""

from __future__ import annotations

from dataclasses import replace

from calc.base.plan import Held, LossKind, Path
from calc.base.versions import at_least
from calc.frameworks import trainer
from calc.scenario.scenario import Scenario

# Liger's losses, by task: the releases that have `use_liger_kernel` swap them in, up to the one named last
LIGER = {"sft": ("0.12.0", "1.15.0"), "grpo": ("0.25.0", "1.14.0")}
SELECTIVE, KERNEL, FOLDED = "0.15.0", "1.14.0", "1.15.0"  # the releases in which the way changed for all trainers
TILE = 4096  # tokens whose logits exist at once, at most (kernels/chunked_logprob.py)
TURN = 128  # tokens whose entropies are computed at once, since 0.23.0 (trainer/utils.py)
PIECE = 256  # tokens of a chunk of `chunked_nll` (trainer/sft_trainer.py of 1.7.0)


def by_liger(task: str, version: str, kernels: str) -> bool:
    """True if Liger computes the loss of a trainer of this release.

    Transformers' Trainer patches the model's own (trainer/sft_trainer.py), GRPOTrainer calls one for all completions
    (`compute_liger_loss`, trainer/grpo_trainer.py of 0.25.0); 1.14.0 and 1.15.0 have losses of their own in its place.
    """
    first, end = LIGER.get(task, ("", ""))
    return kernels == "liger" and bool(first) and at_least(version, first) and not at_least(version, end)


def wide(s: Scenario) -> bool:
    """True if logits leave the model in fp32: Accelerate's autocast casts them, and Transformers' models did."""
    return trainer.wrapped(s) or trainer.early(s)


def width(s: Scenario) -> int:
    """Bytes of a logit that a trainer reads."""
    return 4 if wide(s) or s.layout == "fp32" else 2


def kind(s: Scenario) -> LossKind:
    """The kind of the log-probabilities of `s`."""
    version = s.framework_version
    if at_least(version, KERNEL):
        return "flash"
    if at_least(version, SELECTIVE):
        return "rows" if width(s) == 4 else "selective"
    return "log-softmax"


def folded(s: Scenario) -> Path:
    """The path of a head that is folded into the loss, over whole sequences."""
    return Path("tiled", tile=min(TILE, trainer.targets(s)))


def sft(s: Scenario) -> Path:
    """The model's own loss, and since 0.15.0 a token accuracy of a copy of the logits without their last position.

    0.15.0 and 0.15.1 gather these copies of all ranks (trainer/sft_trainer.py, `compute_loss`). 0.22.0 adds entropies,
    of one row at a time, which takes three more of it; since 0.23.0 of 128 tokens. 1.6.0 reads a slice, which the
    entropies copy where there are several rows. 1.7.0 cuts the loss into pieces of 256 tokens. Of Liger's
    loss there are no logits to measure.
    """
    version, b = s.framework_version, width(s)
    if by_liger("sft", version, s.kernels):
        return Path("fused")
    if at_least(version, FOLDED):
        return folded(s)
    if at_least(version, "1.7.0"):
        return Path("chunked", tile=min(PIECE, trainer.targets(s)))
    copies = 0.0
    if at_least(version, "0.15.0"):
        copies = 1.0
    if at_least("0.15.1", version) and copies and s.gpus > 1:
        copies += s.gpus
    if at_least(version, "0.22.0") and not at_least(version, "0.23.0"):
        copies = max(copies, 3 / s.rows)
    if at_least(version, "0.23.0"):
        turn = entropies(s.rows * s.longest_len)
        copies = float(s.rows > 1) + turn if at_least(version, "1.6.0") else max(copies, turn)
    return replace(trainer.own_loss(s), metrics=copies * b, outputs_fp32=trainer.wrapped(s))


def pairs(s: Scenario, *, scored: bool) -> tuple[Path, Path]:
    """The paths of DPOTrainer's policy and of its reference; `scored`: there is a reference, which runs in between.

    Until 0.11 the policy's logits wait for the reference's (`get_batch_loss_metrics`), from 0.9.4 on with the
    log-softmax of the chosen half, whose cross entropy is computed whether it counts or not. 0.12.0 lets go of them,
    and takes the mean of each half's; 0.14.0 rolls labels in place of slicing logits. Since 0.19.0 the outputs have
    hidden states. From 0.29.0 on one function has the outputs of both models to its end (`_compute_loss`), until 1.5
    with a contiguous copy each; then come an entropy and the mean of each half.
    """
    version, b, early = s.framework_version, width(s), not at_least(s.framework_version, "0.12.0")
    if at_least(version, FOLDED):
        return folded(s), folded(s)
    kept = trainer.predicting(s)
    own = Path(kind(s), head_fp32=wide(s), outputs_fp32=trainer.wrapped(s))
    if early:
        own = replace(own, kept=kept, shift_copy=True)
        policy = replace(own, held="inside", aside=b / 2 if at_least(version, "0.9.6") else 0)
        return policy, own
    if not at_least(version, "0.29.0"):
        if not at_least(version, "0.14.0"):
            own = replace(own, kept=kept, shift_copy=True)
        own = replace(own, metrics=b / 2, hidden=at_least(version, "0.19.0"))
        return own, own
    own = replace(own, kept=kept, copied=not at_least(version, "1.6.0") and own.kind != "flash")
    late = replace(own, metrics=measured(s))
    apart = b if own.kind == "selective" and own.copied else 0
    policy = replace(own if scored else late, held="inside", aside=apart)
    return policy, late


def measured(s: Scenario) -> float:
    """Bytes for each logit that DPOTrainer's metrics take at the end, from 0.29.0 on.

    Half of the logits are picked for a mean; entropies copy a slice of several rows, which 1.6.0 no longer has made
    contiguous; 1.14.0 has a kernel for them.
    """
    version, b = s.framework_version, width(s)
    if at_least(version, KERNEL):
        return b / 2
    copies = float(at_least(version, "1.6.0") and s.rows > 1)
    return b * max(1 / 2, copies + entropies(trainer.targets(s)))


def entropies(tokens: int) -> float:
    """Copies of all logits that entropies of `TURN` tokens at a time take: log-softmax, probabilities, their product.

    `entropy_from_logits`, trainer/utils.py.
    """
    return 3 * min(1.0, TURN / tokens)


def kto(s: Scenario) -> tuple[Path, Path]:
    """The paths of KTOTrainer's policy and of its reference.

    The logits of the desirable and of the undesirable are copied, and wait for the reference's; until 0.16 so do those
    of the mismatched completions, whose divergence is estimated (`forward`, trainer/kto_trainer.py). Since 1.6.0 the
    outputs wait, too.
    """
    version, b = s.framework_version, width(s)
    if at_least(version, FOLDED):
        return folded(s), folded(s)
    kept = trainer.predicting(s)
    own = Path(kind(s), head_fp32=wide(s), kept=kept, outputs_fp32=trainer.wrapped(s),
               shift_copy=kind(s) == "log-softmax" and s.rows > 1)  # fmt: skip
    mismatched = 0 if at_least(version, "0.17.0") else b
    if at_least(version, "1.6.0"):
        own = replace(own, copied=not at_least(version, "1.7.0"))
        apart = b + (b if own.copied and own.kind == "selective" else 0)
        return replace(own, held="inside", aside=apart), own
    own = replace(own, aside=mismatched, metrics=b)
    if own.kind == "rows":  # logits wait for backward anyway, and their copies with them
        return replace(own, held="inside", aside=b, metrics=mismatched), own
    # of the logits, of which backward needs none, the copies alone are left
    return replace(own, held="inside", aside=0, metrics=b + mismatched), own


def whole(s: Scenario) -> Path:
    """The path of ORPOTrainer and CPOTrainer: log-probabilities, and the chosen half's cross entropy.

    `selective_log_softmax` has a kernel on any NVIDIA card since 1.14.0 (trainer/utils.py:510 of 1.16.0,
    kernels/logprob_entropy.py:146). SimPO is CPOTrainer's loss_type simpo, whose cross entropy cpo_alpha, 1.0, leaves
    on (experimental/cpo/cpo_trainer.py:842). Accelerate's autocast makes the logits fp32.
    """
    kept = trainer.predicting(s)
    found = trainer.likelihood(s, Path(kind(s), head_fp32=wide(s), kept=kept))
    return replace(found, shift_copy=True) if found.kind == "log-softmax" else found


def compared(s: Scenario) -> Path:
    """The path of GKDTrainer: the student's whole logits, which wait for the teacher's (experimental/gkd/)."""
    return trainer.divergence(s, wide=wide(s))


def trained(s: Scenario) -> Path:
    """The path of the policy that GRPOTrainer trains, which Liger may compute one completion at a time."""
    if by_liger("grpo", s.framework_version, s.kernels):
        return Path("fused-rows", kept=s.response_len / s.seq_len, tile=s.response_len)
    return grpo(s, s.rows)


def grpo(s: Scenario, rows: int) -> Path:
    """The path of GRPOTrainer for `rows` completions: of their logits alone, which `logits_to_keep` asks for.

    Over a temperature since 0.16.0, which copies them, or from 1.0 to 1.9 in place (`_get_per_token_logps`).
    Entropies of each row come with 0.20.0, of 128 tokens with 0.23.0, which copy a slice of several rows where nothing
    else has.
    """
    version, b = s.framework_version, width(s)
    kept = s.response_len / s.seq_len
    if at_least(version, FOLDED):
        return Path("tiled", kept=kept, tile=min(TILE, rows * s.response_len))
    own = Path(kind(s), head_fp32=wide(s), kept=kept, picked=True)
    if not at_least(version, SELECTIVE):
        return replace(own, kind="selective")
    if at_least(version, KERNEL):
        return own
    turn = entropies(rows * s.response_len)
    if at_least(version, "1.0.0") and not at_least(version, "1.10.0"):
        return replace(own, scaled="view", metrics=b * (float(rows > 1) + turn))
    own = replace(own, scaled="copy" if at_least(version, "0.16.0") else "")
    if not at_least(version, "0.20.0"):
        return own
    return replace(own, metrics=b * (turn if at_least(version, "0.23.0") else 3 / rows))


def ppo(s: Scenario, *, held: Held = "forward") -> Path:
    """The path of PPOTrainer: whole logits, the response's divided by a temperature in place, and all hidden states.

    `output_hidden_states` of `forward` (trainer/utils.py of 0.12.0). `held`: outputs and log-softmax are variables of
    `train`, which lives on; in a step of several micro batches with the probabilities of the last.
    """
    b = width(s)
    whole = kind(s) == "log-softmax"
    aside = (b if whole else 0) + (b if held == "next" else 0)
    return Path(kind(s), head_fp32=wide(s), kept=s.response_len / s.seq_len, scaled="view", shift_copy=whole,
                held=held, hidden=True, outputs_fp32=trainer.wrapped(s),
                aside=aside if held != "forward" else 0)  # fmt: skip
