"""`python -m calc add`: a config or a card becomes a file of the catalog, whole and checked, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted
import pytest
from commands import Run

from calc.add import gpus
from calc.base import project
from calc.base.reading import parse_yaml
from calc.catalog.catalog import GPU, load, whole
from calc.check import check

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "_name_or_path": "/home/me/checkpoint-1",
    "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "torch_dtype": "bfloat16", "use_mrope": False,
    "transformers_version": "4.44.0",
}  # fmt: skip
HYBRID = QWEN | {
    "model_type": "zamba2", "layer_types": ["mamba"] * 3 + ["full_attention"], "mamba_headdim": 4,
}  # fmt: skip
CARD = (project.ROOT / "hardware/gpus/rtx4090.yaml").read_text("utf-8").replace("rtx4090", "rtx4091", 1)
CARD = CARD.replace("name: GeForce RTX 4090", "name: GeForce RTX 4091")
PROJECT = project.ROOT
NAMED = ("--hf", "somebody/Tiny-Reasoner-1.8B")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small copy of the data folders, which stands for this project."""
    copy = planted.copy(tmp_path / "project")
    monkeypatch.setattr(project, "ROOT", copy)
    return copy


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Writes a config.json and gives its path."""

    def written(fields: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields), "utf-8")
        return str(path)

    return written


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_config_becomes_a_file_that_passes_every_check(
    run: Callable[..., Run], root: Path, config: Callable[..., str]
) -> None:
    """Its fields, but those that say how the file was made; what was not found is told."""
    done = run("add", config(QWEN), *NAMED)
    assert (done.status, done.err) == (0, "")
    first, counted, source, absent, last = done.out.splitlines()
    assert first == "wrote models/tiny-reasoner-1.8b.yaml"
    assert counted == "Tiny Reasoner 1.8B: 1,777,088,000 parameters, counted tensor by tensor"
    assert source.startswith(
        "source: https://huggingface.co/somebody/Tiny-Reasoner-1.8B/blob/main/config.json, assumed"
    )
    assert absent == "not found: licence (--licence), parameters (--parameters)"
    check(root)
    catalog = load(root)
    assert last == f"catalog {catalog.version}: all valid"
    model = catalog.models["tiny-reasoner-1.8b"]
    assert (model.hf, model.published_parameters, model.licence) == ("somebody/Tiny-Reasoner-1.8B", None, "not stated")
    left_out = {"_name_or_path", "transformers_version"}
    assert model.config == {name: value for name, value in QWEN.items() if name not in left_out}


def test_what_is_given_is_written(run: Callable[..., Run], root: Path, config: Callable[..., str]) -> None:
    """Text that YAML would read as a number or a word of its own stays text."""
    own = (
        "--id", "tiny", "--name", "1e3", "--source", "https://huggingface.co/somebody/Tiny-Reasoner-1.8B/raw/1/c.json",
        "--licence", "null", "--parameters", "1,777,088,000", "--parameters-source", "total of the tensors: its page",
    )  # fmt: skip
    done = run("add", config(QWEN), *NAMED, *own)
    assert done.status == 0, done.err
    assert "not found" not in done.out and "assumed" not in done.out and ", as published" in done.out
    model = load(root).models["tiny"]
    assert (model.name, model.licence, model.published_parameters) == ("1e3", "null", 1_777_088_000)
    assert model.parameters_source == "total of the tensors: its page"


def test_shapes_that_are_there_already_are_told(
    run: Callable[..., Run], root: Path, config: Callable[..., str]
) -> None:
    same = dict(load(PROJECT).models["qwen2.5-0.5b"].config)
    done = run("add", config(same), "--hf", "somebody/Tuned-0.5B")
    assert "the same shapes as qwen2.5-0.5b: a name under aliases in models/qwen2.5-0.5b.yaml would do" in done.out


def test_of_a_model_that_reads_images_the_language_model_is_added(
    run: Callable[..., Run], root: Path, config: Callable[..., str]
) -> None:
    """With the sizes that its class has by default."""
    inner = dict(load(PROJECT).models["gemma-3-4b"].config)
    for name in ("model_type", "architectures", "num_attention_heads", "vocab_size"):
        inner.pop(name, None)
    outer = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **inner}, "vision_config": {}}
    done = run("add", config(outer), "--hf", "somebody/Gemma-3-4B-tuned")
    assert done.status == 0, done.err
    written = parse_yaml((root / "models/gemma-3-4b-tuned.yaml").read_text("utf-8"), "the file")
    assert written["config"]["model_type"] == "gemma3_text"
    assert load(root).models["gemma-3-4b-tuned"].architecture.heads == 8


def test_a_tower_that_only_jobs_with_images_load_is_added_beside_the_language_model(
    run: Callable[..., Run], root: Path, config: Callable[..., str]
) -> None:
    """The published total is then the whole's; several tokens may end a text."""
    theirs = load(PROJECT).models["gemma-4-31b"]
    outer = whole({**theirs.config, "eos_token_id": [1, 106]}, theirs.vision)
    total = ("--parameters", "31,273,086,512", "--parameters-source", "the hub")
    done = run("add", config(outer), "--hf", "somebody/Tuned-31B", *total)
    assert done.status == 0, done.err
    assert "with its vision tower, which a job with images loads: 31,273,086,512 parameters" in done.out
    added = load(root).models["tuned-31b"]
    assert (added.seeing, added.published_seeing) == (theirs.seeing, 31_273_086_512)
    assert (added.config["eos_token_id"], added.published_parameters) == ([1, 106], None)


