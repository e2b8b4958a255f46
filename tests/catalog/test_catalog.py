"""The catalog: every file loads, every fault is one line, and what is derived is derived as said."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from calc.base.units import MiB
from calc.catalog.catalog import Catalog, CatalogError, load

ROOT = Path(__file__).parents[2]
DATA = ("hardware", "models", "measurements")
Edit = Callable[[str, Callable[[str], str]], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the data folders, to spoil; without measurements, which name models and GPUs."""
    for folder in DATA:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.jsonl", "trace"))
    return tmp_path


@pytest.fixture
def edit(root: Path) -> Edit:
    def change(name: str, how: Callable[[str], str]) -> None:
        path = root / name
        before = path.read_text("utf-8")
        after = how(before)
        assert after != before
        path.write_text(after, "utf-8")

    return change


def refused(root: Path) -> str:
    """The one line with which the catalog at `root` is refused, its records included."""
    with pytest.raises(CatalogError) as caught:
        assert load(root).measurements
    text = str(caught.value)
    assert text.isprintable()
    return text


def gpu_file(id: str, smi: int, usable: int | None = None, observed: bool = True, gb: int = 1000) -> str:
    """A GPU's file with nothing but what must be there."""
    source = {"source": "a made up datasheet"}
    memory: dict[str, Any] = {"marketing_gb": {"value": gb, **source}, "smi_mib": {"value": smi, **source}}
    if usable is not None:
        memory["usable_mib"] = {"value": usable, "observed": observed, **source}
    fields = {"id": id, "vendor": "NVIDIA", "name": id, "architecture": {"value": "Ampere", **source}, "memory": memory}
    return yaml.safe_dump(fields)


# --- what is there ---


def test_every_gpu_of_the_catalog_loads_with_a_source_for_each_value() -> None:
    catalog = load()
    assert list(catalog.gpus) == sorted(path.stem for path in (ROOT / "hardware/gpus").iterdir())
    for gpu in catalog.gpus.values():
        for name in ("bandwidth_gbs", "tdp_w", "ecc", "pcie_gen", "nvlink_gbs"):
            assert (getattr(gpu, name) is None) == (name not in gpu.sources)
        for name in ("bf16", "fp16", "fp8"):
            assert (getattr(gpu, f"{name}_tflops") is None) == (f"dense_tflops.{name}" not in gpu.sources)
        assert {"architecture", "memory.marketing_gb", "memory.usable_mib"} <= gpu.sources.keys()
        assert gpu.usable_bytes == gpu.usable_mib * MiB
        assert 0.9 < gpu.usable_mib / (gpu.memory_gb * 1024) <= 1


def test_every_node_names_its_sources_and_no_link_is_faster_than_its_gpus() -> None:
    catalog = load()
    for node in catalog.nodes.values():
        assert {"gpus", "link"} <= node.sources.keys()
        for name in ("p2p", "intra_gbs", "measured_gbs", "inter_gbs", "host_ram_gb", "cpu_cores"):
            assert (getattr(node, name) is None) == (name not in node.sources)
        if "NVLink" in node.link and node.intra_gbs is not None:
            assert all((catalog.gpus[id].nvlink_gbs or 0) == 2 * node.intra_gbs for id in node.gpu_ids)
        assert node.measured_gbs is None or (node.intra_gbs is not None and node.measured_gbs < node.intra_gbs)


def test_every_model_is_known_by_its_id_its_names_and_in_any_case() -> None:
    catalog = load()
    for model in catalog.models.values():
        for name in (model.id, model.hf, *model.aliases):
            assert catalog.model(name) is catalog.model(name.upper()) is model


def test_a_known_card_is_what_its_datasheet_and_logs_say() -> None:
    card = load().gpu("RTX4090")
    assert (card.id, card.memory_gb, card.usable_mib, card.usable_derived) == ("rtx4090", 24, 24207, False)
    assert (card.bandwidth_gbs, card.bf16_tflops, card.nvlink_gbs) == (1008, 165.2, 0)


def test_the_catalog_cannot_be_changed_and_is_read_once() -> None:
    catalog = load()
    assert load() is catalog
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalog.gpu("l4").name = "another"  # type: ignore[misc]


