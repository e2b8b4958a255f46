"""verl by version: defaults, refusals, roles and their order, each row read in that release's package or the fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from jobs import job

from calc.base.plan import Keeps, Path
from calc.estimate.estimate import estimate
from calc.frameworks.verl import verl
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError

FORK = "tinyzero"
RELEASED = [version for version in verl.RELEASES if version != FORK]


def run(version: str = "0.9.1", **fields: Any) -> Scenario:
    """GRPO of Qwen2.5-7B on 4 GPUs; `__` in a name is a dot."""
    base = {"model": "qwen2.5-7b", "task": "grpo", "gpu": "a100-80-sxm", "gpus": 4, "framework": f"verl=={version}"}
    return parse(base | {name.replace("__", "."): value for name, value in fields.items()})


def kept(version: str = "0.9.1", **fields: Any) -> Keeps:
    """verl's plan for `run(version, **fields)`."""
    return verl.keeps(run(version, **fields))


def with_reference(version: str, **fields: Any) -> Keeps:
    """The same with a reference, which from 0.4 on is asked for."""
    return kept(version, roles={"reference": {}}, **fields)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("tinyzero", "tinyzero"),
        ("0.1", "tinyzero"),  # the fork was made of it
        ("0.2.0.post2", "0.2"),
        ("0.3", "0.3.0"),
        ("0.4.1", "0.4.0"),
        ("0.5.0", "0.5.0"),
        ("0.6", "0.6.1"),
        ("0.7.0", "0.7.0"),
        ("0.7", "0.7.1"),
        ("1.0", "0.9.1"),
    ],
)
def test_a_version_is_a_release_or_the_fork(version: str, known: str) -> None:
    """The fork stands for what came before the first release with micro-batches a GPU."""
    assert verl.nearest(version) == known


@pytest.mark.parametrize("version", verl.KNOWN)
@pytest.mark.parametrize("task", ["ppo", "grpo", "reinforce++"])
def test_the_defaults_of_every_release_make_a_job(version: str, task: str) -> None:
    """Every field is filled in, and what is filled in is a scenario that says the same again."""
    s = run(version, task=task)
    assert parse(s.as_dict()) == s
    assert s.has("critic") == (task == "ppo")  # need_critic: adv_estimator gae (trainer/ppo/utils.py:100 of 0.9.1)
    assert not s.has("reward")  # reward_model.enable: False


@pytest.mark.parametrize("version", verl.RELEASES)
def test_lengths_batches_and_vllms_share_never_changed(version: str) -> None:
    """data.max_prompt_length 512, max_response_length 512, train_batch_size 1024, actor.ppo_mini_batch_size 256;
    rollout.tensor_model_parallel_size 2, gpu_memory_utilization 0.5, free_cache_engine True."""
    s = run(version, task="ppo")
    assert s.rollout
    assert (s.prompt_len, s.response_len, s.rollout.batch, s.global_batch) == (512, 512, 1024, 256)
    assert (s.rollout.tensor_parallel, s.rollout.gpu_memory_utilization, s.rollout.sleep) == (2, 0.5, True)
    assert (s.precision, s.optimizer_impl, s.sharding, s.grad_dtype) == ("fsdp-mixed", "foreach", "fsdp1", "fp32")
    assert (s.attention, s.offload.optimizer, s.offload.parameters) == ("flash", False, False)


def test_a_group_has_five_responses_where_one_would_have_no_advantage() -> None:
    """rollout.n is 1 in the yaml; examples/grpo_trainer sets 5, and the mini-batch counts prompts."""
    for task, n in {"ppo": 1, "grpo": 5, "reinforce++": 5}.items():
        s = run(task=task)
        assert s.rollout
        assert (s.rollout.n, s.global_batch) == (n, 256 * n)
    assert run(rollout__batch=64).global_batch == 64 * 5


@pytest.mark.parametrize(
    ("version", "checkpointing", "packing", "reference"),
    [
        # enable_gradient_checkpointing: False, use_remove_padding: False; main_ppo.py maps RefPolicy always
        (FORK, "none", False, True),
        ("0.2", "full", False, True),  # enable_gradient_checkpointing: True
        ("0.3.0", "full", False, True),
        ("0.4.0", "full", False, False),  # main_ppo.py:130: use_kl_in_reward or use_kl_loss, both False
        ("0.6.1", "full", False, False),
        ("0.7.0", "full", True, False),  # model/hf_model.yaml:40, use_remove_padding: True
        ("0.9.1", "full", True, False),
    ],
)
def test_defaults_that_changed(version: str, checkpointing: str, packing: bool, reference: bool) -> None:
    """ppo_trainer.yaml of each release, and main_ppo.py for the reference."""
    s = run(version)
    assert (s.checkpointing, s.packing, s.has("reference")) == (checkpointing, packing, reference)


