"""Parts of a training step that the harness on a GPU and the tracer share.

Heads, losses, what recomputation keeps, and DeepSpeed's configuration.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
CLIP = 0.2  # PPO's, of ratios and of values

# Operators that torchtitan's policy "op" never recomputes: attention, and sums over ranks. `aten.max` is there for
# scales of 8-bit numbers. The flash-attn package has an operator of its own, which is not in the list.
SAVED = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,  # SDPA's first choice on Hopper with a recent cuDNN
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        aten.max.default,
    }
)


class EverySecondProduct:
    """A policy for one call of one layer: it also keeps every second matrix product: the first, the third and so on.

    torchtitan's `selective_ac_option = "op"` (its `_custom_policy`). `saved` are the operators that are always kept.
    """

    def __init__(self, saved: frozenset[Any] = SAVED) -> None:
        self.saved = saved
        self.products = {False: 0, True: 0}  # by `is_recompute`: PyTorch before 2.13 asks in the second run, too

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """The policy's answer: whether the output of `op` is kept."""
        kept = op in self.saved
        if op is aten.mm.default:
            self.products[context.is_recompute] += 1
            kept = self.products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointing(way: str, policy: Callable[[], Any] = EverySecondProduct) -> dict[str, Any]:
    """The arguments of `torch.utils.checkpoint.checkpoint` for `full`, `selective` or `reentrant`."""
    if way == "selective":
        return {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(policy())}
    return {"use_reentrant": way == "reentrant"}


def zero_config(stage: int, micro_batch: int, accumulation: int, grad_dtype: str, clip: float = 0.0) -> dict[str, Any]:
    """DeepSpeed's configuration of ZeRO `stage`, with its own defaults for the rest.

    PyTorch's fused AdamW, which DeepSpeed has not tested, replaces its FusedAdam, a CUDA kernel over flat partitions
    that keeps two moments and takes nothing else.
    """
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": grad_dtype},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


class Critic(torch.nn.Module):
    """The backbone with a scalar head, as in PPO's critic."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.v_head = torch.nn.Linear(backbone.config.hidden_size, 1, bias=False, dtype=backbone.dtype)

    def forward(self, input_ids: torch.Tensor) -> Any:
        """Values, (rows, tokens)."""
        return self.v_head(self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state).squeeze(-1)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, way: str) -> torch.Tensor:
    """Log-probabilities of `ids`, (rows, tokens), from logits (rows, tokens, vocabulary); `way` is as `logprob`."""
    if way == "log-softmax-fp32":
        return F.log_softmax(logits.float(), dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if way == "logsumexp":
        return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    rows = [
        F.log_softmax(row, dim=-1).gather(-1, own.unsqueeze(-1)).squeeze(-1)
        for row, own in zip(logits, ids, strict=True)
    ]
    return torch.stack(rows)


TEMPERATURE, MIXED = 0.9, 0.5  # GKD's defaults: of both distributions, and the teacher's part of their mixture


def places(logits: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and columns of the first `tokens` of each row, as a mask of them has when it is an index."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    columns = torch.arange(tokens, device=logits.device)
    return rows.repeat_interleave(tokens, output_size=tokens * len(rows)), columns.repeat(len(rows))


def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """TRL's generalised Jensen-Shannon divergence of logits, (rows, tokens, vocabulary), all of whose tokens count.

    trl 1.16 `experimental/gkd/gkd_trainer.py:generalized_jsd_loss`.
    """
    student, teacher = student / TEMPERATURE, teacher / TEMPERATURE
    of_student, of_teacher = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    beta = torch.tensor(MIXED, dtype=of_student.dtype, device=of_student.device)
    mixture = torch.logsumexp(torch.stack([of_student + torch.log1p(-beta), of_teacher + torch.log(beta)]), dim=0)
    from_teacher = F.kl_div(mixture, of_teacher, reduction="none", log_target=True)
    from_student = F.kl_div(mixture, of_student, reduction="none", log_target=True)
    total = beta * from_teacher + (1 - beta) * from_student
    total = total[places(total, total.shape[1])]
    return total.sum() / total.shape[0]


def divergence_in_turn(student: torch.Tensor, teacher: torch.Tensor, turn: int) -> torch.Tensor:
    """The same of all tokens but each row's last, `turn` of them after the others.

    ms-swift 4.6 `rlhf_trainers/gkd_loss.py`.
    """
    picked = [logits[places(logits, logits.shape[1] - 1)] for logits in (student, teacher)]
    student, teacher = (logits / TEMPERATURE for logits in picked)
    beta = torch.tensor(MIXED, dtype=student.dtype, device=student.device)
    total = student.new_zeros(())
    for start in range(0, student.shape[0], turn):
        of_student = F.log_softmax(student[start : start + turn], dim=-1)
        of_teacher = F.log_softmax(teacher[start : start + turn], dim=-1)
        mixture = torch.logsumexp(torch.stack([of_student + torch.log1p(-beta), of_teacher + torch.log(beta)]), dim=0)
        from_teacher, from_student = ((torch.exp(each) * (each - mixture)).sum(-1) for each in (of_teacher, of_student))
        total = total + (beta * from_teacher + (1 - beta) * from_student).sum()
    return total / student.shape[0]


def pair_loss(scores: torch.Tensor, pairs: int, scale: float = 1.0) -> torch.Tensor:
    """The Bradley-Terry loss of scores, (2·pairs,): the chosen first, then as many rejected ones."""
    return -F.logsigmoid(scale * (scores[:pairs] - scores[pairs:])).mean()


def policy_loss(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """PPO's clipped policy loss of log-probabilities, (rows, tokens)."""
    ratio = (new - old).exp()
    return torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()


def value_loss(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """PPO's clipped value loss, (rows, tokens)."""
    clipped = old + (values - old).clamp(-CLIP, CLIP)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
