"""Estimates against peaks traced from the real implementation: the bars that no change of a formula may break."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from calc.accuracy.residuals import Residual, peak_allocated, summary, summed
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.resolve.parse import parse


@pytest.fixture(scope="module")
def residuals(residuals: tuple[Residual, ...]) -> list[Residual]:
    found = [r for r in residuals if r.kind == "traced"]
    assert len(found) == sum(r["class"] == "traced" for r in load().measurements)
    return [r for r in found if r.metric == "allocated"]


def met(found: Iterable[Residual], *, count: int, median: float, worst: float) -> None:
    """At least so many records, whose relative errors are at most these in the median and at worst."""
    errors = summary(found)
    print(errors)
    assert errors.count >= count
    assert errors.median <= median
    assert errors.worst <= worst


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_half_of_the_traced_peaks_are_met_within_a_tenth_of_a_percent(residuals: list[Residual], sharding: str) -> None:
    """Mechanisms, not fits: the ledger follows the same tensors as the trace, so errors are small buffers."""
    errors = summary(r for r in residuals if r.sharding == sharding)
    print(f"{sharding}: {errors}")
    assert errors.count >= 25
    assert errors.median <= 0.001
    assert errors.p95 <= 0.005
    assert errors.worst <= 0.02


def test_deepspeeds_own_partitioning_is_met_within_six_percent(residuals: list[Residual]) -> None:
    """Traces of the real optimizer and engine on the first rank; the estimate is for the fullest, which needs more."""
    errors = summary(r for r in residuals if r.family == "zero")
    print(f"zero: {errors}")
    assert errors.count >= 35
    assert errors.median <= 0.005
    assert errors.mean <= 0.01
    assert errors.worst <= 0.06


@pytest.mark.parametrize(("degree", "least", "worst"), [("tp", 80, 0.01), ("cp", 30, 0.001)])
def test_shared_layers_and_sequences_are_met_within_a_fiftieth_of_a_percent(
    residuals: list[Residual], degree: str, least: int, worst: float
) -> None:
    """Transformers' own plans over DTensor, and PyTorch's ring attention; alone, together and under FSDP 2."""
    found = [r for r in residuals if f"/{degree}=" in r.id]
    met(found, count=least, median=0.0002, worst=worst)


def test_each_stage_of_a_pipeline_is_met_within_a_tenth_of_a_percent() -> None:
    """Not only the fullest: PyTorch's stages under 1F1B, alone, under FSDP 2 and with tensor parallelism."""
    catalog, errors, count = load(), [], 0
    for record in (r for r in catalog.measurements if r.get("observed", {}).get("stages")):
        e = estimate(parse(record["scenario"], catalog=catalog), catalog)
        count += 1
        for group, traced in zip(e.groups, record["observed"]["stages"], strict=True):
            errors.append(peak_allocated(replace(e, groups=(group,)), traced=True) / traced - 1)
    found = summed(errors)
    print(f"stages: {found}")
    assert count >= 30
    assert found.count >= 110
    assert found.median <= 0.0001
    assert found.worst <= 0.002


def test_selective_checkpointing_is_met_within_half_a_percent(residuals: list[Residual]) -> None:
    """What PyTorch's own contexts keep under torchtitan's policy, over families, kernels, adapters and cut layers."""
    found = [r for r in residuals if "/ckpt=selective" in r.id]
    met(found, count=40, median=0.0002, worst=0.005)


def test_linear_attention_is_met_within_half_a_percent(residuals: list[Residual]) -> None:
    """Gated delta rules in Transformers' own operations: lengths, formats, adapters, FSDP 2, and layers at the peak."""
    found = [r for r in residuals if r.id.startswith(("traced/qwen3.5", "traced/qwen3-next"))]
    met(found, count=60, median=0.0003, worst=0.005)


def test_megatron_cores_steps_are_met_within_a_third_of_a_percent(residuals: list[Residual]) -> None:
    """Its own model on Transformer Engine's modules, buffers and distributed optimizer: dense and with experts, layers
    that run again or parts of them, and tensor, sequence and expert parallelism. Latent attention keeps cosines and
    sines that are not counted.
    """
    met((r for r in residuals if r.sharding == "megatron"), count=20, median=0.0001, worst=0.003)


STATE_SPACES = ("traced/bamba", "traced/nemotron-", "traced/granite-4-h", "traced/falcon-h1", "traced/jamba",
                "traced/mamba", "traced/falcon-mamba")  # fmt: skip
NEW = (
    "apertus", "apriel", "aya-vision", "bloom", "codegen-", "codeqwen", "command-r-plus", "command-r7b", "deepseek-v2/",
    "deepseek-v3.2", "dots.llm1", "dots.ocr", "ernie", "exaone-4-1.2b", "falcon-2-11b", "falcon-7b", "flexolmo-7x7b",
    "gemma-3-270m", "glm-4.7", "glm-5", "gpt-j", "gpt-neo", "granite-3.1-", "granite-3.3-2b", "granite-4-micro",
    "granite-vision", "hunyuan", "internlm3", "internvl2.5", "llama-3.2-11b", "llama-4", "llama3-llava", "llava",
    "mimo-v", "minicpm3", "minimax", "ministral-3", "minitron", "mistral-large-3", "mistral-small-3.2", "mpt",
    "olmo-1b", "olmo-7b", "olmoe", "orpheus", "phi-3.5-moe", "pixtral", "pythia-1b", "qwen2-audio", "stablelm-2",
    "starcoder-15b", "starcoder2-3b", "starcoderbase", "voxtral",
)  # fmt: skip