@pytest.mark.parametrize(
    ("version", "vllm", "transformers", "torch"),
    [
        (FORK, "0.6.3", "4.47.1", "2.4.0"),  # requirements.txt: transformers<4.48, vllm==0.6.3
        ("0.2", "0.6.3", "4.47.1", "2.4.0"),  # transformers<4.48, vllm<=0.6.3
        ("0.4.0", "0.8.5", "4.51.3", "2.6.0"),  # vllm<=0.8.5
        ("0.6.0", "0.9.1", "4.56.1", "2.7.0"),  # vllm<=0.9.1,>=0.7.3
        ("0.6.1", "0.11.0", "4.56.1", "2.8.0"),  # vllm<=0.11.0,>=0.8.5
        ("0.7.1", "0.12.0", "4.57.1", "2.9.0"),  # vllm<=0.12.0,>=0.8.5
        ("0.9.1", "0.24.0", "5.9.0", "2.11.0"),  # vllm==0.24.0, transformers==5.9.0, torch==2.11.0
    ],
)
def test_libraries_are_the_newest_that_a_release_allows(version: str, vllm: str, transformers: str, torch: str) -> None:
    """METADATA of the packages; the worker that verl patches is vLLM 0.6.3's."""
    assert run(version).versions.items() >= {"vllm": vllm, "transformers": transformers, "torch": torch}.items()


@pytest.mark.parametrize(
    ("micro_batch", "n", "prompts", "gpus", "expected"),
    [
        (16, 32, 8, 4, 64),  # a flag of 64 on 4 GPUs would be 512 sequences: the GPU's whole rollout is 64
        (16, 16, 8, 4, 32),
        (2, 32, 8, 4, 64),
        (1, 32, 8, 4, 32),  # the least: n
        (4, 16, 64, 4, 64),
        (8, 1, 1024, 8, 8),
        (8, 1, 1, 8, 1),  # fewer sequences than GPUs, refused later
    ],
)
def test_the_fork_multiplies_its_micro_batch_by_n(
    micro_batch: int, n: int, prompts: int, gpus: int, expected: int
) -> None:
    """`ppo_micro_batch_size //= world size; *= rollout.n`, of which `split` hands out what there is."""
    for version, rows in ((FORK, expected), ("0.2", micro_batch)):
        s = run(version)
        assert s.rollout
        rollout = replace(s.rollout, n=n, batch=prompts)
        assert replace(s, micro_batch=micro_batch, gpus=gpus, rollout=rollout).rows == rows


def test_the_forks_rows_reach_the_actor_and_the_reference_but_not_the_critic() -> None:
    """fsdp_workers.py:96-109 multiplies for actor, rollout and reference, :535-537 only divides for the critic."""
    k = kept(FORK, task="ppo", micro_batch=4, rollout={"n": 8, "batch": 16})
    assert {role.name: (role.rows, role.scoring_rows) for role in k.roles} == {
        "critic": (4, 4),
        "reference": (32, 32),
        "actor": (32, 32),
    }
    assert k.notes == (
        "The fork runs 32 sequences in one forward: it multiplies its micro-batch flag, here 4 for each GPU, by "
        "rollout.n = 8, so that 8 are the least, and a GPU's whole rollout, 32, the most.",
    )
    assert kept("0.2").notes == ()


@pytest.mark.parametrize(("gpus", "share"), [(1, 64), (4, 16), (8, 8)])
def test_the_forks_default_flag_is_64_for_all_gpus(gpus: int, share: int) -> None:
    """actor.ppo_micro_batch_size: 64; later ppo_micro_batch_size_per_gpu: null, which must be given."""
    assert run(FORK, gpus=gpus).micro_batch == share
    assert run("0.2", gpus=gpus).micro_batch == 1


def test_models_load_one_after_another_and_the_rollout_last() -> None:
    """trainer/ppo/ray_trainer.py, init_workers."""
    roles = {"reference": {}, "reward": {"model": "qwen2.5-7b"}}
    k = kept("0.6.1", task="ppo", roles=roles)
    assert k.loading == ("critic", "reference", "reward", "actor", "rollout")
    assert kept().loading == ("actor", "rollout")
    assert {role.process for role in k.roles} == {"trainer"}


def test_a_step_goes_through_the_roles_in_turn() -> None:
    """trainer/ppo/v1/trainer_base.py:533-620 of 0.9.1."""
    k = kept(task="ppo", roles={"reference": {}})
    assert [(stage.does, stage.role) for stage in k.stages] == [
        ("serve", "rollout"),
        ("score", "actor"),
        ("score", "reference"),
        ("score", "critic"),
        ("train", "critic"),
        ("train", "actor"),
        ("save", "actor"),
        ("save", "critic"),
        ("sync", "actor"),
        ("sync", "actor"),
    ]
    assert [stage.engine for stage in k.stages] == ["all", *["asleep"] * 7, "weights", "weights"]
    assert not any(stage.inside or stage.beside or stage.alternating for stage in k.stages)


def syncs(k: Keeps) -> list[tuple[str, tuple[str, ...]]]:
    """The parts of vLLM that are there as weights come, and the content of the moments."""
    return [(stage.engine, stage.holds) for stage in k.stages if stage.does == "sync"]


@pytest.mark.parametrize(
    ("version", "before", "bucket"),
    [
        (FORK, "asleep", ()),
        ("0.7.0", "asleep", ()),
        ("0.7.1", "asleep", ("bucket",)),
        ("0.8.0", "weights", ("bucket",)),
    ],
)
def test_weights_are_copied_in_fp32_and_gathered_one_by_one(version: str, before: str, bucket: tuple[str, ...]) -> None:
    """fsdp_workers.py:740-822 of 0.7.1 makes the state dict before vLLM wakes, engine_workers.py:772-785 of 0.9.1
    afterwards; buckets of 2048 MiB came with the servers."""
    assert syncs(kept(version)) == [(before, ("units", "copies")), ("weights", ("copies", "parameter", *bucket))]


