"""torchtitan's trainer as installed, on random tokens: framework `torch` of `calc` with trainer `torchtitan`.

Nothing of a step is written here: torchtitan builds its own model, shards it and runs the step. Its communication mode
`fake_backend` makes this process the first rank of as many as the scenario says; collectives bring no data of the
others, and every buffer is allocated all the same. Read in torchtitan 0.2.2, whose settings are a `JobConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from .meter import Meter, Phases
from .steps import timed

NAME, FLAVOR = "measured", "given"  # of our own entry among torchtitan's models
IMPLEMENTATIONS = {"fused": "fused", "foreach": "foreach", "single": "for-loop"}
COMPILED = {"none": [], "model": ["model"], "loss": ["loss"], "model-and-loss": ["model", "loss"]}


class Job:
    """A scenario's trainer. `s` has every default filled in; `configs` has the config.json of its model."""

    def __init__(
        self, s: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], device: torch.device, meter: Meter
    ) -> None:
        self.s, self.phases = s, Phases(meter)
        os.environ.update(NGPU=str(s["gpus"]), LOCAL_RANK="0")
        from torchtitan.distributed import utils as distributed
        from torchtitan.protocols.train_spec import register_train_spec
        from torchtitan.tools import utils
        from torchtitan.train import Trainer

        if device.type == "cpu":  # torchtitan takes a machine without a GPU for one with
            _on_cpu(utils)
        self.spec = _spec(configs["model"], s)
        register_train_spec(NAME, self.spec)
        with meter.of("load"):
            self.trainer = Trainer(_config(s))
        trainer = self.trainer
        trainer.loss_fn = self.phases.then("forward", trainer.loss_fn, "backward")
        trainer.forward_backward_step = self.phases.then("forward", trainer.forward_backward_step)
        distributed.clip_grad_norm_ = self.phases.then("step", distributed.clip_grad_norm_)

    @property
    def notes(self) -> list[str]:
        """Differences from the scenario: none, as its kernels of attention are PyTorch's own."""
        return []

    @property
    def parameters(self) -> int:
        """The number of parameters of the model, whole even if it is sharded."""
        return sum(p.numel() for part in self.trainer.model_parts for p in part.parameters())

    def _batches(self, vocabulary: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Random tokens on the host, as torchtitan's loader of texts cuts them: rows, and labels one further on."""
        while True:
            rows = torch.randint(1, vocabulary, (self.s["micro_batch"], self.s["seq_len"] + 1))
            yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def run(self, steps: int) -> list[float]:
        """The seconds of each step of up to `steps`; fewer if they are long."""
        trainer, batches = self.trainer, self._batches(self.spec.model_args[FLAVOR].vocab_size)

        def step() -> None:
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(batches)

        with self.phases:
            return timed(step, steps, cuda=self.phases.meter.cuda)


def _spec(config: Mapping[str, Any], s: Mapping[str, Any]) -> Any:
    """torchtitan's entry of the model's family, with the shape of `config` and nothing that reads or logs."""
    from torchtitan.protocols.train_spec import get_train_spec

    family = {"llama": "llama3", "qwen3": "qwen3"}[config["model_type"]]
    theirs = get_train_spec(family)
    shape = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "attn_type": "varlen" if s["attention"] == "flash" else "sdpa",
        # attention by lengths runs over documents alone, and each row is one here
        "attn_mask_type": "block_causal" if s["attention"] == "flash" else "causal",
    }
    if family == "qwen3":
        shape |= {
            "hidden_dim": config["intermediate_size"],
            "head_dim": config["head_dim"],
            "enable_weight_tying": bool(config.get("tie_word_embeddings")),
        }
    else:  # it computes the width as a multiple of a share of the hidden size
        usual = int(2 * 4 * config["hidden_size"] / 3)
        shape |= {"multiple_of": 64, "ffn_dim_multiplier": config["intermediate_size"] / usual}
    arguments = type(next(iter(theirs.model_args.values())))(**shape)
    return replace(
        theirs,
        model_args={FLAVOR: arguments},
        build_tokenizer_fn=lambda job: SimpleNamespace(eos_id=0),
        build_dataloader_fn=None,
        build_validator_fn=None,
        build_metrics_processor_fn=lambda job, dims, arguments: _Silent(),
        state_dict_adapter=None,
    )


class _Silent(SimpleNamespace):
    """A processor of metrics that reads none: torchtitan's own resets the peaks that the meter reads."""

    def __init__(self) -> None:
        from torchtitan.tools.utils import NoColor

        monitor = SimpleNamespace(
            device_name="H100", get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        )
        super().__init__(color=NoColor(), device_memory_monitor=monitor)

    def should_log(self, step: int) -> bool:
        """False: nothing is logged."""
        return False


def _config(s: Mapping[str, Any]) -> Any:
    """torchtitan's `JobConfig` of a scenario."""
    from torchtitan.config.job_config import JobConfig

    job = JobConfig()
    job.model.name, job.model.flavor = NAME, FLAVOR
    job.training.local_batch_size, job.training.global_batch_size = s["micro_batch"], s["global_batch"]
    job.training.seq_len = s["seq_len"]
    job.training.dtype = "bfloat16" if s["precision"] == "bf16" else "float32"
    job.optimizer.implementation = IMPLEMENTATIONS[s["optimizer_impl"]]
    job.optimizer.early_step_in_backward = s["optimizer_in_backward"]
    job.parallelism.tensor_parallel_degree = s["tensor_parallel"]
    job.parallelism.context_parallel_degree = s["context_parallel"]
    if s["sharding"] == "ddp":
        job.parallelism.data_parallel_replicate_degree, job.parallelism.data_parallel_shard_degree = s["gpus"], 1
    job.activation_checkpoint.mode = s["checkpointing"]
    job.activation_checkpoint.selective_ac_option = "op"
    job.compile.components = COMPILED[s["compile"]]
    job.compile.enable = bool(job.compile.components)
    if s["float8"] != "none":
        job.model.converters = ["quantize.linear.float8"]
        float8 = job.quantize.linear.float8
        float8.filter_fqns = ["output"]
        # no name stands for the recipe that float8's gather goes with
        float8.recipe_name = None if s["float8"] == "tensorwise" else s["float8"]
        float8.enable_fsdp_float8_all_gather = s["float8_all_gather"]
        float8.precompute_float8_dynamic_scale_for_fsdp = s["float8_all_gather"]
    job.comm.mode = "fake_backend"
    return job


def _on_cpu(utils: Any) -> None:
    """Has torchtitan's modules take the CPU for their device."""
    import torchtitan.distributed.parallel_dims
    import torchtitan.distributed.utils
    import torchtitan.train

    module = torch.cpu
    for each in (utils, torchtitan.distributed.utils, torchtitan.distributed.parallel_dims, torchtitan.train):
        for name, value in (("device_type", "cpu"), ("device_module", module)):
            if hasattr(each, name):
                setattr(each, name, value)
