"""TRL's trainers as installed, on random data: the framework `trl` of `calc`, on one GPU.

Nothing of a step is written here: the trainer makes the batches, runs the step and clips the gradients. Our own parts
are the model, which has the catalog's shape and random weights, a tokenizer with a vocabulary of the same size, and a
reward without a model.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch

from . import model as models
from .meter import Meter, Phases
from .steps import ENOUGH_SECONDS, WARM_UP

PAD, END = "<pad>", "<end>"
KL = 0.04  # any value but zero makes GRPO hold a reference
# Transformers' names (`training_args.OptimizerNames`) of an optimizer and its implementation
OPTIMIZERS = {
    ("adamw", "fused"): "adamw_torch_fused",
    ("adamw", "foreach"): "adamw_torch",
    ("adamw-8bit", "foreach"): "adamw_bnb_8bit",
    ("adamw-paged-8bit", "foreach"): "paged_adamw_8bit",
    ("adamw-paged", "foreach"): "paged_adamw_32bit",
    ("adamw-torchao-8bit", "foreach"): "adamw_torch_8bit",
    ("adafactor", "single"): "adafactor",
    ("lion", "single"): "lion_32bit",
    ("sgd", "foreach"): "sgd",
    ("sgd-momentum", "foreach"): "sgd",
}


class Job:
    """A scenario's trainer. `s` has every default filled in; `configs` has the config.json of its model."""

    def __init__(
        self, s: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], device: torch.device, meter: Meter
    ) -> None:
        self.s, self.meter, self.seconds = s, meter, list[float]()
        self.phases = phases = Phases(meter)
        with meter.of("load"):
            config = configs["model"]
            model = models.random(config, s, device)
            self.trainer = _trainer(model, config, s, device)
        trainer, accelerator = self.trainer, self.trainer.accelerator
        if s["task"] == "grpo":
            trainer._generate = phases.then("rollout", trainer._generate, "score")
        trainer.compute_loss = phases.then("forward", trainer.compute_loss)
        accelerator.backward = phases.then("backward", accelerator.backward)
        accelerator.clip_grad_norm_ = phases.then("step", accelerator.clip_grad_norm_)

    @property
    def notes(self) -> list[str]:
        """Differences from the scenario: another kernel of attention, where its own is not installed."""
        return models.notes(self.s)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model as it is trained, adapters included."""
        return sum(p.numel() for p in self.trainer.model.parameters())

    def run(self, steps: int) -> list[float]:
        """The seconds of each step of up to `steps`; fewer if they are long.

        Raises RuntimeError if the loss scaler of fp16 left fewer than two steps: the states would not be there in any
        other's forward.
        """
        self.trainer.args.max_steps = steps
        skipped: list[bool] = []
        self.trainer.add_callback(_clock(self.seconds, skipped, self.trainer.accelerator, self.meter.cuda))
        with self.phases:
            self.trainer.train()
        if any(skipped) and skipped.count(False) < 2:
            raise RuntimeError(f"the loss scaler skipped {sum(skipped)} of {len(skipped)} steps")
        return self.seconds


def _clock(seconds: list[float], skipped: list[bool], accelerator: Any, cuda: bool) -> Any:
    """A callback that notes how long each step took and whether the optimizer skipped it.

    It ends training once enough time has been measured.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]  # Transformers is not there when types are checked
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.start)
            skipped.append(accelerator.optimizer_step_was_skipped)
            if sum(seconds[WARM_UP:]) >= ENOUGH_SECONDS:
                control.should_training_stop = True

    return Clock()


