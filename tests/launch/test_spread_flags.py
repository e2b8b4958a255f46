"""Commands of jobs whose weights stay gathered, whose GPUs form groups, or whose layers lie on several GPUs."""

from __future__ import annotations

from typing import Any

from calc.launch import launch
from calc.resolve.parse import parse

JOB = {"model": "llama-3.1-8b", "task": "pretrain", "gpu": "h100-sxm", "gpus": 8, "trainer": "torchtitan"}


def command(**fields: Any) -> str:
    """The command of a job, in one line."""
    return " ".join(launch(parse(JOB | fields)).command.replace("\\\n", "").split())


def test_torchtitan_is_told_its_groups_and_what_stays() -> None:
    """torchtitan 0.3.0 `config/configs.py`, `Parallelism`."""
    told = command(data_parallel_replicate=2, reshard_after_forward="never")
    degrees = "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 4"
    assert f"{degrees} --parallelism.fsdp_reshard_after_forward never" in told
    assert "fsdp_reshard_after_forward" not in command()
    assert "--parallelism.data_parallel_replicate_degree 8" in command(sharding="ddp")


def test_swift_starts_one_process_where_it_spreads_layers() -> None:
    """Without NPROC_PER_NODE it starts no torchrun, and places layers by `device_map` (4.6.0 `cli/main.py`)."""
    swift = {"trainer": "ms-swift", "task": "sft", "method": "lora", "gpus": 2}
    assert command(**swift, device_map="auto").startswith("swift sft")
    assert command(**swift).startswith("NPROC_PER_NODE=2 ")
    several = {"gpus": 8, "device_map": "auto", "device_map_gpus": 2, "sharding": "ddp"}
    assert command(**swift | several).startswith("NPROC_PER_NODE=4 ")
