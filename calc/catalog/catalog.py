"""The catalog: every file of hardware/, models/ and measurements/, read and turned into frozen objects.

Each file is checked against its schema, and every name in it must exist. `calc.check` refuses files that have the right
shape but impossible contents.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from calc.base import project
from calc.base.reading import DOCUMENT, FILE, decode, parse_json, parse_mapping, read_bytes
from calc.base.refusal import Refusal
from calc.base.schema import InputError, closest, show, validator
from calc.base.units import MiB
from calc.catalog.names import Names, words
from calc.catalog.near import card, elsewhere, meant, speaks, unmodelled
from calc.models.architecture import Architecture, ConfigError, parameters
from calc.models.families import SEEING
from calc.models.hf_config import from_config

HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # a repository of the Hub


class CatalogError(InputError):
    """A data file, or a name looked up in the catalog, that cannot be used; its text is the one line to print."""


MEASUREMENTS, EXHAUSTED = "measurements", "measurements/exhausted"
BEFORE_TURING = ("Pascal", "Volta")
BEFORE_AMPERE = (*BEFORE_TURING, "Turing")


@dataclass(frozen=True, slots=True)
class GPU:
    """One device as PyTorch sees it (of an MI250X, one of its two dies).

    `smi_mib` is the total that the driver's tool shows, `usable_mib` the total that cudaMemGetInfo gives a process;
    `usable_derived`: the latter was not observed on this very card. Rates are dense and accumulate in fp32;
    `nvlink_gbs` adds both directions. A value is None where no source gives it, and 0 where the card has none of it.
    `unified`: CPU and GPU share the memory, so that what is offloaded does not leave it.
    `linked`: there are nodes that join more than two of these cards by NVLink or the like; a bridge between two is
    extra. `sources` maps a value's field in the file (`memory.usable_mib`) to where it is read.
    """

    id: str
    vendor: str
    name: str
    architecture: str
    memory_gb: float
    smi_mib: int | None
    usable_mib: int
    usable_derived: bool
    bandwidth_gbs: float | None
    bf16_tflops: float | None
    fp16_tflops: float | None
    fp8_tflops: float | None
    tdp_w: int | None
    ecc: str | None
    pcie_gen: int | None
    nvlink_gbs: float | None
    sources: Mapping[str, str] = field(hash=False, repr=False)
    notes: Mapping[str, str] = field(hash=False, repr=False)
    linked: bool = False
    unified: bool = False

    @property
    def usable_bytes(self) -> int:
        """The bytes of the card that one process can get, its own CUDA context included."""
        return self.usable_mib * MiB

    @property
    def geforce(self) -> bool:
        """True for a card that NVIDIA sells for games."""
        return self.name.startswith("GeForce")

    @property
    def lacks_bf16(self) -> bool:
        """True if the card is older than Ampere, which brought bf16 and what FlashAttention-2 needs."""
        return self.architecture in BEFORE_AMPERE

    @property
    def before_turing(self) -> bool:
        """True for a card that CUDA 13, and with it today's wheels, has no kernels for."""
        return self.architecture in BEFORE_TURING

    @property
    def lacks_cuda(self) -> bool:
        """True if the card cannot run kernels written for CUDA, or for AMD's counterpart to it."""
        return self.vendor not in ("NVIDIA", "AMD")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with joined GPUs. Bandwidths: GB/s of one GPU in one direction; `measured_gbs` is all-reduce bus
    bandwidth.
    """

    id: str
    name: str
    gpu_ids: tuple[str, ...]
    gpus: int
    link: str
    p2p: bool | None
    intra_gbs: float | None
    measured_gbs: float | None
    inter_gbs: float | None
    host_ram_gb: int | None
    cpu_cores: int | None
    sources: Mapping[str, str] = field(hash=False, repr=False)
    notes: Mapping[str, str] = field(hash=False, repr=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its Hugging Face name, `aliases` of the identical architecture, its config and the architecture in it.

    `unlike` maps names that look like this model's to what sets their models apart. `seeing`: the architecture of the
    same checkpoint with its vision tower, where `architecture` is the language model alone; `vision` are the fields
    of the config.json around that model's. `makes`: `embeddings`, or `yes or no`, where it is no text.
    `text_alone`: it reads images, by a part that is not modelled. `stored`: the form of the checkpoint's weights, where
    that is not 16 bits.
    A model read from a path has the path as `id`, `name` and `source`, and no `published_parameters`.
    """

    id: str
    name: str
    hf: str
    aliases: tuple[str, ...]
    source: str
    published_parameters: int | None
    parameters_source: str
    licence: str
    architecture: Architecture
    config: Mapping[str, Any] = field(hash=False, repr=False)
    unlike: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    vision: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    seeing: Architecture | None = None
    published_seeing: int | None = None  # parameters of the checkpoint with its vision tower
    makes: str = ""
    text_alone: bool = False
    stored: str = ""

    def reading(self, *, images: bool) -> Architecture:
        """The architecture of a job that reads images, or text alone."""
        return self.seeing if images and self.seeing else self.architecture

    @property
    def parameters(self) -> int:
        """The number of parameters, counted from the architecture."""
        return parameters(self.architecture)