def test_fsdp2_hands_on_its_own_shards_and_adapters_go_alone() -> None:
    """FSDP 2's state dict refers to the shards; for adapters FSDP 1 summons the whole model."""
    assert syncs(kept(sharding="fsdp2")) == [("weights", ("parameter", "bucket"))]
    assert syncs(kept(sharding="fsdp2", method="lora")) == [("weights", ("bucket",))]
    assert syncs(kept(method="lora")) == [("weights", ("whole",)), ("weights", ("bucket",))]
    assert syncs(kept("0.4.0", method="lora")) == [("asleep", ("whole",)), ("weights", ())]


@pytest.mark.parametrize(
    ("version", "sharding", "summoned", "level"),
    [
        ("0.4.0", "fsdp1", ("layer",), 1),  # layered_summon_lora_params, utils/fsdp_utils.py:464
        ("0.6.0", "fsdp1", ("layer",), 1),  # its vLLM then keeps the base: vllm_rollout_spmd.py:105
        ("0.8.0", "fsdp1", ("layer",), 1),
        ("0.9.0", "fsdp1", ("adapter",), 1),  # unit by unit, nested ones left out: utils/fsdp_utils.py:645 of 0.9.1
        ("0.6.0", "fsdp2", (), 1),
        ("0.9.1", "fsdp2", ("bucket",), 1),  # summon_full_params finds no unit of FSDP 1
    ],
)
def test_layered_summon_gathers_a_layer_or_an_adapter_at_a_time(
    version: str, sharding: str, summoned: tuple[str, ...], level: int
) -> None:
    """Without it FSDP 1 summons all; whatever it is, adapters leave the base in a vLLM that sleeps at level 1."""
    k = kept(version, sharding=sharding, method="lora", rollout={"layered_summon": True})
    assert syncs(k)[0][1] == summoned
    assert k.serving
    assert k.serving.sleep_level == level
    assert not run(version, method="lora").rollout.layered_summon  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("version", "sharding", "holds", "host"),
    [
        (FORK, "fsdp1", ("units",), "first"),  # FullStateDictConfig(rank0_only=True)
        ("0.2", "fsdp1", ("units",), "shards"),
        ("0.3.0", "fsdp1", ("units",), "shards"),  # hf_model among the contents saves the configuration alone
        ("0.9.1", "fsdp1", ("units",), "shards"),
        ("0.9.1", "fsdp2", (), ""),
    ],
)
def test_a_checkpoint_is_gathered_group_by_group(
    version: str, sharding: str, holds: tuple[str, ...], host: str
) -> None:
    """utils/checkpoint/fsdp_checkpoint_manager.py; fsdp_workers.py:489 of the fork."""
    stage = next(stage for stage in kept(version, sharding=sharding).stages if stage.does == "save")
    assert (stage.holds, stage.host) == (holds, host)
    assert not host or stage.host_bytes == 4


@pytest.mark.parametrize(
    ("version", "seqs", "tokens", "graphs", "share_of_free", "level", "process"),
    [
        (FORK, None, None, False, True, 2, "trainer"),
        ("0.2", None, 8192, False, True, 2, "trainer"),
        ("0.4.0", None, 8192, False, False, 1, "trainer"),
        ("0.6.0", 1024, 8192, True, False, 2, "trainer"),
        ("0.7.0", 1024, 8192, True, False, 2, "trainer"),
        ("0.7.1", 1024, 8192, True, False, 2, "vllm"),
        ("0.9.0", 256, 8192, True, False, 2, "vllm"),
    ],
)
def test_vllm_gets_what_the_release_passes(
    version: str, seqs: int | None, tokens: int | None, graphs: bool, share_of_free: bool, level: int, process: str
) -> None:
    """workers/rollout/vllm_rollout/*.py and rollout/rollout.yaml of each release."""
    serving = kept(version).serving
    assert serving
    assert (serving.max_num_seqs, serving.max_num_batched_tokens, serving.graphs) == (seqs, tokens, graphs)
    assert (serving.share_of_free, serving.sleep_level, serving.process) == (share_of_free, level, process)
    assert (serving.version, serving.max_model_len) == (run(version).versions["vllm"], 1024)


def test_vllms_own_worker_shares_the_whole_card_and_adapters_keep_its_weights() -> None:
    """third_party/vllm has workers for 0.5.4 and 0.6.3 alone; vllm_async_server.py:636 of 0.7.1 sleeps at level 1."""
    own = kept("0.3.0", versions={"vllm": "0.8.2"}).serving
    assert own
    assert not own.share_of_free
    levels = {
        version: kept(version, method="lora").serving for version in ("0.4.0", "0.6.0", "0.7.0", "0.7.1", "0.9.1")
    }
    assert [serving and serving.sleep_level for serving in levels.values()] == [1, 2, 2, 1, 1]


ONE = Path("flash", scaled="view", entropy="compiled")
OVER = Path("flash", scaled="view", in_place=True)