# --- usable memory ---


def test_usable_memory_is_the_least_seen_on_a_card_of_the_same_total(root: Path) -> None:
    for id, usable in (("seen-1", 99_000), ("seen-2", 98_000), ("seen-3", None)):
        (root / f"hardware/gpus/{id}.yaml").write_text(gpu_file(id, 99_999, usable))
    catalog = load(root)
    assert (catalog.gpu("seen-3").usable_mib, catalog.gpu("seen-3").usable_derived) == (98_000, True)
    assert (catalog.gpu("seen-1").usable_mib, catalog.gpu("seen-1").usable_derived) == (99_000, False)


def test_usable_memory_of_a_new_total_takes_the_smallest_share_of_any_card(root: Path) -> None:
    for id, smi, usable, observed in (
        ("half", 1_000, 500, True),  # the smallest share of a card that was itself seen
        ("less", 1_000, 100, False),  # seen on another card: no evidence for a third
        ("new", 777, None, True),
    ):
        (root / f"hardware/gpus/{id}.yaml").write_text(gpu_file(id, smi, usable, observed))
    catalog = load(root)
    assert catalog.gpu("new").usable_mib == 388  # 777 x 500 / 1000 = 388.5, rounded down
    assert catalog.gpu("new").sources["memory.usable_mib"] == (
        "derived: 777 MiB in nvidia-smi x 500 / 1000, the smallest share of any card"
    )
    assert (catalog.gpu("less").usable_mib, catalog.gpu("less").usable_derived) == (100, True)


def test_derived_totals_of_the_catalog_by_hand() -> None:
    catalog = load()
    for derived, seen in (
        ("l40s", "a40"),
        ("h100-pcie", "h100-sxm"),
        ("h800", "h100-sxm"),
        ("a100-40-pcie", "a100-40-sxm"),
    ):
        assert catalog.gpu(derived).usable_derived and not catalog.gpu(seen).usable_derived
        assert catalog.gpu(derived).usable_mib == catalog.gpu(seen).usable_mib
    assert catalog.gpu("l40s").usable_mib == 45404


def test_a_card_needs_a_total_to_derive_its_memory_from(root: Path) -> None:
    path = root / "hardware/gpus/odd.yaml"
    path.write_text(re.sub(r"  smi_mib:\n.*\n.*\n", "", gpu_file("odd", 1)))
    assert refused(root) == (
        "hardware/gpus/odd.yaml: missing field 'memory.usable_mib', or 'memory.smi_mib' to derive it from"
    )


# --- growing ---


def model_file(like: str, hf: str, aliases: str) -> str:
    """The file of a model of the catalog under other names."""
    text = (ROOT / f"models/{like}.yaml").read_text("utf-8")
    text = re.sub(r"^aliases:\n(  - .*\n)+", f"aliases: [{aliases}]\n", text, flags=re.M)
    return re.sub(r"^hf: .*$", f"hf: {hf}", text, flags=re.M)


def test_a_gpu_and_a_model_file_added_appear_and_change_the_version(root: Path) -> None:
    before = load(root)
    load.cache_clear()
    (root / "hardware/gpus/new-card.yaml").write_text(gpu_file("new-card", 24_564))
    (root / "models/new-model.yaml").write_text(model_file("llama-3-8b", "my/model", "my/alias"))
    after = load(root)
    assert set(after.gpus) - set(before.gpus) == {"new-card"}
    assert after.model("My/Alias").id == after.model("my/model").id == "new-model"
    assert re.fullmatch("[0-9a-f]{12}", after.version)
    assert after.version != before.version


def test_the_version_depends_on_content_alone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    for folder in DATA:
        shutil.copytree(root / folder, other / folder)
    assert load(root).version == load(other).version


def test_a_thousand_gpus_and_a_thousand_models(root: Path) -> None:
    for number in range(1000):
        (root / f"hardware/gpus/card-{number}.yaml").write_text(gpu_file(f"card-{number}", 24_000 + number))
        text = model_file("qwen3-30b-a3b", f"my/model-{number}", "")
        (root / f"models/model-{number}.yaml").write_text(text)
    catalog = load(root)
    assert (len(catalog.gpus), len(catalog.models)) == (len(load().gpus) + 1000, len(load().models) + 1000)
    with pytest.raises(CatalogError, match=r"given 'my/model-99x', allowed: an id that `python -m calc models` lists"):
        catalog.model("my/model-99x")