class Records(NamedTuple):
    """Records of measurements/, and the file and line of each, by id."""

    measurements: tuple[Mapping[str, Any], ...] = ()
    exhausted: tuple[Mapping[str, Any], ...] = ()
    places: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Catalog:
    """All data files, each mapping sorted by id. `version`: 12 hex digits that change when any of the files does.

    An estimate needs few models and no record: a model is validated when it is asked for, records when the first of
    them is, which raises CatalogError as `load` does.
    """

    gpus: Mapping[str, GPU]
    nodes: Mapping[str, Node]
    models: Mapping[str, Model]
    version: str
    names: Names = field(repr=False)
    read: Callable[[], Records] = field(default=Records, repr=False)

    def whole(self) -> Catalog:
        """This catalog, once every model in it is valid and its names are its own; CatalogError otherwise."""
        len(self.names.listed)
        return self

    @functools.cached_property
    def _records(self) -> Records:
        return self.read()

    @property
    def measurements(self) -> tuple[Mapping[str, Any], ...]:
        """The records of measurements/*.jsonl."""
        return self._records.measurements

    @property
    def exhausted(self) -> tuple[Mapping[str, Any], ...]:
        """PyTorch's out-of-memory messages: the records of measurements/exhausted/*.jsonl."""
        return self._records.exhausted

    @property
    def places(self) -> Mapping[str, str]:
        """The file and line of each record, by id."""
        return self._records.places

    def gpu(self, name: str) -> GPU:
        """The GPU with this id, or the only one whose id or name this is in another spelling; CatalogError `gpu: …`
        otherwise.
        """
        if (found := self.gpus.get(name.casefold())) is None:
            spelled = card(name)
            alike = [gpu for gpu in self.gpus.values() if spelled in (card(gpu.id), card(gpu.name))]
            found = alike[0] if len(alike) == 1 else None
        if found is None:
            allowed = _some(self.gpus, "gpus")
            if why := elsewhere(name):
                raise CatalogError(f"gpu: given {show(name)}, but {why}; allowed: {allowed}", field="gpu")
            ids = {known: gpu.id for gpu in self.gpus.values() for known in (gpu.id, gpu.name)}
            refusal = Refusal("gpu", show(name), f"{allowed}{meant(name, ids)}")
            raise CatalogError(str(refusal), refusal)
        return found

    def model(self, name: str) -> Model:
        """The model with this id or name, as it is listed or spelled alike, or at this path to a config.json.

        Of a quantised checkpoint's name it is the model of whose weights that was made, of one whose tower alone is
        not modelled that of its language model's shapes, and of a name with another's name and size inside, which
        nothing says to be of other shapes, that other. CatalogError `model: …` for an unknown name; for a config it
        names file and field.
        """
        if (listed := self.names.listed.get(name.casefold())) is not None:
            return self.models[listed]
        if _is_path(name):
            return _model_of_config(name if name.endswith(".json") else os.path.join(name, "config.json"))
        if (found := self.names.alike(name)) is not None:
            return self.models[found]
        if made := self.names.quantised(name):
            return self.models[made[0]]
        if why := self.names.refusal(name):
            allowed = "a path to its config.json, or another model"
            raise CatalogError(f"model: given {show(name)}, {why}; allowed: {allowed}", field="model")
        allowed = f"{_some(self.models, 'models')}, a Hugging Face name among theirs, or a path to a config.json"
        if sizes := self.names.sizes(name):
            refusal = Refusal("model", show(name), f"{allowed}; did you mean {', '.join(map(repr, sizes))}?")
            raise CatalogError(str(refusal), refusal)
        if spoken := speaks(name):
            return self.models[spoken]
        if why := unmodelled(name):
            allowed = "a path to its config.json, or another model"
            raise CatalogError(f"model: given {show(name)}, which {why}; allowed: {allowed}", field="model")
        known = {own: own for model in self.models.values() for own in (model.id, model.hf, *model.aliases)}
        near = meant(name, known)  # a misspelling is corrected, not taken for a name of its own
        if not near and (tuned := self.names.within(name)):
            return self.models[tuned]
        refusal = Refusal("model", show(name), f"{allowed}{near}")
        raise CatalogError(str(refusal), refusal)

    def tuned(self, name: str) -> bool:
        """True for a name that says by another's inside it alone which shapes its model has."""
        listed = name.casefold() in self.names.listed or _is_path(name)
        return not (listed or self.names.alike(name) or self.names.quantised(name))

    def checkpoint(self, name: str) -> str:
        """The Hub name of the weights that are asked for by a model's name, as its owner spells it.

        Of a short name the first of the model's that begins with it; the model's own of a path, of a quantised copy,
        which may not train, and where nothing says whose weights are meant.
        """
        model, asked = self.model(name), name.casefold()
        if asked == model.id or self.names.quantised(name) or _is_path(name):
            return model.hf
        listed = [each for each in (model.hf, *model.aliases) if "/" in each]
        if "/" in name:
            own = name if HUB.fullmatch(name) else model.hf
            return next((each for each in listed if each.casefold() == asked), own)
        return next((each for each in listed if f"{words(each)} ".startswith(f"{words(name)} ")), model.hf)

    def spoken(self, name: str) -> bool:
        """True for the name of a model that reads images, of which the language model alone is described here."""
        return self.model(name).text_alone or (self.tuned(name) and speaks(name) != "")

    def unquantised(self, name: str) -> None:
        """Refuses, with a CatalogError `model: …`, the name of a checkpoint whose weights are not trained but read."""
        if made := self.names.quantised(name):
            original, form = made
            raise CatalogError(
                f"model: given {show(name)}, not {original}: its weights are stored as {form}, which is not modelled; "
                f"allowed: another model; did you mean {original!r}?",
                field="model",
            )


