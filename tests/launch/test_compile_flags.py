"""The flags that compile: torchtitan's and torchtune's, and nothing where nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from calc.launch import LaunchError, launch
from calc.resolve.parse import parse

TITAN: dict[str, Any] = {
    "model": "llama-3.1-8b", "task": "pretrain", "framework": "torch", "trainer": "torchtitan", "gpu": "h100-sxm",
    "gpus": 8, "seq_len": 4096,
}  # fmt: skip
TUNE = TITAN | {"task": "sft", "trainer": "torchtune"}


@pytest.mark.parametrize(
    ("compiled", "flags"),
    [
        ("model-and-loss", "--compile.components model loss"),
        ("model", "--compile.components model"),
        ("loss", "--compile.components loss"),
    ],
)
def test_torchtitan_names_the_components(compiled: str, flags: str) -> None:
    """Fields `enable` and `components` of CompileConfig (torchtitan 0.3.0 config/configs.py)."""
    command = " ".join(launch(parse(TITAN | {"compile": compiled})).command.split())
    assert "--compile.enable" in command and flags in command.replace(" \\ ", " ")
    assert "--compile" not in launch(parse(TITAN)).command


def test_torchtune_has_one_key() -> None:
    both, half, none = (launch(parse(TUNE | {"compile": c})) for c in ("model-and-loss", "model", "none"))
    assert "compile=True" in both.command and not any("compile" in note for note in both.notes)
    assert "compile=False" in half.command and any(note.startswith("compile: model") for note in half.notes)
    assert "compile=False" in none.command


def test_no_flag_of_torchtitan_makes_linears_float8() -> None:
    with pytest.raises(LaunchError, match="float8: given 'rowwise'"):
        launch(parse(TITAN | {"compile": "model", "float8": "rowwise"}))


@pytest.mark.parametrize(
    ("narrow", "config"),
    [
        ({"float8": "mxfp8"}, "llama3_8b_mxfp8"),
        ({"float8": "nvfp4", "bf16_layers_at_end": 5}, "llama3_8b_first_85_pct_layers_nvfp4"),
    ],
)
def test_a_configuration_of_torchtitan_converts_linears(narrow: dict[str, Any], config: str) -> None:
    """`model_registry("8B", converters=…)` in torchtitan 0.3.0 models/llama3/config_registry.py."""
    found = launch(parse(TITAN | {"compile": "model", "gpu": "b200"} | narrow))
    assert f"--config {config} " in f"{' '.join(found.command.split())} "
    assert any("converts the head" in note for note in found.notes) == (narrow["float8"] == "mxfp8")
    if narrow["float8"] == "nvfp4":
        with pytest.raises(LaunchError, match="float8: given 'nvfp4'"):
            launch(parse(TITAN | {"compile": "model", "gpu": "b200", "float8": "nvfp4"}))
