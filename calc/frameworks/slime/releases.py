"""slime's releases: what each runs on, and its defaults. A release that changes one adds a row.

Read in the repository's tags, THUDM/slime; paths are below `slime/` unless they begin with `scripts` or `docker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, get_args

from calc.frameworks.releases import Default, Table
from calc.scenario.words import RL, Task


class Pins(NamedTuple):
    """The libraries of a release: SGLang's image in `docker/Dockerfile`, and what that SGLang requires."""

    sglang: str
    transformers: str
    torch: str


RELEASES: Mapping[str, Pins] = {
    "0.2.0": Pins("0.5.5", "4.57.1", "2.8.0"),
    "0.2.4": Pins("0.5.9", "4.57.1", "2.9.1"),
    "0.3.0": Pins("0.5.12", "5.6.0", "2.11.0"),  # logits of all samples at once; no host copy of Megatron's buffers
    "0.3.1": Pins("0.5.15", "5.12.1", "2.11.0"),  # log-probabilities and entropies of one softmax
}
FIRST, *_ = RELEASES

DEFAULTS = Table(
    Default("prompt_len", FIRST, 1024, "assumed: --rollout-max-prompt-len has no default, and no script sets it"),
    Default("response_len", FIRST, 8192, "--rollout-max-response-len in scripts/run-qwen3-4B.sh"),
    Default(
        "seq_len", FIRST, 4096, "args.seq_length = 4096 (backends/megatron_utils/arguments.py)",
        tuple(task for task in get_args(Task) if task not in RL),
    ),
    Default("rollout.batch", FIRST, 32, "--rollout-batch-size in scripts/run-qwen3-4B.sh; it has no default"),
    Default(
        "rollout.n", FIRST, 8,
        "--n-samples-per-prompt in scripts/run-qwen3-4B.sh; the flag's 1 leaves a group no advantage",
    ),
    Default("rollout.n", FIRST, 1, "the flag's default", ("ppo",)),
    Default("global_batch", FIRST, 128, "--global-batch-size in scripts/run-qwen3-4B-base-sft.sh", ("sft",)),
    Default("rollout.engine", FIRST, "sglang", "backends/sglang_utils/sglang_engine.py"),
    Default("rollout.tensor_parallel", FIRST, 1, "--rollout-num-gpus-per-engine (utils/arguments.py)"),
    Default(
        "rollout.gpu_memory_utilization", FIRST, 0.7,
        "--sglang-mem-fraction-static in scripts/run-qwen3-4B.sh; SGLang's own default depends on the card",
    ),
    Default("rollout.max_num_seqs", FIRST, 512, "--sglang-server-concurrency (backends/sglang_utils/arguments.py)"),
    Default("rollout.max_tokens_per_gpu", FIRST, None, "--log-probs-max-tokens-per-gpu: as --max-tokens-per-gpu"),
    Default("max_tokens_per_gpu", FIRST, None, "--use-dynamic-batch-size is off (utils/arguments.py)"),
    Default("micro_batch", FIRST, 1, "--micro-batch-size (utils/arguments.py)"),
    Default("sharding", FIRST, "megatron", "always use zero optimizer (backends/megatron_utils/arguments.py)"),
    Default("precision", FIRST, "mixed", "args.bf16 = not args.fp16 (backends/megatron_utils/arguments.py)"),
    Default("grad_dtype", FIRST, "fp32", "--accumulate-allreduce-grads-in-fp32 in every script, and with bf16 anyway"),
    Default("optimizer", FIRST, "adamw", "--optimizer adam in every script"),
    Default("optimizer_impl", FIRST, "fused", "Transformer Engine's FusedAdam, of Megatron-core"),
    Default("offload.optimizer", FIRST, False, "--optimizer-cpu-offload is off"),
    Default("offload.parameters", FIRST, False, "no flag: what leaves goes whole, with --colocate"),
    Default("checkpointing", FIRST, "full", "--recompute-granularity full in every script; the flag has no default"),
    Default("attention", FIRST, "flash", "--attention-backend flash in every script"),
    Default("loss", FIRST, "full", "backends/megatron_utils/loss.py"),
    Default("logprob", FIRST, "logsumexp", "over a rank's part of the vocabulary (utils/ppo_utils.py)"),
    Default("packing", FIRST, True, "always use varlen (backends/megatron_utils/arguments.py)"),
    Default("reentrant", FIRST, True, "Megatron-core's own `CheckpointFunction`"),
    Default("entropy_coeff", FIRST, 0, "--entropy-coef (utils/arguments.py)"),
    Default("roles.reward", FIRST, "none", "--rm-type names a function, or a server elsewhere"),
    Default("roles.reference", FIRST, "none", "--use-kl-loss is off (utils/arguments.py)"),
)  # fmt: skip
# It trains no adapters, and a scenario that asks for them is refused; until then they need to have a shape.
ADAPTERS = Table(
    Default("lora.rank", FIRST, 8, "no flag"),
    Default("lora.targets", FIRST, "all-linear", "no flag"),
    Default("lora.dropout", FIRST, 0.0, "no flag"),
    Default("lora.dtype", FIRST, "bf16", "no flag"),
    Default("lora.units", FIRST, "own", "no flag"),
)