def _is_path(name: str) -> bool:
    """True for the path to a config.json, or to the folder that has one."""
    return name.endswith(".json") or os.path.isdir(name)


def _some(ids: Iterable[str], command: str) -> str:
    """The ids if they fit on a line, otherwise the command that lists them."""
    text = ", ".join(ids)
    return text if len(text) <= 400 else f"an id that `python -m calc {command}` lists"


@functools.cache
def load(root: Path | None = None) -> Catalog:
    """The catalog of the project at `root` (this one by default), read once; `load.cache_clear()` forgets it.

    Every file is read before anything is returned, and all but models and records are validated. Raises CatalogError
    for the first file that does not match its schema or names something that does not exist: one line that names the
    file and the field (or the line), what was given and what is allowed.
    """
    root = root or project.ROOT
    digest = hashlib.sha256()
    with _refused():
        gpu_files = _records(root, "hardware/gpus", "hardware/schema/gpu.schema.json", digest.update)
        node_files = _records(root, "hardware/nodes", "hardware/schema/node.schema.json", digest.update)
        model_files = _texts(root, "models", ".yaml", digest.update)
        seen = _seen(gpu_files)
        gpus = {record.id: _gpu(record, seen) for record in gpu_files}
        nodes = {record.id: _node(record, gpus) for record in node_files}
        gpus = {name: replace(gpu, linked=_linked(gpu, nodes.values())) for name, gpu in gpus.items()}
        measured, exhausted = (
            _texts(root, folder, ".jsonl", digest.update, FILE) for folder in (MEASUREMENTS, EXHAUSTED)
        )
    models = _Models(root, model_files)
    listed = _Listed(root, models)
    read = partial(_validated, root, measured, exhausted, gpus, listed)
    return Catalog(gpus, nodes, models, digest.hexdigest()[:12], Names(models.values(), listed), read)