@pytest.mark.parametrize(
    ("version", "train", "old", "reference"),
    [
        (FORK, ONE, ONE, ONE),
        ("0.2", ONE, ONE, ONE),
        ("0.3.0", ONE, ONE, ONE),
        ("0.4.0", OVER, ONE, OVER),
        ("0.8.0", OVER, ONE, OVER),
        (
            "0.9.0",
            Path("flash", scaled="copy", in_place=True),
            Path("flash", scaled="copy", entropy="compiled"),
            Path("flash", scaled="copy", in_place=True),
        ),
        ("0.9.1", Path("flash", in_place=True), Path("flash", entropy="compiled"), Path("flash", in_place=True)),
    ],
)
def test_the_path_to_log_probabilities(version: str, train: Path, old: Path, reference: Path) -> None:
    """`_forward_micro_batch` and `prepare_model_outputs`, with padding removed; the entropy's coefficient is 0 since
    0.4, but old log-probabilities come with it."""
    k = with_reference(version, packing=True)
    assert (k.role("actor").path, k.role("actor").scoring, k.role("reference").scoring) == (train, old, reference)


SLICED: dict[str, Any] = {"scaled": "in-place", "cut": "slice", "shift_copy": True, "kept": 0.75}
CUT: dict[str, Any] = {"cut": "unpad", "in_place": True}


@pytest.mark.parametrize(
    ("version", "train", "old", "reference"),
    [
        # `entropy_from_logits` itself, always until 0.3, of the response
        (FORK, *[Path("flash", entropy="eager", **SLICED)] * 3),
        ("0.3.0", *[Path("flash", entropy="eager", **SLICED)] * 3),
        # `logprobs_from_logits` writes its gradient over the logits by default
        *[
            (
                version,
                Path("flash", in_place=True, **SLICED),
                Path("flash", entropy="eager", **SLICED),
                Path("flash", in_place=True, **SLICED),
            )
            for version in ("0.4.0", "0.7.1")
        ],
        # the entropy of all positions, then `torch.cat` of the rows of a nested tensor
        *[
            (
                version,
                Path("flash", scaled=scaled, **CUT),
                Path("flash", scaled=scaled, cut="unpad", entropy="eager"),
                Path("flash", scaled=scaled, **CUT),
            )
            for version, scaled in {"0.8.0": "in-place", "0.9.0": "copy", "0.9.1": ""}.items()
        ],
    ],
)
def test_the_path_where_padding_stays(version: str, train: Path, old: Path, reference: Path) -> None:
    """`_forward_micro_batch` and `prepare_model_outputs` with use_remove_padding False; logits of a forward of their
    own are no view, so `div_` needs no clones."""
    k = with_reference(version, packing=False, micro_batch=2, prompt_len=256, response_len=768, rollout__n=8)
    assert (k.role("actor").path, k.role("actor").scoring, k.role("reference").scoring) == (train, old, reference)


def test_the_slice_of_one_row_needs_no_copy() -> None:
    """`logits[:, -response_length - 1:-1]` until 0.7, which `reshape` copies unless there is one row."""
    one = kept("0.7.0", packing=False, micro_batch=1).role("actor").path
    assert one == Path("flash", scaled="in-place", cut="slice", in_place=True, kept=0.5)


def test_an_early_transformers_casts_logits_to_fp32() -> None:
    """`logits = logits.float()` in modeling_qwen2.py until 4.45."""
    assert kept("0.2", versions={"transformers": "4.45.2"}).role("actor").path.head_fp32
    assert not kept("0.2").role("actor").path.head_fp32


def test_value_and_reward_models_have_no_vocabulary() -> None:
    """AutoModelForTokenClassification with one label."""
    k = kept("0.6.1", task="ppo", roles={"reward": {"model": "qwen2.5-7b"}})
    for name in ("critic", "reward"):
        assert (k.role(name).path, k.role(name).scoring) == (Path("scalar"), Path("scalar"))


def test_weights_of_bf16_alone_halve_what_a_rank_holds() -> None:
    """`fsdp_config.model_dtype: bf16`: weights, reduced gradients and Adam's states; adapters follow since 0.9.1."""
    wide, narrow = estimate(run()), estimate(run(precision="bf16"))
    held = [
        {line.component: line.bytes for line in e.groups[0].peak.moment.lines if line.role == "actor"}
        for e in (wide, narrow)
    ]
    for component in ("weights", "optimizer_states"):
        assert held[1][component] == pytest.approx(held[0][component] / 2, rel=1e-3)
    assert narrow.scenario.grad_dtype == "bf16"
    adapters = run(method="lora", precision="bf16").lora
    assert adapters
    assert adapters.dtype == "bf16"
    with pytest.raises(ScenarioError, match="precision: given 'bf16'"):
        run("0.8.0", method="lora", precision="bf16")