def test_state_spaces_are_met_within_half_a_percent(residuals: list[Residual]) -> None:
    """Mamba-2 and Mamba-1 in Transformers' own operations: a block a layer, in attention's place, and beside it."""
    found = [r for r in residuals if r.id.startswith(STATE_SPACES)]
    met(found, count=20, median=0.002, worst=0.005)


def test_delta_attention_by_channel_is_met_within_a_percent(residuals: list[Residual]) -> None:
    """Kimi Linear in Transformers' own operations. Under FSDP 2 the estimate's highest layer has the prefetched unit of
    one layer beside the gradients of the next below it, whose own neighbour is dense.
    """
    met((r for r in residuals if r.id.startswith("traced/kimi-linear")), count=2, median=0.005, worst=0.01)


def test_a_gate_for_each_head_is_met_within_a_tenth_of_a_percent(residuals: list[Residual]) -> None:
    """Laguna, whose layers of two kinds have heads of two numbers: trained, adapted, run again, in eager attention."""
    met((r for r in residuals if r.id.startswith("traced/laguna")), count=4, median=0.0001, worst=0.0005)


def test_squares_of_images_are_met_within_half_a_percent(residuals: list[Residual]) -> None:
    """Idefics 3 and SmolVLM: trained, frozen and adapted towers. The tracer holds the pixels while Adam steps."""
    found = [r for r in residuals if r.id.startswith(("traced/idefics3", "traced/smolvlm"))]
    met(found, count=10, median=0.0005, worst=0.005)


def test_towers_before_pages_are_met_within_half_a_percent(residuals: list[Residual]) -> None:
    """PaddleOCR-VL, GLM-OCR, LightOnOCR and Granite Docling. The tracer holds the pixels while Adam steps."""
    pages = ("traced/paddleocr", "traced/glm-ocr", "traced/lightonocr", "traced/granite-docling")
    met([r for r in residuals if r.id.startswith(pages)], count=17, median=0.0002, worst=0.005)


def test_adapted_towers_are_met_within_a_fifth_of_a_percent(residuals: list[Residual]) -> None:
    """The lowest block's norm keeps nothing, as no gradient reaches the patches."""
    found = [r for r in residuals if "/lora_r=" in r.id and "/images=" in r.id and "/freeze=" not in r.id]
    met(found, count=9, median=0.0006, worst=0.002)


def test_thinkers_are_met_within_a_tenth_of_a_percent(residuals: list[Residual]) -> None:
    """Qwen2.5-Omni and Qwen3-Omni: a tower that is frozen, or its projector trained, beside an encoder of sound that is
    loaded and not run.
    """
    met((r for r in residuals if "-omni-" in r.id), count=3, median=0.001, worst=0.001)


def test_families_that_came_later_are_met_within_a_fifth_of_a_percent(residuals: list[Residual]) -> None:
    """Other norms, activations, routers and sparse attention, each met before any record of theirs was kept."""
    found = [r for r in residuals if r.id.removeprefix("traced/").startswith(NEW) and "-vision/" not in r.id]
    met(found, count=40, median=0.0001, worst=0.002)


def test_attention_to_images_is_met_but_under_zero3(residuals: list[Residual]) -> None:
    """Llama 3.2 Vision, within 0.13 %.

    Under ZeRO-3 the peak lies 281 MiB higher, as much as two copies of the table of positions that each image's shape
    picks from, which is not followed.
    """
    found = [r for r in residuals if "/llama-3.2-" in r.id and "-vision/" in r.id and "/images=" in r.id]
    met([r for r in found if "/zero=3/" not in r.id], count=13, median=0.0002, worst=0.0013)
    met([r for r in found if "/zero=3/" in r.id], count=1, median=0.008, worst=0.008)


def test_every_task_and_method_is_among_the_traced(residuals: list[Residual]) -> None:
    """The bars above mean little if a task has no record."""
    assert {(r.task, r.method) for r in residuals} >= {
        ("sft", "full"),
        ("sft", "lora"),
        ("rm", "full"),
        ("rm", "lora"),
        ("dpo", "full"),
        ("dpo", "lora"),
    }


def test_no_estimate_lies_a_percent_under_a_traced_peak(residuals: list[Residual]) -> None:
    """Too low costs a reader a rented card; too high only a larger one. One record is known to lie 1.5 % above: fp32
    accumulation under ZeRO-2, for which DeepSpeed 0.19.8 has a compact buffer that is not followed yet."""
    low = [r.id for r in residuals if r.error < -0.01]
    assert low == [id for id in low if "zero=2" in id and id.endswith("grad_dtype=fp32")]
    assert all(r.error > -0.05 for r in residuals)


def test_every_phase_and_part_is_met_not_only_the_sum(residuals: list[Residual]) -> None:
    """Errors of one sign could hide those of the other in a total: forward, backward and step each, and what is there
    beside what a step makes, DeepSpeed's apart."""
    seen = [r for r in residuals if r.phases]
    assert len(seen) >= 725  # the rest only scores
    for name in ("forward", "backward", "step"):
        errors = summed([p.predicted / p.measured - 1 for r in seen for p in r.phases if p.name == name])
        print(f"{name}: {errors}")
        assert errors.count >= 700
        assert (errors.median, errors.p95) <= (0.0005, 0.02)
    for name, worst in (("weights", 0.001), ("states", 0.001), ("made in the step", 0.01)):
        errors = summed([(p.predicted - p.measured) / r.measured for r in seen for p in r.components if p.name == name])
        print(f"{name}: {errors}")
        assert errors.median <= 0.0005
        assert errors.worst <= worst