@contextmanager
def _refused() -> Iterator[None]:
    """Makes a fault of a file a CatalogError."""
    try:
        yield
    except InputError as error:
        raise CatalogError(str(error), error.refusal, error.field) from None


class _Record(NamedTuple):
    id: str
    where: str  # the file's path from the root
    data: dict[str, Any]


def _read(path: Path, where: str, update: Callable[[bytes], None], limit: int = DOCUMENT) -> bytes:
    raw = read_bytes(path, where, limit)
    update(f"{where}\0{len(raw)}\0".encode() + raw)
    return raw


def _files(root: Path, folder: str, suffix: str) -> list[tuple[str, Path]]:
    """The folder's data files, sorted; other files in it are not read."""
    try:
        names = sorted(os.listdir(root / folder))
    except OSError:
        raise InputError(f"{folder}: given no such folder, allowed: a folder of {suffix} files") from None
    return [(f"{folder}/{name}", root / folder / name) for name in names if name.endswith(suffix) and name[0] != "."]


def _records(root: Path, folder: str, schema: str, update: Callable[[bytes], None]) -> list[_Record]:
    """The folder's valid YAML files, sorted by id: the name of the file, which an id in the file must repeat."""
    files = dict(_texts(root, folder, ".yaml", update))
    return sorted(_record(where, raw, root / schema, files) for where, raw in files.items())


def _record(where: str, raw: bytes, schema: Path, files: Mapping[str, bytes]) -> _Record:
    """A valid YAML file, one of `files`."""
    folder, _, name = where.rpartition("/")
    id = name.removesuffix(".yaml")
    data = parse_mapping(raw, where)
    validator(schema)(data, where)
    if (given := data.get("id", id)) != id:
        owner = f"{folder}/{given}.yaml"
        taken = f", already the id of {owner}" if owner in files else ""
        raise InputError(f"{where}: id: given {given!r}{taken}, allowed: {id!r}, as the file is named")
    return _Record(id, where, data)


def newer_first(root: Path, first: str, second: str) -> tuple[str, str]:
    """Two places (`file` or `file:line`) that claim the same, the one to blame first: that whose file was changed last.

    If neither file is newer, the second place is to blame.
    """
    changed = [os.stat(root / place.partition(":")[0]).st_mtime_ns for place in (first, second)]
    return (first, second) if changed[0] > changed[1] else (second, first)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Each `{value, source}` of a file with its dotted field name."""
    for name, item in data.items():
        if isinstance(item, Mapping):
            if "source" in item:
                yield f"{prefix}{name}", item
            else:
                yield from _leaves(item, f"{prefix}{name}.")


class _Values:
    """A file's values, sources and notes by dotted field."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        leaves = dict(_leaves(data))
        self.values = {name: leaf["value"] for name, leaf in leaves.items()}
        self.sources = {name: leaf["source"] for name, leaf in leaves.items()}
        self.notes = {name: leaf["note"] for name, leaf in leaves.items() if "note" in leaf}

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        return None if value is None else float(value)

    def integer(self, name: str) -> int | None:
        value = self.values.get(name)
        return None if value is None else int(value)