# --- faults ---

OWN = "allowed: a name of its own"
L4, H100, LLAMA = "hardware/gpus/l4.yaml", "hardware/nodes/hgx-h100.yaml", "models/llama-3-8b.yaml"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (L4, "vendor: NVIDIA\n", "", "missing field 'vendor'"),
        (
            L4,
            "vendor: NVIDIA",
            "vendor: Nvidea",
            "vendor: given 'Nvidea', allowed: NVIDIA, AMD, Intel, Huawei; did you mean 'NVIDIA'?",
        ),
        (L4, "bandwidth_gbs:", "bandwith_gbs:", "unknown field 'bandwith_gbs'; did you mean 'bandwidth_gbs'?"),
        (L4, "  bf16:", "  bf61:", "unknown field 'dense_tflops.bf61'; did you mean 'dense_tflops.bf16'?"),
        (L4, "value: 300", "value: three", "bandwidth_gbs.value: given 'three', allowed: a number above 0"),
        (L4, "value: 300", "value: -300", "bandwidth_gbs.value: given -300, allowed: a number above 0"),
        (L4, "value: 300", "value: true", "bandwidth_gbs.value: given true, allowed: a number above 0"),
        (
            L4,
            "value: 300",
            "value: 1e999",
            "bandwidth_gbs.value: given a number that is not finite, allowed: a finite number",
        ),
        (L4, "vendor: NVIDIA\n", "vendor: NVIDIA\nvendor: NVIDIA\n", ":3: field 'vendor' given twice"),
        (L4, "observed: true", "observed: 'yes'", "memory.usable_mib.observed: given 'yes', allowed: true or false"),
        (L4, "id: l4", "id: L4", "id: given 'L4', allowed: text such as 'rtx4090'"),
        (L4, "id: l4", "id: l44", "id: given 'l44', allowed: 'l4', as the file is named"),
        (L4, "vendor: NVIDIA", "vendor: [NVIDIA", ":3: not YAML: "),
        (
            H100,
            "[h100-sxm]",
            "[h100-smx]",
            "gpu_ids[0]: given 'h100-smx', allowed: an id that `python -m calc gpus` lists; did you mean 'h100-sxm'?",
        ),
        (
            H100,
            "[h100-sxm]",
            "[]",
            "gpu_ids: given a list, [], allowed: a list without repetition that "
            "is not empty, each text that is not empty",
        ),
        (LLAMA, "hidden_size: 4096", "hidden_size: big", "config.hidden_size: given 'big', allowed: "),
        (LLAMA, "model_type: llama", "model_type: lama", "config.model_type: given 'lama', allowed: "),
        (LLAMA, "  vocab_size: 128256\n", "", "config.vocab_size: nothing given, allowed: "),
        (LLAMA, "hf: ", "huggingface: ", "unknown field 'huggingface', allowed: "),
        (LLAMA, "published_parameters: 8030261248\n", "", "missing field 'published_parameters'"),
        (
            LLAMA,
            "hf: meta-llama/Meta-Llama-3-8B",
            "hf: meta-llama/Llama-2-7B-hf",
            f"hf: given 'meta-llama/Llama-2-7B-hf', already a name of models/llama-2-7b.yaml, {OWN}",
        ),
        (
            LLAMA,
            "- meta-llama/Meta-Llama-3-8B-Instruct",
            "- google/gemma-2-9b",
            f"aliases[0]: given 'google/gemma-2-9b', already a name of models/gemma-2-9b.yaml, {OWN}",
        ),
    ],
)
def test_a_fault_in_a_data_file_is_one_line(
    root: Path, edit: Edit, name: str, old: str, new: str, message: str
) -> None:
    edit(name, lambda text: text.replace(old, new, 1))
    got = refused(root)
    expected = f"{name}{message}" if message.startswith(":") else f"{name}: {message}"
    assert got.startswith(expected) if expected.endswith((": ", ", ")) else got == expected