def _tokenizer(vocabulary: int) -> Any:
    """A tokenizer with one token for each number below `vocabulary`, except the first two."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {PAD: 0, END: 1, **{str(n): n for n in range(2, vocabulary)}}
    plain = Tokenizer(WordLevel(words, unk_token=PAD))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=PAD, eos_token=END)


def _data(s: Mapping[str, Any], vocabulary: int) -> Any:
    """The rows of one step, which the trainer goes through again; each is as long as the scenario says.

    An answer ends with the end of text, which the trainers add. One token of a pair is the prompt's, so that the loss
    takes the others.
    """
    from datasets import Dataset

    draw = random.Random(0)

    def words(tokens: int) -> str:
        return " ".join(str(draw.randrange(2, vocabulary)) for _ in range(tokens))

    def row(place: int) -> dict[str, str | bool]:
        if s["task"] == "grpo":
            return {"prompt": words(s["prompt_len"])}
        if s["task"] == "sft":
            return {"text": words(s["seq_len"] - 1) + " "}
        if s["task"] == "kto":
            answer = {"completion": words(s["seq_len"] - 2) + " ", "label": place % 2 == 0}
            return {"prompt": words(1) + " ", **answer}
        answers = {name: words(s["seq_len"] - 2) + " " for name in ("chosen", "rejected")}
        return {"prompt": words(1) + " ", **answers}

    rollout = s.get("rollout") or {}
    return Dataset.from_list([row(place) for place in range(rollout.get("batch", s["global_batch"]))])


def _reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Rewards that differ within a group, as nothing would be learnt otherwise."""
    return [float(n % 2) for n in range(len(completions))]


def _trainer(model: Any, config: Mapping[str, Any], s: Mapping[str, Any], device: torch.device) -> Any:
    """The trainer of the scenario's task, with the library's own defaults for whatever a scenario does not set."""
    import trl
    from trl.experimental import cpo, orpo

    kinds = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "rm": (trl.RewardTrainer, trl.RewardConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig),
        "simpo": (cpo.CPOTrainer, cpo.CPOConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    }
    kind, arguments = kinds[s["task"]]
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": s["micro_batch"],
        "gradient_accumulation_steps": s["global_batch"] // s["micro_batch"],
        "gradient_checkpointing": s["checkpointing"] == "full",
        "gradient_checkpointing_kwargs": {"use_reentrant": s["reentrant"]},
        "optim": OPTIMIZERS[s["optimizer"], s["optimizer_impl"]],
        "bf16": s["precision"] not in ("fp16", "fp32"),
        "fp16": s["precision"] == "fp16",
        "use_liger_kernel": s["kernels"] == "liger",
        "use_cpu": device.type == "cpu",
        "max_steps": 1,  # until `run` says how many
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    given: dict[str, Any] = {}
    reference = s["roles"].get("reference", "none") != "none"
    adapted = s["method"] != "full"
    if s["task"] == "grpo":
        rollout = s["rollout"]
        options |= {
            "num_generations": rollout["n"],
            "generation_batch_size": rollout["batch"] * rollout["n"],
            "max_completion_length": s["response_len"],
            "beta": KL if reference else 0.0,
        }
        given["reward_funcs"] = _reward
    else:
        options["max_length"] = s["seq_len"]
    if s["optimizer"] == "sgd-momentum":
        options["optim_args"] = "momentum=0.9"
    if s["task"] == "sft":
        options["packing"] = s["packing"]
    if s["task"] == "simpo":
        options["loss_type"] = "simpo"
    if s["offload"]["activations"]:
        options["activation_offloading"] = True
    if adapted:
        given["peft_config"] = models.adapters(model, s)
    if s["task"] in ("dpo", "kto"):
        options["precompute_ref_log_probs"] = not reference
        if reference and not adapted:
            given["ref_model"] = models.random(config, s, device)
    with _no_download(config, s, device) if s["task"] == "grpo" else contextlib.nullcontext():
        return kind(
            model=model,
            args=arguments(**options),
            train_dataset=_data(s, config["vocab_size"]),
            processing_class=_tokenizer(config["vocab_size"]),
            **given,
        )


@contextlib.contextmanager
def _no_download(config: Mapping[str, Any], s: Mapping[str, Any], device: torch.device) -> Any:
    """Have GRPO make its reference as the policy was made, instead of fetching it by the policy's name."""
    from trl.trainer import grpo_trainer

    fetch = grpo_trainer.create_model_from_path
    grpo_trainer.create_model_from_path = lambda *args, **kwargs: models.random(config, s, device)
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = fetch