def test_a_tower_that_is_not_modelled_is_told(run: Callable[..., Run], root: Path, config: Callable[..., str]) -> None:
    theirs = load(PROJECT).models["gemma-4-31b"]
    eyes = {"vision_config": {**theirs.vision["vision_config"], "head_dim": 64}}
    done = run("add", config(whole(theirs.config, {**theirs.vision, **eyes})), "--hf", "somebody/Tuned-31B")
    assert "without its vision tower: vision_config.head_dim: given 64" in done.out
    assert not load(root).models["tuned-31b"].seeing


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_whose_vision_tower_is_counted_is_added_with_it(
    run: Callable[..., Run], root: Path, config: Callable[..., str], nested: bool
) -> None:
    """As Transformers wrote its config first, and since the language model has a mapping of its own."""
    whole = dict(load(PROJECT).models["qwen2.5-vl-7b"].config)
    around = {name: whole.pop(name) for name in ("model_type", "architectures", "vision_config")}
    inner = {"text_config": {"model_type": "qwen2_5_vl_text", **whole}} if nested else whole
    done = run("add", config(around | inner), "--hf", "somebody/Tuned-VL-7B")
    assert done.status == 0, done.err
    assert "8,292,166,656 parameters" in done.out
    assert load(root).models["tuned-vl-7b"].config == around | whole


@pytest.mark.parametrize("inner", [None, {}])
def test_a_language_model_of_its_own_may_be_said_to_be_nothing(
    run: Callable[..., Run], root: Path, config: Callable[..., str], inner: object
) -> None:
    """Once a traceback."""
    done = run("add", config({**load(PROJECT).models["qwen2.5-vl-7b"].config, "text_config": inner}), "--hf", "a/b-7B")
    assert done.status == 0, done.err


@pytest.mark.parametrize("inner", ["", 0, [], "x"])
def test_a_language_model_of_its_own_that_is_no_mapping_is_refused(
    run: Callable[..., Run], root: Path, config: Callable[..., str], inner: object
) -> None:
    """Once a traceback, too."""
    fields = {**load(PROJECT).models["qwen2.5-vl-7b"].config, "text_config": inner}
    line = run("add", config(fields), "--hf", "a/b-7B").refused()
    assert "text_config: given " in line and ", allowed: a mapping, the language model of qwen2_5_vl" in line


def test_a_model_with_a_vision_tower_is_added_with_it(
    run: Callable[..., Run], root: Path, config: Callable[..., str]
) -> None:
    """The language model's fields come out of their `text_config`."""
    fields = dict(load(PROJECT).models["qwen3-vl-2b"].config)
    outer = {name: fields.pop(name) for name in ("model_type", "architectures", "vision_config")}
    fields |= {"model_type": "qwen3_vl_text", "rope_scaling": {"rope_type": "default", "mrope_interleaved": True}}
    whole = {**outer, "text_config": fields, "image_token_id": 151655, "tie_word_embeddings": True}
    done = run("add", config(whole), "--hf", "somebody/Qwen3-VL-2B-tuned")
    assert done.status == 0, done.err
    assert load(root).models["qwen3-vl-2b-tuned"].parameters == load(PROJECT).models["qwen3-vl-2b"].parameters