def test_a_misspelt_gpu_of_a_node_is_corrected(root: Path, edit: Edit) -> None:
    edit("hardware/nodes/hgx-h100.yaml", lambda text: text.replace("[h100-sxm]", "[h100-smx]"))
    assert refused(root).endswith("; did you mean 'h100-sxm'?")


def test_of_two_files_with_one_id_the_one_not_named_after_it_is_blamed(root: Path) -> None:
    shutil.copy(root / "hardware/gpus/l4.yaml", root / "hardware/gpus/copy.yaml")
    assert refused(root) == (
        "hardware/gpus/copy.yaml: id: given 'l4', already the id of hardware/gpus/l4.yaml, allowed: 'copy', as the "
        "file is named"
    )


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("hardware/gpus/x.yaml", b"", "hardware/gpus/x.yaml: given nothing, allowed: a mapping of fields"),
        (
            "hardware/gpus/x.yaml",
            b"- a\n- b\n",
            "hardware/gpus/x.yaml: given a list, ['a', 'b'], allowed: a mapping of fields",
        ),
        ("models/x.yaml", b"name: \xff", "models/x.yaml:1: not UTF-8: byte 0xff"),
    ],
)
def test_a_file_that_is_no_record_is_refused(root: Path, name: str, raw: bytes, message: str) -> None:
    (root / name).write_bytes(raw)
    assert refused(root) == message


def test_a_missing_folder_is_named(root: Path) -> None:
    shutil.rmtree(root / "hardware/nodes")
    assert refused(root) == "hardware/nodes: given no such folder, allowed: a folder of .yaml files"


# --- measurements ---

SCENARIO = {"model": "meta-llama/Meta-Llama-3-8B", "task": "sft", "gpu": "l4"}
RECORD = {
    "id": "one",
    "source": "a thread",
    "url": "https://github.com/a/b/issues/1",
    "class": "published",
    "metric": "allocated",
    "measured_bytes": 2**30,
    "verdict": "fits",
    "confidence": "high",
    "scenario": SCENARIO,
}


def test_measurements_are_read_in_the_order_of_files_and_lines(root: Path) -> None:
    (root / "measurements/b.jsonl").write_text(json.dumps({**RECORD, "id": "three"}) + "\n")
    (root / "measurements/a.jsonl").write_text(json.dumps(RECORD) + "\n\n" + json.dumps({**RECORD, "id": "two"}))
    assert [record["id"] for record in load(root).measurements] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"metric": "alocated"},
            "metric: given 'alocated', allowed: allocated, reserved, held, "
            "nvidia-smi, unknown, verdict; did you mean 'allocated'?",
        ),
        ({"measured": 1}, "unknown field 'measured'"),
        ({"measured_bytes": True}, "measured_bytes: given true, allowed: an integer of at least 1 or null"),
        ({"scenario": {**SCENARIO, "gpu": "l5"}}, "scenario.gpu: given 'l5', allowed: "),
        ({"scenario": {**SCENARIO, "model": "lama-3-8b"}}, "scenario.model: given 'lama-3-8b', allowed: "),
        ({"scenario": {**SCENARIO, "model": 1}}, "scenario.model: given 1, allowed: text"),
        ({"scenario": {"model": "llama-3-8b", "gpu": "l4"}}, "missing field 'scenario.task'"),
        ({"id": "one"}, "id: given 'one', already the id of measurements/a.jsonl:1, allowed: an id of its own"),
    ],
)
def test_a_fault_in_a_measurement_names_file_and_line(root: Path, change: dict[str, Any], message: str) -> None:
    lines = [json.dumps(RECORD), "", json.dumps({**RECORD, "id": "two", **change})]
    (root / "measurements/a.jsonl").write_text("\n".join(lines))
    assert refused(root).startswith(f"measurements/a.jsonl:3: {message}")


