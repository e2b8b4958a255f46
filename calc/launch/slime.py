"""slime's command: `train.py` with Megatron-LM's flags, slime's own, and SGLang's behind `--sglang-`.

SFT is `train_async.py` with responses that a data set has, as scripts/run-qwen3-4B-base-sft.sh starts it.

The model's shapes are an array in one of slime's `scripts/models`, which only bash reads. A flag that decides memory is
written even where it has its default. Files are those of THUDM/slime 0.3.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.base.optimizers import OPTIMIZERS
from calc.launch import shell
from calc.launch.shell import Launch, LaunchError, Placeholder, Words, option, own, switch
from calc.models.slices import account_for, told_layers
from calc.scenario.scenario import Scenario

FIRST = "0.2"
ESTIMATORS = {"ppo": "ppo", "grpo": "grpo", "reinforce++": "reinforce_plus_plus"}
SFT = "slime.rollout.sft_rollout.generate_rollout"
DEGREES = {
    "tensor_parallel": "tensor-model-parallel-size",
    "pipeline_parallel": "pipeline-model-parallel-size",
    "context_parallel": "context-parallel-size",
    "expert_parallel": "expert-model-parallel-size",
    "expert_tensor_parallel": "expert-tensor-parallel-size",
}
STARTS = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 bash -c "
    """'source "$0" && exec python3 SCRIPT "${MODEL_ARGS[@]}" "$@"' """
)


def launch(s: Scenario) -> Launch:
    """The command for `s`; raises LaunchError if nothing generates."""
    if s.rollout and not s.rollout.serves:
        raise LaunchError("rollout.engine: given 'none', allowed for a command of slime: sglang")
    model = shell.model_name(s.model)
    script = Placeholder("MODEL_SCRIPT", f"file of slime in scripts/models with the shapes of {model}")
    starts = STARTS.replace("SCRIPT", "train.py" if s.rollout else "train_async.py")
    return Launch(shell.setting(s, shell.command(f"{starts}{script}", flags(s))), {}, tuple(notes(s)))


def flags(s: Scenario) -> Iterator[Words]:
    """All flags but the model's shapes."""
    actor = own(s, "actor") if s.rollout else s
    yield from machine(s, actor)
    yield option("--hf-checkpoint", shell.model_name(actor.model))
    yield option("--ref-load", Placeholder("TORCH_DIST", "the model as tools/convert_hf_to_torch_dist.py writes it"))
    yield from rollout(s) if s.rollout else supervised(s)
    yield option("--global-batch-size", actor.global_batch)
    yield from batched(s, actor)
    yield from layers(actor)
    yield option("--optimizer", OPTIMIZERS[actor.optimizer].spelled.slime)
    yield from switch("--optimizer-cpu-offload", actor.offload.optimizer)
    yield from switch("--use-precision-aware-optimizer", actor.offload.optimizer)
    yield from switch("--accumulate-allreduce-grads-in-fp32", True)
    yield option("--attention-dropout", 0.0)
    yield option("--hidden-dropout", 0.0)
    if not s.architecture.mla:  # which that backend does not know
        yield option("--attention-backend", "flash")


def supervised(s: Scenario) -> Iterator[Words]:
    """The flags of SFT: its data, its loss, and no SGLang."""
    yield option("--rollout-function-path", SFT)
    yield option("--prompt-data", Placeholder("PROMPT_DATA", "JSON lines or parquet with a field messages"))
    yield option("--input-key", "messages")
    yield option("--num-epoch", Placeholder("NUM_EPOCH", "epochs"))
    yield option("--rollout-batch-size", s.global_batch)
    yield option("--loss-type", "sft_loss")
    for name in ("calculate-per-token-loss", "disable-compute-advantages-and-returns", "debug-train-only"):
        yield from switch(f"--{name}", True)


def machine(s: Scenario, actor: Scenario) -> Iterator[Words]:
    """The GPUs of training, and of SGLang where it has its own."""
    nodes, each = shell.nodes_of(actor.gpus, s.gpus_per_node)
    yield option("--actor-num-nodes", nodes)
    yield option("--actor-num-gpus-per-node", each)
    yield option("--num-gpus-per-node", s.gpus_per_node)
    if s.rollout:
        yield from switch("--colocate", s.placement == "colocated")
    if s.rollout and s.placement != "colocated":
        yield option("--rollout-num-gpus", s.rollout.gpus)


