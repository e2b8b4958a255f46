"""Near misses of the catalog's names: a typo is mended, another card or model is never put forward."""

from __future__ import annotations

import pytest

from calc.catalog.catalog import CatalogError, load
from calc.site.i18n.speech import say


def led_to(kind: str, name: str) -> str:
    """The id of what a name leads to, at once or as the one that is put forward."""
    find = getattr(load(), kind)
    try:
        return str(find(name).id)
    except CatalogError:
        near = hint(kind, name)
        return str(find(near).id) if near else ""


def hint(kind: str, name: str) -> str:
    """The name that is put forward for one that the catalog does not have; empty for none."""
    with pytest.raises(CatalogError) as refused:
        getattr(load(), kind)(name)
    return str(refused.value).partition("; did you mean '")[2].removesuffix("'?")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a100-80-sxn", "a100-80-sxm"), ("rtx409", "rtx4090"), ("4090", "rtx4090"), ("h100sxm", "h100-sxm"),
        ("H100 SXM", "h100-sxm"), ("RTX 6000 Ada", "rtx6000ada"), ("A800 80GB PCIe", "a800-80-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40-pcie"), ("NVIDIA A100-SXM4-80GB", "a100-80-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("V100 32GB", "v100-32"), ("V100 32g", "v100-32"),
        ("rtx a5000", "a5000"), ("RTX A6000", "a6000"), ("DGX Spark", "gb10"), ("4090 48g", "rtx4090-48"),
        ("H20 141g", "h20-141"), ("A100-40G", "a100-40-sxm"), ("nvidia a10g", "a10g"),
        ("RTX PRO 6000 Blackwell", "rtxpro6000"),
    ],
)  # fmt: skip
def test_a_card_is_found_by_its_letters_and_number(given: str, meant: str) -> None:
    assert led_to("gpu", given) == meant


@pytest.mark.parametrize("given", ["l30", "h10", "a5500", "rtx3070", "h800x", "b100", "a100-64-sxm",
                                   "RTX 5060", "rtx 4060", "rtx a2000", "RTX 3080 Ti", "RTX 4070 Ti",
                                   "RTX 4070 SUPER"])  # fmt: skip
def test_another_card_is_never_meant(given: str) -> None:
    assert hint("gpu", given) == ""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("h100", ["h100-pcie", "h100-sxm", "h100-sxm-96"]), ("V100", ["v100-16", "v100-32"]),
        ("a100", ["a100-40-pcie", "a100-40-sxm", "a100-80-pcie", "a100-80-sxm"]), ("rtx409", ["rtx4090"]),
    ],
)  # fmt: skip
def test_a_name_that_several_cards_begin_with_leads_to_each(given: str, meant: list[str]) -> None:
    assert hint("gpu", given).split("', '") == meant


@pytest.mark.parametrize(
    ("given", "id"),
    [
        ("RTX 4090", "rtx4090"), ("4090", "rtx4090"), ("GeForce RTX 3090", "rtx3090"), ("Tesla T4", "t4"),
        ("NVIDIA A100 SXM 80GB", "a100-80-sxm"), ("A100 80GB SXM4", "a100-80-sxm"), ("RTX A6000", "a6000"),
        ("RTX PRO 6000", "rtxpro6000"), ("MI 300X", "mi300x"), ("Ascend 910B", "ascend910b"), ("H20 96GB", "h20"),
    ],
)  # fmt: skip
def test_a_card_is_known_in_any_spelling(given: str, id: str) -> None:
    """Once 'did you mean', for the names that clouds rent cards by."""
    assert load().gpu(given).id == id


@pytest.mark.parametrize(
    "given", ["A100", "A100 80GB", "H100", "V100", "RTX 6000", "RTX 4090 Ti", "6000", "80", "gb", ""]
)
def test_a_spelling_of_no_card_or_of_several_is_refused(given: str) -> None:
    with pytest.raises(CatalogError):
        load().gpu(given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("m3-max", "Apple's GPUs"), ("Apple M4 Max", "Apple's GPUs"), ("mps", "Apple's GPUs"), ("m2", "Apple's GPUs"),
        ("MacBook Pro", "Apple's GPUs"), ("tpu-v5e", "TPUs"), ("cpu", "a job without a GPU"),
        ("Intel Arc A770", "Intel's GPUs"), ("Gaudi 2", "Intel's Gaudi"), ("gaudi3", "Intel's Gaudi"),
        ("Jetson AGX Orin", "Jetson modules"),
    ],
)  # fmt: skip
def test_what_trains_elsewhere_is_told_why_it_is_no_card_here(given: str, told: str) -> None:
    """Once 'allowed: an id that `python -m calc gpus` lists' alone."""
    with pytest.raises(CatalogError) as refused:
        load().gpu(given)
    assert f"given {given!r}, but {told}" in str(refused.value)
    assert "not modelled" in str(refused.value)
    assert "允许" in say(str(refused.value), "zh")


@pytest.mark.parametrize("given", ["m40", "m10", "macaw", "rtx-m1x", "tesla m60"])
def test_an_old_card_is_no_mac(given: str) -> None:
    with pytest.raises(CatalogError) as refused:
        load().gpu(given)
    assert "not modelled" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lama-3-8b", "llama-3-8b"), ("llama-3-8", "llama-3-8b"), ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("qwen2.5-7b-instruct", "qwen2.5-7b"), ("gemma-2-27", "gemma-2-27b"), ("llama3-8b", "llama-3-8b"),
        # what is tuned goes on after the name of the model that it was made of, or ends with it
        ("my-org/qwen3-8b-lora-merged", "qwen3-8b"), ("trl-lib/Qwen2-0.5B-DPO", "qwen2-0.5b"),
        ("TIGER-Lab/Qwen2.5-Math-7B-CFT", "qwen2.5-7b"), ("Infinity-Instruct-7M-Gen-Llama3_1-8B", "llama-3.1-8b"),
    ],
)  # fmt: skip
def test_a_model_is_found_by_its_words_and_sizes(given: str, meant: str) -> None:
    assert led_to("model", given) == meant


@pytest.mark.parametrize(
    "given",
    [
        "Qwen2-VL-32B", "Qwen/Qwen2.5-Omni-32B", "qwen4-vl-8b", "llama-3-9b", "mistral-7b-v0.4", "Qwen3-8B-speculator",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "llama-3-8b-to-100b", "Qwen3-8B-Omni", "tiiuae/falcon-rw-1b",
    ],
)  # fmt: skip
def test_another_model_is_never_meant(given: str) -> None:
    """A vision model is no text model, and another size or version no near miss."""
    assert hint("model", given) == ""