@pytest.mark.parametrize(
    ("version", "precision", "host", "leaves"),
    [
        (FORK, "bf16", False, ()),
        ("0.2", "bf16", True, ()),
        ("0.4.0", "bf16", True, ()),
        ("0.6.0", "fsdp-mixed", True, ()),  # engine/fsdp.yaml: model_dtype fp32
        ("0.9.1", "fsdp-mixed", True, ()),
    ],
)
def test_a_reference_lies_on_the_host_in_every_release(
    version: str, precision: str, host: bool, leaves: tuple[str, ...]
) -> None:
    """fsdp_workers.py:248 of 0.2, engine.py:433 of 0.9.1: CPUOffload(offload_params=True) for what is not trained."""
    own = run(version, roles={"reference": {}}).role("reference")
    assert own
    assert (own.precision, own.offload.parameters) == (precision, host)
    assert with_reference(version).role("reference").leaves == frozenset(leaves)


def test_verl_moves_what_is_trained_and_the_fork_its_reference_too() -> None:
    """param_offload and optimizer_offload of each role; they come back for the role's own phases."""
    offload = {"optimizer": True, "parameters": True}
    k = kept("0.4.0", task="ppo", offload=offload, roles={"reference": {}, "critic": {"offload.parameters": False}})
    assert k.role("actor").leaves == {"weights", "states"}
    assert k.role("critic").leaves == {"states"}
    assert k.role("reference").leaves == frozenset()
    assert kept(FORK, offload=offload).role("reference").leaves == frozenset()  # its own ref.fsdp_config says otherwise
    own = kept(FORK, roles={"reference": {"offload.parameters": True}})
    assert own.role("reference").leaves == {"weights"}
    assert own.role("actor").leaves == frozenset()


@pytest.mark.parametrize(
    ("version", "sharding", "stays"),
    [
        (FORK, "fsdp1", True),
        ("0.2", "fsdp1", False),
        ("0.7.1", "fsdp1", False),
        ("0.8.0", "fsdp1", True),
        ("0.9.1", "fsdp1", True),
        ("0.4.0", "fsdp2", True),  # torch 2.6 never reshards the root after a forward
        ("0.6.0", "fsdp2", False),
        ("0.9.1", "fsdp2", False),
    ],
)
def test_the_root_group_stays_unless_it_is_resharded(version: str, sharding: str, stays: bool) -> None:
    """`_handle.reshard(True)` in fsdp_workers.py from 0.2 to 0.7, from 0.8 on only where fsdp_size > 1."""
    k = with_reference(version, sharding=sharding)
    assert {role.root_stays for role in k.roles} == {stays}


def test_with_adapters_the_reference_is_the_actor_without_them() -> None:
    """ref_in_actor (ray_trainer.py:393 of 0.4.0). Adapters have the base's type, since a flat parameter has one."""
    s = run("0.4.0", method="lora", roles={"reference": {}})
    k = verl.keeps(s)
    assert s.lora
    assert (s.lora.rank, s.lora.targets, s.lora.dtype) == (64, "all-linear", "fp32")
    assert k.role("reference").shares
    assert k.loading == ("actor", "rollout")
    assert not with_reference("0.4.0").role("reference").shares


def test_the_actor_alone_is_scored_by_the_rollouts_micro_batch() -> None:
    """rollout.log_prob_micro_batch_size_per_gpu; ref and critic have keys of their own, the critic's its update's."""
    roles = {"reference": {"micro_batch": 3}}
    k = kept(task="ppo", micro_batch=2, rollout={"micro_batch": 8}, roles=roles)
    assert {r.name: (r.rows, r.scoring_rows) for r in k.roles} == {
        "actor": (2, 8), "critic": (2, 2), "reference": (3, 3),
    }  # fmt: skip
    assert kept(micro_batch=2).role("actor").scoring_rows == 2
    few = kept(micro_batch=2, rollout={"micro_batch": 8, "batch": 4, "n": 4}, global_batch=16)
    assert few.role("actor").scoring_rows == 4  # 16 responses on 4 GPUs
    fork = kept(FORK, micro_batch=1, rollout={"n": 2, "batch": 64}).role("actor")
    assert (fork.rows, fork.scoring_rows) == (2, 32)  # 128 // 4 GPUs x n are 64, of which a GPU has 32


@pytest.mark.parametrize(
    ("version", "coefficient", "entropy", "in_place"),
    [
        ("0.3.0", 0, "compiled", False),  # always computed beside the log-probability
        ("0.4.0", 0, "", True),
        ("0.4.0", 0.001, "compiled", False),  # calculate_entropy, inplace_backward = False (dp_actor.py:158 and :386)
        ("0.9.1", 0.001, "compiled", False),
    ],
)
def test_the_entropy_enters_the_actors_loss_by_its_coefficient(
    version: str, coefficient: float, entropy: str, in_place: bool
) -> None:
    """actor.entropy_coeff, 0.001 until 0.3, then 0; the critic and the reference have none."""
    k = kept(version, task="ppo", packing=True, entropy_coeff=coefficient)
    assert (k.role("actor").path.entropy, k.role("actor").path.in_place) == (entropy, in_place)
    assert k.role("critic").path == Path("scalar")
    assert {v: run(v).entropy_coeff for v in (FORK, "0.3.0", "0.4.0")} == {FORK: 0.001, "0.3.0": 0.001, "0.4.0": 0}