def rollout(s: Scenario) -> Iterator[Words]:
    """The flags of the data, of what is generated, of SGLang, and of the policy's loss."""
    assert s.rollout
    yield option("--advantage-estimator", ESTIMATORS[s.task])
    yield from switch("--normalize-advantages", s.task == "reinforce++")
    yield from switch("--use-kl-loss", s.has("reference"))
    yield option("--entropy-coef", f"{s.entropy_coeff:g}")
    yield option("--prompt-data", Placeholder("PROMPT_DATA", "JSON lines with a field prompt, and label for a reward"))
    yield option("--rm-type", Placeholder("RM_TYPE", "what scores a response, as deepscaler or math"))
    yield option("--num-rollout", Placeholder("NUM_ROLLOUT", "iterations"))
    yield option("--rollout-batch-size", s.rollout.batch)
    yield option("--n-samples-per-prompt", s.rollout.n)
    yield option("--rollout-max-prompt-len", s.prompt_len)
    yield option("--rollout-max-response-len", s.response_len)
    yield option("--rollout-num-gpus-per-engine", s.rollout.tensor_parallel)
    yield option("--sglang-mem-fraction-static", s.rollout.gpu_memory_utilization)
    yield option("--sglang-server-concurrency", s.rollout.max_num_seqs)


def batched(s: Scenario, actor: Scenario) -> Iterator[Words]:
    """The flags of a micro batch: a bound of tokens, or sequences."""
    if not actor.max_tokens_per_gpu:
        yield option("--micro-batch-size", actor.micro_batch)
        return
    yield from switch("--use-dynamic-batch-size", True)
    yield option("--max-tokens-per-gpu", actor.max_tokens_per_gpu)
    if s.rollout and s.rollout.max_tokens_per_gpu:
        yield option("--log-probs-max-tokens-per-gpu", s.rollout.max_tokens_per_gpu)


def layers(s: Scenario) -> Iterator[Words]:
    """The flags that cut layers over GPUs, and run them again for backward."""
    for field, called in DEGREES.items():
        yield option(f"--{called}", getattr(s, field))
    yield from switch("--sequence-parallel", s.sequence_parallel)
    if s.expert_capacity:
        yield option("--moe-expert-capacity-factor", f"{s.expert_capacity:g}")
        yield from switch("--moe-pad-expert-input-to-capacity", s.expert_padding)
    if s.virtual_pipeline > 1:
        yield option("--num-virtual-stages-per-pipeline-rank", s.virtual_pipeline)
    told = told_layers(s.architecture.layers, s.pipeline_parallel, s.pipeline_layers, s.virtual_pipeline)
    for which, count in told.items():
        yield option(f"--decoder-{which}-pipeline-num-layers", count)
    for name in account_for(s.pipeline_layers, s.virtual_pipeline):
        yield (f"--{name.replace('_', '-')}",)
    if s.checkpointing == "full":
        yield option("--recompute-granularity", "full")
        yield option("--recompute-method", "uniform")
        yield option("--recompute-num-layers", 1)
    elif s.recomputed:
        yield option("--recompute-granularity", "selective")
        yield option("--recompute-modules", *sorted(s.recomputed))


def notes(s: Scenario) -> Iterator[str]:
    """Notes on the values that the reader fills in."""
    yield shell.needs("MODEL_SCRIPT", "a file of slime's scripts/models, or one like it")
    yield shell.needs("TORCH_DIST", "the checkpoint that tools/convert_hf_to_torch_dist.py makes")
    if s.rollout:
        yield shell.needs(
            "PROMPT_DATA, RM_TYPE and NUM_ROLLOUT", "the prompts, what scores responses, and for how long"
        )
    else:
        yield shell.needs(
            "PROMPT_DATA and NUM_EPOCH", "the conversations, none of them longer than seq_len, and epochs"
        )
    yield "it runs in slime's folder, with Megatron-LM on PYTHONPATH"
    if s.nodes > 1:
        yield shell.ray_on_every_node(s)
    yield from shell.unsaid(s, "expandable_segments")
    yield from shell.common_notes(s)