def test_a_fault_in_a_measurement_keeps_nobody_from_an_estimate(root: Path) -> None:
    """Records are validated where they are used; the version tells that a file of theirs changed all the same."""
    before = load(root).version
    (root / "measurements/a.jsonl").write_text("not json\n")
    load.cache_clear()
    catalog = load(root)
    assert catalog.models and catalog.version != before
    with pytest.raises(CatalogError, match=r"^measurements/a\.jsonl:1: not JSON: "):
        assert catalog.measurements


def test_a_job_needs_its_own_models_file_alone(root: Path) -> None:
    """Also by another of the names that the file lists; whatever asks for all models is refused."""
    for path in (root / "models").glob("*.yaml"):
        if path.stem != "llama-3-8b":
            path.write_text("[", "utf-8")
    catalog = load(root)
    for name in ("llama-3-8b", "LLAMA-3-8B", "meta-llama/Meta-Llama-3-8B", "meta-llama/meta-llama-3-8b-instruct"):
        assert catalog.model(name).id == "llama-3-8b"
        assert not catalog.tuned(name)
    first = min(path.name for path in (root / "models").glob("*.yaml"))
    for asked in (catalog.whole, lambda: catalog.model("nobody/knows"), lambda: catalog.measurements):
        assert unknown(asked).startswith(f"models/{first}:1: not YAML: ")


def test_a_listed_name_is_the_same_models_before_and_after_all_are_read() -> None:
    whole = load().names.listed
    names = sorted(whole)[:: len(whole) // 100]
    few = load.__wrapped__().names.listed
    assert [few[name] for name in names] == [whole[name] for name in names]


def test_a_line_that_is_not_json_is_named(root: Path) -> None:
    (root / "measurements/a.jsonl").write_text(json.dumps(RECORD) + "\nnot json\n")
    assert refused(root).startswith("measurements/a.jsonl:2: not JSON: ")


# --- names and paths ---


def unknown(call: Callable[[], Any]) -> str:
    with pytest.raises(CatalogError) as caught:
        call()
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_near_miss_of_a_name_is_corrected() -> None:
    catalog = load()
    assert unknown(lambda: catalog.gpu("rtx409")).startswith("gpu: given 'rtx409', allowed: an id that `python -m ")
    assert unknown(lambda: catalog.gpu("rtx409")).endswith("; did you mean 'rtx4090'?")
    assert unknown(lambda: catalog.model("llama-3-8")).endswith("; did you mean 'llama-3-8b'?")
    assert unknown(lambda: catalog.model("Qwen/Qwen2.5-7B-Instuct")).endswith(
        "; did you mean 'Qwen/Qwen2.5-7B-Instruct'?"
    )
    assert unknown(lambda: catalog.gpu("H100")).endswith("; did you mean 'h100-pcie', 'h100-sxm', 'h100-sxm-96'?")
    assert "did you mean" not in unknown(lambda: catalog.model("a\nb"))


@pytest.fixture
def catalog() -> Catalog:
    return load()


def test_a_config_json_is_a_model_too(catalog: Catalog, tmp_path: Path) -> None:
    known = catalog.model("qwen2.5-7b")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(known.config))
    for name in (str(path), str(tmp_path)):
        model = catalog.model(name)
        assert model.architecture == known.architecture
        assert (model.published_parameters, model.parameters) == (None, known.parameters)
        assert model.source == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", ":1: not JSON: "),
        ("", ":1: not JSON: "),
        ("[1]", ": given a list, [1], allowed: a mapping of fields"),
        ('{"model_type": "lama"}', ": model_type: given 'lama', allowed: "),
        ('{"hidden_size": 4096}', ": model_type: "),
        ('{"model_type": "llama", "num_hidden_layers": 1}', ": hidden_size: "),
        ('{"model_type": "llama", "hidden_size": true}', ": hidden_size: given True, allowed: "),
        ('{"model_type": "llama", "model_type": "llama"}', ": field 'model_type' given twice"),
    ],
)
def test_a_config_json_that_cannot_be_used_is_one_line(
    catalog: Catalog, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert unknown(lambda: catalog.model(str(path))).startswith(f"model: {path}{message}")


def test_a_config_json_that_is_not_there_is_named(catalog: Catalog, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    assert unknown(lambda: catalog.model(str(path))) == f"model: {path}: no such file or directory"