def test_vllm_takes_what_the_scenario_says_of_its_batches() -> None:
    """The reserve of a step: 40 B of each of 512 sequences' logits and less, or an MLP on 1,536 tokens."""
    said = {"max_num_seqs": 512, "max_num_batched_tokens": 1536}
    serving = kept("0.6.0", rollout=said).serving
    assert serving
    assert (serving.max_num_seqs, serving.max_num_batched_tokens) == (512, 1536)
    profiled = []
    for rollout in ({}, said):
        e = estimate(run("0.6.0", rollout=rollout))
        lines = next(p.moment.lines for p in e.groups[0].phases if p.name == "rollout")
        profiled.append(sum(x.bytes for x in lines if x.source == "kv-cache#profile"))
    assert profiled[1] < profiled[0]


DYNAMIC: dict[str, Any] = {"packing": True, "expected_len": 500, "global_batch": 512, "rollout": {"batch": 512, "n": 4}}


def test_a_dynamic_batch_holds_as_many_sequences_as_its_tokens() -> None:
    """16,384 tokens hold 32 sequences of 500 in the update, 8,192 hold 16 in scoring; the critic's key has 32,768.

    `rearrange_micro_batches` (utils/seqlen_balancing.py:230 of 0.4.0); ref takes the actor's, critic.forward its own.
    """
    k = with_reference("0.9.1", task="ppo", max_tokens_per_gpu=16_384, **DYNAMIC)
    assert {r.name: (r.rows, r.scoring_rows) for r in k.roles} == {
        "actor": (32, 32), "critic": (65, 65), "reference": (32, 32),
    }  # fmt: skip
    fewer = run(max_tokens_per_gpu=16_384, **{**DYNAMIC, "rollout": {**DYNAMIC["rollout"], "max_tokens_per_gpu": 8192}})
    assert verl.keeps(fewer).role("actor").scoring_rows == 16
    assert (fewer.micro_batch, fewer.accumulation, fewer.as_dict()["micro_batch"]) == (32, 4, None)
    assert parse(fewer.as_dict()) == fewer
    # a GPU has 128 sequences of a step and 512 of a rollout; Ulysses puts the tokens of two GPUs together
    all_of_them = kept(max_tokens_per_gpu=10**6, **DYNAMIC).role("actor")
    assert (all_of_them.rows, all_of_them.scoring_rows) == (128, 512)
    assert run(max_tokens_per_gpu=16_384, context_parallel=2, **DYNAMIC).rows == 65
    # with padding they are as long as the longest, though counted by their own length
    assert run(max_tokens_per_gpu=16_384, **{**DYNAMIC, "packing": False}).rows == 32


def test_sft_fills_batches_by_default_and_a_micro_batch_takes_their_place() -> None:
    """data.use_dynamic_bsz true, data.max_token_len_per_gpu 8192: eight sequences of 1,024, or sixteen half as long."""
    usual = run(task="sft")
    assert (usual.max_tokens_per_gpu, usual.rows, run(task="sft", expected_len=512).rows) == (8192, 8, 16)
    assert run(task="sft", seq_len=32_768).max_tokens_per_gpu == 32_768
    fixed = run(task="sft", micro_batch=2)
    assert (fixed.max_tokens_per_gpu, fixed.rows) == (None, 2)
    assert parse(fixed.as_dict()) == fixed
    assert parse(usual.as_dict()) == usual


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_more_tokens_a_gpu_never_need_less(framework: str) -> None:
    """As long as gradients are accumulated: they are kept meanwhile."""
    job = {"model": "qwen2.5-7b", "task": "grpo", "gpu": "h100-sxm", "gpus": 4, "framework": framework, **DYNAMIC}
    before: dict[str, int] = {}
    for tokens in (1024, 2048, 5000, 8192, 16_384, 30_000):
        e = estimate(parse({**job, "rollout.engine": "vllm", "max_tokens_per_gpu": tokens}))
        now = {p.name: p.moment.allocated_bytes for p in e.groups[0].phases}
        assert all(now[name] >= size for name, size in before.items()), tokens
        before = now


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "a task": ("0.9.1", {"task": "rm"}, "task"),
    "GPUs of their own": ("0.9.1", {"placement": "separate", "rollout__gpus": 2, "rollout__sleep": False}, "placement"),
    "Transformers' generation": ("0.9.1", {"rollout": {"engine": "hf"}}, "rollout.engine"),
    "no actor": ("0.9.1", {"task": "ppo", "roles": {"actor": "none"}}, "roles.actor"),
    "another sharding": ("0.9.1", {"sharding": "zero3"}, "sharding"),
    "fsdp2 before 0.4": ("0.3.0", {"sharding": "fsdp2"}, "sharding"),
    "adapters before 0.4": ("0.3.0", {"method": "lora"}, "method"),
    "4-bit weights": ("0.9.1", {"method": "qlora"}, "method"),
    "another precision": ("0.9.1", {"precision": "fp32"}, "precision"),
    "another optimizer": ("0.9.1", {"optimizer": "lion"}, "optimizer"),
    "other gradients": ("0.9.1", {"grad_dtype": "bf16"}, "grad_dtype"),
    "selective checkpointing": ("0.9.1", {"checkpointing": "selective"}, "checkpointing"),
    "other attention before 0.6.1": ("0.6.0", {"attention": "sdpa", "packing": False}, "attention"),
    "other attention with packing": ("0.9.1", {"attention": "eager", "packing": True}, "attention"),
    "a fused loss before 0.5": ("0.4.0", {"loss": "fused"}, "loss"),
    "a fused loss below Liger's forward": ("0.7.0", {"loss": "fused", "kernels": "liger"}, "loss"),
    "other log-probabilities": ("0.9.1", {"logprob": "log-softmax-fp32"}, "logprob"),
    "log-probabilities of a fused loss": ("0.9.1", {"logprob": "selective", "loss": "fused"}, "logprob"),
    "a critic's precision": ("0.9.1", {"task": "ppo", "roles": {"critic": {"precision": "fp32"}}}, "roles.critic.pre"),
    "a rollout in halves": ("0.9.1", {"rollout": {"batch": 5, "n": 2}, "global_batch": 8}, "rollout.batch"),
    "graphs of an engine whose cache is freed": (
        "0.4.0",
        {"rollout": {"enforce_eager": False, "sleep": True}},
        "rollout.enforce_eager",
    ),
    "layers of a model without adapters": ("0.9.1", {"rollout": {"layered_summon": True}}, "rollout.layered_summon"),
    "batches shorter than a sequence": ("0.9.1", {"max_tokens_per_gpu": 1000}, "max_tokens_per_gpu"),
    "scored ones shorter than a sequence": (
        "0.9.1",
        {"max_tokens_per_gpu": 2048, "rollout": {"max_tokens_per_gpu": 512}},
        "rollout.max_tokens_per_gpu",
    ),
    "dynamic batches in scoring alone": ("0.9.1", {"rollout": {"max_tokens_per_gpu": 4096}}, "rollout.max_tokens"),
    "a scoring micro batch beside dynamic ones": (
        "0.9.1",
        {"max_tokens_per_gpu": 4096, "rollout": {"micro_batch": 4}},
        "rollout.micro_batch",
    ),
    "sequences that the release does not pass on": (
        "0.4.0",
        {"rollout": {"max_num_seqs": 64}},
        "rollout.max_num_seqs",
    ),
    "layers before 0.4": ("0.3.0", {"rollout": {"layered_summon": True}}, "rollout.layered_summon"),
    "more than a rollout": ("0.9.1", {"rollout": {"batch": 8, "n": 2}, "global_batch": 32}, "global_batch"),
    "a reward server": ("0.7.1", {"roles": {"reward": {"model": "qwen2.5-7b"}}}, "roles.reward"),
    "a reference on the GPU": ("0.2", {"roles": {"reference": {"offload.parameters": False}}}, "roles.reference.off"),
    "a reference beside adapters": (
        "0.9.1",
        {"method": "lora", "roles": {"reference": {"model": "qwen2.5-14b"}}},
        "roles.reference",
    ),
}