def _memory(record: _Record) -> tuple[int | None, int | None]:
    """The total that the driver's tool shows and the total that a process gets, in MiB."""
    memory = record.data["memory"]
    smi, usable = (int(memory[name]["value"]) if name in memory else None for name in ("smi_mib", "usable_mib"))
    return smi, usable


def _seen(records: Iterable[_Record]) -> list[tuple[int, int]]:
    """nvidia-smi's total and a process's total, in MiB, of the cards on which both were observed."""
    both = (_memory(record) for record in records if record.data["memory"].get("usable_mib", {}).get("observed"))
    return [(smi, usable) for smi, usable in both if smi is not None and usable is not None]


def _derive(smi: int, seen: Iterable[tuple[int, int]]) -> tuple[int, str] | None:
    """The MiB that a process gets of a card on which they were not observed, and the rule that gives them.

    Two rules. Cards with the same total in nvidia-smi carry the same memory: the least that a process gets of any of
    them. Where there is no such card: the total times the smallest share that a process gets of any card, rounded down.
    The driver keeps a part of the total to itself; assuming the most that it keeps never promises memory that is not
    there. None where no card was observed.
    """
    pairs = sorted(seen)
    same = [usable for shown, usable in pairs if shown == smi]
    if same:
        return min(same), f"derived: the least seen on a card of the same {smi} MiB in nvidia-smi"
    if not pairs:
        return None
    shown, usable = min(pairs, key=lambda pair: pair[1] / pair[0])
    return (
        smi * usable // shown,
        f"derived: {smi} MiB in nvidia-smi x {usable} / {shown}, the smallest share of any card",
    )


def _gpu(record: _Record, seen: Iterable[tuple[int, int]]) -> GPU:
    """A GPU from its file; `seen` as `_seen` gives it."""
    smi, usable = _memory(record)
    of = _Values(record.data)
    derived = not record.data["memory"].get("usable_mib", {}).get("observed", False)
    if usable is None:
        found = None if smi is None else _derive(smi, seen)
        if found is None:
            raise InputError(
                f"{record.where}: missing field 'memory.usable_mib', or 'memory.smi_mib' to derive it from"
            )
        usable, of.sources["memory.usable_mib"] = found
    return GPU(
        id=record.id,
        vendor=record.data["vendor"],
        name=record.data["name"],
        architecture=of.values["architecture"],
        memory_gb=float(of.values["memory.marketing_gb"]),
        smi_mib=smi,
        usable_mib=usable,
        usable_derived=derived,
        bandwidth_gbs=of.number("bandwidth_gbs"),
        bf16_tflops=of.number("dense_tflops.bf16"),
        fp16_tflops=of.number("dense_tflops.fp16"),
        fp8_tflops=of.number("dense_tflops.fp8"),
        tdp_w=of.integer("tdp_w"),
        ecc=of.values.get("ecc"),
        pcie_gen=of.integer("pcie_gen"),
        nvlink_gbs=of.number("nvlink_gbs"),
        unified=bool(of.values.get("unified", False)),
        sources=of.sources,
        notes=of.notes,
    )


def _node(record: _Record, gpus: Mapping[str, GPU]) -> Node:
    for index, name in enumerate(record.data["gpu_ids"]):
        _known(name, gpus, f"{record.where}: gpu_ids[{index}]", "gpus")
    of = _Values(record.data)
    return Node(
        id=record.id,
        name=record.data["name"],
        gpu_ids=tuple(record.data["gpu_ids"]),
        gpus=int(of.values["gpus"]),
        link=of.values["link"],
        p2p=of.values.get("p2p"),
        intra_gbs=of.number("intra_gbs"),
        measured_gbs=of.number("measured_gbs"),
        inter_gbs=of.number("inter_gbs"),
        host_ram_gb=of.integer("host_ram_gb"),
        cpu_cores=of.integer("cpu_cores"),
        sources=of.sources,
        notes=of.notes,
    )