def test_a_card_becomes_a_file_as_it_was_given(run: Callable[..., Run], root: Path, tmp_path: Path) -> None:
    """To the byte; what its file does not have is told."""
    path = tmp_path / "mine.yaml"
    path.write_text("# seen in a shop\n" + CARD.partition("pcie_gen:")[0], "utf-8")
    done = run("add", str(path))
    assert done.status == 0, done.err
    assert (root / "hardware/gpus/rtx4091.yaml").read_bytes() == path.read_bytes()
    card = load(root).gpus["rtx4091"]
    assert done.out.splitlines()[:2] == [
        "wrote hardware/gpus/rtx4091.yaml", f"{card.name}: 24 GB, of which a process gets 23.64 GiB",
    ]  # fmt: skip
    assert "not found: ecc, pcie_gen, tdp_w; pages say that these are not published" in done.out
    assert "not found: a node in hardware/nodes/ that the card comes in" in done.out


def test_values_of_a_card_are_those_of_the_schema() -> None:
    """Protects the line that tells what a card's file lacks from a field that is new or renamed."""
    schema = json.loads((project.ROOT / "hardware/schema/gpu.schema.json").read_text("utf-8"))
    fields = schema["properties"]
    inner = [f"{name}.{leaf}" for name in ("memory", "dense_tflops") for leaf in fields[name]["properties"]]
    other = ("id", "vendor", "name", "memory", "dense_tflops", "architecture", "unified")  # told, or false if left out
    plain = [name for name in fields if name not in other]
    assert set(gpus.VALUES) == {*inner, *plain} - {"memory.marketing_gb"}
    assert all(hasattr(GPU, name.removeprefix("memory.")) for name in gpus.VALUES if "dense" not in name)