@pytest.mark.parametrize(("version", "fields", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_what_verl_cannot_run_is_refused_with_its_field(version: str, fields: dict[str, Any], field: str) -> None:
    """One line that names the field, what was given and what is allowed."""
    with pytest.raises(ScenarioError) as error:
        run(version, **fields)
    message = str(error.value)
    assert f" {field}" in message
    assert ": given " in message
    assert "allowed" in message
    assert "\n" not in message


def test_what_a_neighbouring_release_or_setting_allows() -> None:
    """Each refusal has its other side."""
    assert run("0.4.0", sharding="fsdp2").sharding == "fsdp2"
    assert run("0.6.1", attention="sdpa", packing=False).attention == "sdpa"
    assert run("0.7.0", roles={"reward": {"model": "qwen2.5-7b"}}).has("reward")
    assert run(FORK, roles={"reference": {"offload.parameters": False}}).has("reference")
    assert run(rollout={"batch": 8, "n": 2}, global_batch=16).global_batch == 16


@pytest.mark.parametrize("version", ["0.6.1", "0.7.0"])
def test_a_reward_model_lies_on_the_host_until_it_became_a_server(version: str) -> None:
    """RewardModelWorker: bf16, CPUOffload(offload_params=True)."""
    s = run(version, roles={"reward": {"model": "qwen2.5-7b"}})
    own = s.role("reward")
    assert own
    assert (own.precision, own.offload.parameters) == ("bf16", True)
    assert verl.keeps(s).role("reward").leaves == frozenset()


@pytest.mark.parametrize(("version", "once"), [("0.8.0", False), ("0.9.0", True), ("0.9.1", False)])
def test_one_release_reduces_gradients_once_a_step(version: str, once: bool) -> None:
    """0.9.0's engine always enters `no_sync`; 0.9.1 has a flag for it, which its YAML leaves off."""
    assert run(version).no_sync is once
    with pytest.raises(ScenarioError, match=f"no_sync: given {not once}, allowed with verl {version}: {once}".lower()):
        run(version, no_sync=not once)


def test_ligers_kernels_run_actor_and_reference_of_models_from_transformers() -> None:
    """`actor_rollout_ref.model.use_liger`, "only valid when we use hf model definition"; a critic has its own."""
    fields = {"framework": "verl==0.7.0", "task": "ppo", "gpus": 8, "kernels": "liger", "roles": {"reference": {}}}
    assert {r.name: r.patched for r in job(**fields).keeps.roles} == {"actor": True, "reference": True, "critic": False}
    for other in ({"sharding": "megatron"}, {"framework": "easyr1"}):
        with pytest.raises(ScenarioError, match=r"^scenario: kernels: given 'liger'"):
            job(**fields | other | ({"task": "grpo"} if "framework" in other else {}))


def test_sdpa_tells_the_sequences_of_a_row_apart_by_a_mask() -> None:
    """Rows without padding have positions and no mask; Transformers makes one of all pairs since 4.53, none before."""
    new, old = ({"transformers": version} for version in ("4.56", "4.52"))
    fields = {"framework": "verl==0.7.0", "task": "grpo", "gpus": 8, "attention": "sdpa"}
    apart = job(**fields, versions=new).architecture
    assert apart.masked and apart.end_to_end
    padded = job(**fields, versions=new, packing=False).architecture
    assert not padded.masked and not padded.end_to_end
    for wrong in ({"versions": old}, {"versions": new, "context_parallel": 2}):
        with pytest.raises(ScenarioError, match=r"^scenario: attention: given 'sdpa'"):
            job(**fields, **wrong)


def test_log_probabilities_without_flash_attns_kernel_go_row_by_row() -> None:
    """`logprobs_from_logits_v2`: a sequence at a time, or without padding a token, in fp32 under autocast."""
    fields = {"framework": "verl==0.7.0", "task": "grpo", "gpus": 8, "logprob": "selective"}
    path = job(**fields).keeps.role("actor").path
    assert (path.kind, path.rows_fp32, path.tile, path.in_place) == ("selective", True, 1, False)
    padded = job(**fields, packing=False).keeps.role("actor").path
    assert (padded.tile, padded.turns, padded.cut) == (0, 1, "slice")
    joined = job(**fields | {"framework": "verl==0.8.0"}, packing=False).keeps.role("actor").path
    assert (joined.tile, joined.cut) == (1, "unpad")  # engine.py:1212, `logits_rmpad = torch.cat(...)`
    old = job(**fields | {"framework": "verl==0.4.0"}, versions={"transformers": "4.45"}).keeps.role("actor").path
    assert (old.kind, old.head_fp32) == ("rows", True)


def test_entropies_in_pieces_are_those_of_rows_without_padding() -> None:
    """`compute_entropy_from_logits` is not called where padding stays (workers/actor/dp_actor.py:304 of 0.7.0)."""
    fields = {"framework": "verl==0.7.0", "task": "grpo", "gpus": 8, "entropy_from_logits_with_chunking": True}
    actor = job(**fields, max_tokens_per_gpu=16_384).keeps.role("actor")
    assert (actor.scoring.entropy, actor.scoring.pieces, actor.path.entropy) == ("chunked", 2048, "")
    short = job(**fields, micro_batch=2, prompt_len=2000, response_len=2000, expected_len=600).keeps.role("actor")
    assert short.scoring.pieces == 1200  # of two sequences without padding, whatever their cap
    assert job(**fields, packing=False).keeps.role("actor").scoring.entropy == "eager"
    for other in ({"framework": "verl==0.4.0"}, {"sharding": "megatron"}, {"framework": "trl", "task": "dpo"}):
        with pytest.raises(ScenarioError, match=r"^scenario: entropy_from_logits_with_chunking: given"):
            job(**fields | other)


def test_an_engine_that_is_made_to_run_eagerly_has_no_graphs() -> None:
    """rollout.enforce_eager: true until 0.5, whose engine may capture graphs all the same, false since 0.6."""
    for version, usual in (("0.5.0", True), ("0.6.0", False)):
        for asked in (None, True, False):
            s = run(version, task="grpo", rollout={} if asked is None else {"enforce_eager": asked})
            serving = s.keeps.serving
            assert serving and serving.graphs is not (usual if asked is None else asked)
    graphs = [
        sum(line.bytes for g in estimate(run("0.9.1", task="grpo", rollout={"enforce_eager": eager})).groups
            for p in g.phases if p.name == "rollout" for line in p.moment.lines if line.component == "cuda_graphs")
        for eager in (True, False)
    ]  # fmt: skip
    assert graphs[0] == 0 < graphs[1]


def test_groups_of_gpus_each_shard_the_model() -> None:
    """fsdp_size 8 on 16 GPUs (workers/engine/fsdp/utils.py, create_device_mesh): eighths of fp32 weights, not 16ths.

    From 0.8 on the root is resharded by hand then (transformer_impl.py:1115 of 0.9.1).
    """
    fields = {"model": "qwen2.5-7b", "framework": "verl==0.9.1", "task": "grpo", "gpus": 16, "gpus_per_node": 8}
    whole, groups = job(**fields), job(**fields, data_parallel_replicate=2)
    assert (whole.shards, groups.shards, groups.data_parallel) == (16, 8, 16)
    held = [
        sum(line.bytes for p in estimate(s).groups[0].phases if p.name == "step" for line in p.moment.lines
            if line.component in ("weights", "optimizer_states"))
        for s in (whole, groups)
    ]  # fmt: skip
    assert held[1] == pytest.approx(2 * held[0], rel=0.001)
    assert [s.keeps.role("actor").root_stays for s in (whole, groups)] == [True, False]
    with pytest.raises(ScenarioError, match="data_parallel_replicate: given 2 with sharding megatron"):
        job(**fields, sharding="megatron", data_parallel_replicate=2)