def _linked(gpu: GPU, nodes: Iterable[Node]) -> bool:
    """True if a node joins more than two of the cards by more than PCIe; without a node, if they have NVLink."""
    found = [node for node in nodes if gpu.id in node.gpu_ids]
    return any(n.gpus > 2 and not n.link.startswith("PCIe") for n in found) if found else bool(gpu.nvlink_gbs)


def _known(name: str, names: Mapping[str, Any], where: str, command: str) -> None:
    if name not in names:
        raise InputError(f"{where}: given {show(name)}, allowed: {_some(names, command)}{closest(name, names)}")


def _architecture(config: Any, where: str, *, images: bool = False) -> Architecture:
    try:
        return from_config(config, images=images)
    except ConfigError as error:
        raise InputError(f"{where}{error}") from None


class _Models(Mapping[str, Model]):
    """The models by id, each validated when it is first asked for, which raises CatalogError if it cannot be used."""

    def __init__(self, root: Path, texts: Iterable[tuple[str, bytes]]) -> None:
        self._schema, self._texts = root / "models/schema.json", dict(texts)
        self._places = dict(sorted((Path(where).stem, where) for where in self._texts))
        self._made: dict[str, Model] = {}

    def __getitem__(self, id: str) -> Model:
        if (made := self._made.get(id)) is None:
            where = self._places[id]
            with _refused():
                made = self._made[id] = _model(_record(where, self._texts[where], self._schema, self._texts))
        return made

    def __contains__(self, id: object) -> bool:
        return id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def with_text(self, name: str) -> Iterator[Model]:
        """The models whose file has this name in it, case aside."""
        sought = name.encode()
        return (self[id] for id, where in self._places.items() if sought in self._texts[where].lower())


class _Listed(Mapping[str, str]):
    """The ids of models by the names that their files list, casefolded; CatalogError where two list one.

    An id is that of its file, and another name's file has it as it stands: that file alone is read for it.
    """

    def __init__(self, root: Path, models: _Models) -> None:
        self._root, self._models = root, models
        self._all: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        if self._all is None:
            if name in self._models:
                return name
            owners = {m.id for m in self._models.with_text(name) if name in map(str.casefold, (m.hf, *m.aliases))}
            if len(owners) == 1:
                return owners.pop()
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    @property
    def _whole(self) -> dict[str, str]:
        if self._all is None:
            with _refused():
                self._all = _own_names(self._models.values(), self._root)
        return self._all


def _model(record: _Record) -> Model:
    data = record.data
    return Model(
        id=record.id,
        name=data["name"],
        hf=data["hf"],
        aliases=tuple(data["aliases"]),
        source=data["source"],
        published_parameters=data.get("published_parameters"),
        parameters_source=data["parameters_source"],
        licence=data["licence"],
        architecture=_architecture(data["config"], f"{record.where}: config."),
        config=data["config"],
        unlike=data.get("unlike", {}),
        makes=data.get("makes", ""),
        text_alone=data.get("text_alone", False),
        stored=data.get("stored", {}).get("form", ""),
        **_vision(data, f"{record.where}: vision."),
    )