@pytest.mark.parametrize(
    ("fields", "more", "told"),
    [
        (QWEN, (), "hf: given '/home/me/checkpoint-1', allowed: --hf with the Hugging Face name"),
        (QWEN, ("--hf", "Tiny"), "hf: given 'Tiny', allowed: --hf with"),
        (QWEN, (*NAMED, "--id", "Tiny"), "id: given 'Tiny', allowed: lower-case letters"),
        (QWEN, (*NAMED, "--id", "../qwen"), "id: given '../qwen', allowed: lower-case letters"),
        (QWEN, (*NAMED, "--id", "llama-3-8b"), "id: given 'llama-3-8b', allowed: one that models/llama-3-8b.yaml does"),
        (QWEN, (*NAMED, "--parameters", "1.8B"), "--parameters: given '1.8B', allowed: the exact number"),
        (QWEN, (*NAMED, "--parameters", "5"), "given --parameters alone, allowed: with --parameters-source"),
        (
            QWEN, (*NAMED, "--parameters", "1777088001", "--parameters-source", "the model's page"),
            "models/tiny-reasoner-1.8b.yaml: published_parameters: given 1777088001, allowed: 1777088000",
        ),
        (QWEN, ("--hf", "a/Qwen-70B"), "models/qwen-70b.yaml: config: given 1,777,088,000 parameters, allowed: "),
        (QWEN, (*NAMED, "--licence", "TODO"), "licence: given 'TODO', allowed: a text without TODO"),
        (
            QWEN, ("--hf", "meta-llama/Meta-Llama-3-8B", "--id", "tiny"),
            "models/tiny.yaml: hf: given 'meta-llama/Meta-Llama-3-8B', already a name of models/llama-3-8b.yaml",
        ),
        (QWEN | {"num_key_value_head": 2}, NAMED, "unknown field 'config.num_key_value_head', allowed: "),
        (QWEN | {"hidden_size": "wide"}, NAMED, "hidden_size: given 'wide', allowed: a positive integer"),
        ({}, NAMED, "model_type: nothing given, allowed: llama, "),
        ([], NAMED, "given a list, [], allowed: a mapping of fields"),
        (HYBRID, NAMED, "not modelled of this config: 3 layers of mamba; the fields mamba_headdim"),
        (
            HYBRID | {"model_type": "qwen3"}, NAMED,
            "layer_types[0]: given 'mamba', allowed: full_attention, sliding_attention; other kinds are not",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_added_is_one_line_and_writes_nothing(
    run: Callable[..., Run],
    root: Path,
    config: Callable[..., str],
    fields: object,
    more: tuple[str, ...],
    told: str,
) -> None:
    before, path = files(root), config(fields)
    line = run("add", path, *more).refused()
    assert line.startswith(f"{path}: ") and told in line
    assert files(root) == before


@pytest.mark.parametrize(
    ("text", "more", "told"),
    [
        (CARD, ("--hf", "a/b"), "given --hf with the file of a GPU, allowed: only with a config.json"),
        (CARD.replace("id: rtx4091\n", ""), (), "missing field 'id'"),
        (CARD.replace("vendor:", "vender:"), (), "unknown field 'vender'; did you mean 'vendor'?"),
        (CARD.replace("value: 1008", "value: 1.008"), (), "hardware/gpus/rtx4091.yaml: bandwidth_gbs: given 1.008"),
        (CARD.replace("id: rtx4091", "id: rtx4090"), (), "id: given 'rtx4090', allowed: one that hardware/gpus/"),
        (CARD.replace("RTX 4091", "RTX 4090"), (), "name: given 'GeForce RTX 4090', allowed: a name of its own"),
        ("", (), "given nothing, allowed: a mapping of fields"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_be_added_is_one_line_and_writes_nothing(
    run: Callable[..., Run], root: Path, tmp_path: Path, text: str, more: tuple[str, ...], told: str
) -> None:
    before, path = files(root), tmp_path / "mine.yaml"
    path.write_text(text, "utf-8")
    line = run("add", str(path), *more).refused()
    assert line.startswith(f"{path}: ") and told in line
    assert files(root) == before


def test_a_file_that_is_there_is_replaced_only_if_asked(
    run: Callable[..., Run], root: Path, config: Callable[..., str]
) -> None:
    path = config(QWEN)
    assert run("add", path, *NAMED).status == 0
    before = files(root)
    assert (
        run("add", path, *NAMED, "--licence", "MIT")
        .refused()
        .endswith("tiny-reasoner-1.8b.yaml does not have; --replace")
    )
    assert files(root) == before
    assert run("add", path, *NAMED, "--licence", "MIT", "--replace").status == 0
    changed = {name for name, raw in files(root).items() if raw != before.get(name)}
    assert changed == {"models/tiny-reasoner-1.8b.yaml"}


def test_a_fault_elsewhere_in_the_catalog_is_named_where_it_is(
    run: Callable[..., Run], root: Path, config: Callable[..., str]
) -> None:
    """The whole catalog is checked, and nothing is added to one that is broken."""
    card = root / "hardware/gpus/l4.yaml"
    card.write_text(card.read_text("utf-8").replace("vendor: NVIDIA", "vendor: AMD"), "utf-8")
    before = files(root)
    assert run("add", config(QWEN), *NAMED).refused().startswith("hardware/gpus/l4.yaml: vendor: given 'AMD'")
    assert files(root) == before


def test_a_write_that_fails_leaves_nothing(
    run: Callable[..., Run], root: Path, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space is left when all has been written but its name."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before, path = files(root), config(QWEN)
    monkeypatch.setattr("os.replace", full)
    line = run("add", path, *NAMED).refused()
    assert line == "models/tiny-reasoner-1.8b.yaml: no space left on device; nothing was added"
    assert files(root) == before


def test_standard_input_is_read_too(run: Callable[..., Run], root: Path) -> None:
    assert run("add", "-", *NAMED, stdin=json.dumps(QWEN)).status == 0
    assert (root / "models/tiny-reasoner-1.8b.yaml").exists()
    assert run("add", "-", stdin=CARD).status == 0
    assert (root / "hardware/gpus/rtx4091.yaml").exists()