def _vision(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a Model on the vision tower that its file describes beside its language model."""
    if "vision" not in data:
        return {}
    around = data["vision"]["config"]
    seeing = _architecture(whole(data["config"], around), where, images=True)
    return {"vision": around, "seeing": seeing, "published_seeing": data["vision"]["published_parameters"]}


def whole(config: Mapping[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model that reads images, of its language model's `config` and the fields around that."""
    return {**around, "text_config": config}


def _model_of_config(path: str) -> Model:
    """A model from a Hugging Face config.json."""
    try:
        config = parse_mapping(read_bytes(Path(path), path), path)
        architecture = _architecture(config, f"{path}: ")
        apart = not architecture.vision and config.get("model_type") in SEEING and "vision_config" in config
        seeing = _architecture(config, f"{path}: ", images=True) if apart else None
    except InputError as error:
        raise CatalogError(f"model: {error}", field="model") from None
    return Model(path, path, "", (), path, None, "counted from the config", "", architecture, config, seeing=seeing)


def _own_names(models: Iterable[Model], root: Path) -> dict[str, str]:
    """The id of each listed name's model, casefolded; InputError for a name that two models list."""
    claimed: dict[str, tuple[str, str]] = {}  # the model of each name, and the place
    for model in models:
        claims = [("id", model.id), ("hf", model.hf)]
        claims += [(f"aliases[{index}]", alias) for index, alias in enumerate(model.aliases)]
        for place, name in claims:
            ours = f"models/{model.id}.yaml: {place}"
            owner, theirs = claimed.setdefault(name.casefold(), (model.id, ours))
            if owner != model.id:
                blamed, other = newer_first(root, theirs, ours)
                taken = f"given {name!r}, already a name of {other.partition(':')[0]}, allowed: a name of its own"
                raise InputError(f"{blamed}: {taken}")
    return {name: owner for name, (owner, _) in claimed.items()}


def _texts(
    root: Path, folder: str, suffix: str, update: Callable[[bytes], None], limit: int = DOCUMENT
) -> list[tuple[str, bytes]]:
    """The folder's data files: the name of each and its bytes."""
    return [(where, _read(path, where, update, limit)) for where, path in _files(root, folder, suffix)]


def _validated(
    root: Path,
    measured: Iterable[tuple[str, bytes]],
    exhausted: Iterable[tuple[str, bytes]],
    gpus: Mapping[str, GPU],
    names: Mapping[str, str],
) -> Records:
    """The records of files that were read: their models and GPUs must be in the catalog, and no id may occur twice."""
    len(names)  # all of them are asked for
    places: dict[str, str] = {}
    with _refused():
        measurements = tuple(_lines(root, MEASUREMENTS, measured, places, partial(check_names, gpus=gpus, names=names)))
        messages = tuple(_lines(root, EXHAUSTED, exhausted, places, partial(_check_card, gpus=gpus)))
    return Records(measurements, messages, places)


def _lines(
    root: Path,
    folder: str,
    texts: Iterable[tuple[str, bytes]],
    places: dict[str, str],
    named: Callable[[Mapping[str, Any], str], None],
) -> Iterator[Mapping[str, Any]]:
    """The records of the folder's files, one per line, each put in `places`; `named` refuses names that it gives."""
    check = validator(root / folder / "schema.json")
    for where, raw in texts:
        for number, line in enumerate(decode(raw, where).split("\n"), start=1):
            if not line.strip():
                continue
            place = f"{where}:{number}"
            record = parse_json(line, where, number)
            check(record, place)
            if (owner := places.setdefault(record["id"], place)) != place:
                blamed, other = newer_first(root, owner, place)
                taken = f"given {record['id']!r}, already the id of {other}, allowed: an id of its own"
                raise InputError(f"{blamed}: id: {taken}")
            named(record, place)
            yield record


def _check_card(message: Mapping[str, Any], place: str, gpus: Mapping[str, GPU]) -> None:
    """Refuses an out-of-memory message whose GPU is not in the catalog, with an InputError."""
    if message["gpu"] is not None:
        _known(message["gpu"], gpus, f"{place}: gpu", "gpus")


def check_names(record: Mapping[str, Any], place: str, gpus: Mapping[str, GPU], names: Mapping[str, str]) -> None:
    """Refuses a measurement whose model or GPU is not in the catalog, with an InputError."""
    scenario = record["scenario"]
    for name, known, command in (("gpu", gpus, "gpus"), ("model", names, "models")):
        given = scenario[name]
        if not isinstance(given, str):
            raise InputError(f"{place}: scenario.{name}: given {show(given)}, allowed: text")
        if given.casefold() not in known:
            near = closest(given, known)
            allowed = _some(known, command)
            raise InputError(f"{place}: scenario.{name}: given {show(given)}, allowed: {allowed}{near}")
    if "machine" in record:
        _known(record["machine"]["gpu"], gpus, f"{place}: machine.gpu", "gpus")
