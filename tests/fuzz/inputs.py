"""Input of a hostile or careless person for each door of `calc`: valid input, changed in ways that nobody meant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from strategies import fields, rl_fields

from calc.catalog.catalog import load
from calc.recommend import options
from calc.scenario.scenario import SCHEMA
from calc.site.calculator.addresses import ASK
from calc.site.calculator.fields import NAMES

ROOT = Path(__file__).parents[2]

WORDS = (
    "", " ", "none", "null", "true", "yes", "1e9", "1e999", "nan", "0x10", "-1", "012", "1_000", "8 ", "é", "\0",
    "\u2028", "a\nb", "x" * 3000, "9" * 40, "{}", "[]", "[a]", "!!int x", "&a", "*a", "../../x", "/dev/zero", "/", ".",
    "x.json", "/dev/zero.json", "<img src=x onerror=alert(1)>", "'\"><script>", "[[ x ]]", "{{ x }}", "`|`", "verl==",
    "torch==9", "openrlhf==0.4.9", "verl==0.4", "trl==0.7", "==", "all-linear", "fsdp2", "zero3", "adamw", "separate",
    "qlora",
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 2, 3, 5, 7, 8, 12, 64, 1000, 1024, 65_536, 10**6, 2**31, 10**9, 10**12, 10**18, 10**29, 0.5, 1.0,
    0.999999, -0.0, 1e-300, 1e300, 1.5, 8.0,
)  # fmt: skip
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(WORDS), st.sampled_from(NUMBERS), st.none(), st.booleans(), st.text(max_size=6)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def definitions(schema: Mapping[str, Any] = SCHEMA, head: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field of a schema by its dotted name, collections of fields among them."""
    for name, definition in schema["properties"].items():
        if "$ref" in definition:
            definition = SCHEMA["properties"][definition["$ref"].removeprefix("#/properties/")]
        yield head + name, definition
        if "properties" in definition:
            yield from definitions(definition, f"{head}{name}.")


FIELDS = dict(definitions())


@cache
def allowed(name: str) -> st.SearchStrategy[Any]:
    """Values that the schema allows for a field, the ends of its range above all."""
    definition = FIELDS[name]
    if "enum" in definition:
        return st.sampled_from(definition["enum"])
    kinds = definition.get("type", "string")
    if "integer" in kinds:
        least, most = definition["minimum"], definition["maximum"]
        return st.one_of(st.sampled_from((least, most)), st.integers(least, most), st.sampled_from((1, 2, 4, 8)))
    if "number" in kinds:
        return st.floats(0, 1)
    if "boolean" in kinds:
        return st.booleans()
    known = {"gpu": sorted(load().gpus), "model": sorted(load().models)}
    return st.sampled_from(known[name]) if name in known else SCALARS


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """A job as people write it, some of its fields at the ends of what is allowed, or beyond."""
    job = dict(draw(st.one_of(fields(), fields(("inference", "sft")), rl_fields())))
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.one_of(st.sampled_from(sorted(FIELDS)), st.sampled_from(sorted(job) or ["model"])))
        match draw(st.sampled_from(("allowed", "allowed", "any", "without", "misspelt", "inside"))):
            case "allowed" if name in FIELDS:
                job[name] = draw(allowed(name))
            case "without":
                job.pop(name, None)
            case "misspelt":
                job[draw(st.sampled_from((name[:-1], f"{name}.x", name.upper(), f" {name}", "")))] = job.get(name, 1)
            case "inside":
                job[f"roles.{draw(st.sampled_from(('actor', 'critic', 'reference', 'reward', 'x')))}.{name}"] = draw(
                    st.one_of(allowed(name), SCALARS) if name in FIELDS else SCALARS
                )
            case _:
                job[name] = draw(VALUES)
    return job


def nested(job: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields as mappings, where nothing stands in their way."""
    made: dict[str, Any] = {}
    for name, value in job.items():
        *way, last = name.split(".")
        inside = made
        for part in way:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                return dict(job)
        inside[last] = deepcopy(value)
    return made


# What is put somewhere into a text, or instead of a piece of it.
PIECES = (
    "!!int ", "!!bool maybe", "!x ", "&a ", "*a", "<<: *a\n", "---\n", "...\n", "\t", "\0", "\ufeff", "é", "{", "}",
    "[", "]", ":", ": ", "- ", "? ", "| ", "> ", "#", "%YAML 1.1\n", "'", '"', "\\", "\n", "  ", ",", "1e999", "9" * 50,
    "nan", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "- " * 60, "[" * 60, '{"a":' * 60, "\u2028",
    "\r",
)  # fmt: skip
# What a reader of logs and commands might walk back and forth over, where there is no end of it.
REPEATED = (
    "a", " ", "1", "1.", "--a=b ", "--a ", "k: 1\n", "{\n", '{"a": 1,\n', "[rank0]: ", "\x1b[0m", " 20%|", "1 GiB ",
    "$(", '  File "a.py", line 1, in a\n', "CUDA out of memory. Tried to allocate ", "torchrun ", "a.b=c ", "<<E\n",
    "\\\n", "A=x\nA=$A$A\n", "torchrun $A --b=$A\n",
    "2025-04-25 01:08:59 ", "['a', ", "export A=b\n", "$A", "${A:-", "A=$A$A\n", "|  0  NVIDIA ", "[1, ", "f(", "é",
)  # fmt: skip


@st.composite
def torn(draw: st.DrawFn, text: str) -> bytes:
    """A text with pieces put in, cut out and doubled, as bytes that need not be UTF-8."""
    for _ in range(draw(st.integers(0, 3))):
        at, far = draw(st.integers(0, len(text))), draw(st.integers(0, 40))
        match draw(st.sampled_from(("in", "over", "out", "twice"))):
            case "in":
                text = text[:at] + draw(st.sampled_from(PIECES)) + text[at:]
            case "over":
                text = text[:at] + draw(st.sampled_from(PIECES)) + text[at + far :]
            case "out":
                text = text[:at] + text[at + far :]
            case "twice":
                text = text[: at + far] + text[at:]
    raw = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 19)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(min_size=1, max_size=3)) + raw[at:]
    return raw


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A scenario file: YAML or JSON, nested or dotted, whole or torn; now and then anything at all."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=80))
    job = draw(jobs())
    made = nested(job) if draw(st.booleans()) else job
    as_json = draw(st.booleans())
    text = json.dumps(made) if as_json else yaml.safe_dump(made, allow_unicode=True)
    return draw(torn(text)) if draw(st.booleans()) else text.encode("utf-8", "surrogatepass")


@cache
def died() -> tuple[str, ...]:
    """Texts that people pasted when a job had died."""
    read = [
        yaml.safe_load((ROOT / "tests/diagnose" / name).read_text("utf-8")) for name in ("reports.yaml", "inputs.yaml")
    ]
    return tuple(each["text"] for kind in read for each in kind)


@st.composite
def pasted(draw: st.DrawFn) -> bytes:
    """The remains of a job, whole or torn; now and then a megabyte of the same few characters."""
    match draw(st.integers(0, 9)):
        case 0:
            piece = draw(st.one_of(st.sampled_from((*PIECES, *REPEATED)), st.text(min_size=1, max_size=4)))
            return (piece * (10**6 // len(piece))).encode("utf-8", "surrogatepass")
        case 1 | 2 | 3:
            return draw(files())
        case _:
            return draw(torn(draw(st.sampled_from(died()))))


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A batch of a few lines."""
    made = [json.dumps(draw(jobs())) for _ in range(draw(st.integers(1, 2)))]
    return draw(torn("\n".join(made)))


OPTIONS = tuple(name for name, _ in options.names())


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    """The words after `recommend`."""
    asked = {
        "model": draw(st.sampled_from(("qwen3-0.6b", "llama-3-8b", "mixtral-8x7b", "gemma-2-2b"))),
        "task": draw(st.sampled_from(("sft", "rm", "dpo", "ppo", "grpo", "reinforce++", "inference", "pretrain"))),
        "gpu": draw(st.sampled_from(sorted(load().gpus))),
        "gpus": draw(st.sampled_from((1, 2, 4, 8))),
        "framework": draw(st.sampled_from(("torch", "openrlhf", "verl", "trl"))),
    }
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(OPTIONS))
        asked[name] = draw(st.one_of(allowed(name) if name in FIELDS else SCALARS, SCALARS))
    if draw(st.integers(0, 4)) == 0:
        asked.pop(draw(st.sampled_from(sorted(asked))))
    words = []
    for name, value in asked.items():
        option = f"--{name.replace('_', '-')}"
        text = value if isinstance(value, str) else json.dumps(value)
        words += [f"{option}={text}"] if draw(st.booleans()) else [option, text]
    for _ in range(draw(st.integers(0, 9)) // 8):
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(("--json", "--", "-x", "é", *WORDS))))
    # a reader's shell passes no null byte on
    return [word.replace("\0", "") for word in words]


@st.composite
def addresses(draw: st.DrawFn) -> dict[str, str]:
    """The fields that an address of the calculator gives, as text."""
    names = (*sorted(NAMES), ASK)
    asked = {"model": "qwen3-0.6b", "task": "sft", "gpu": "rtx4090", "gpus": "2"}
    for name in draw(st.lists(st.sampled_from(names), max_size=5)):
        value = draw(st.one_of(allowed(name) if name in FIELDS else SCALARS, SCALARS, st.text(max_size=6)))
        asked[name] = value if isinstance(value, str) else json.dumps(value)
    return asked


@st.composite
def configs(draw: st.DrawFn) -> bytes:
    """A model's config.json."""
    model = load().models[draw(st.sampled_from(sorted(load().models)))]
    config = dict(model.config)
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.one_of(st.sampled_from(sorted(config)), st.sampled_from(CONFIG_FIELDS)))
        if draw(st.booleans()):
            config[name] = draw(VALUES)
        else:
            config.pop(name, None)
    text = json.dumps(config)
    return draw(torn(text)) if draw(st.integers(0, 3)) == 0 else text.encode()


@cache
def pages() -> dict[str, str]:
    """Pages whose front matter has jobs, by their place."""
    found = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.stat().st_size < 20_000]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in found}
    return {place: text for place, text in texts.items() if "scenarios:" in text or "recipes:" in text}


@st.composite
def fronts(draw: st.DrawFn) -> bytes:
    """A page whose front matter is torn."""
    text = pages()[draw(st.sampled_from(sorted(pages())))]
    end = text.index("\n---", 4)
    return draw(torn(text[:end])) + text[end:].encode()


CONFIG_FIELDS = sorted({name for model in load().models.values() for name in model.config})


@cache
def data_files() -> dict[str, str]:
    """A small catalog: some files of each kind, by their place."""
    found = [ROOT / "hardware/gpus" / f"{name}.yaml" for name in ("h100-sxm", "rtx4090", "a40")]
    found += [ROOT / "hardware/nodes" / f"{name}.yaml" for name in ("hgx-h100", "consumer-pcie")]
    found += [ROOT / "models" / f"{name}.yaml" for name in ("qwen3-0.6b", "mixtral-8x7b", "gemma-2-2b")]
    made = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in found}
    kept = {"hgx-h100": "[h100-sxm]", "consumer-pcie": "[rtx4090]"}
    for name, cards in kept.items():
        place = f"hardware/nodes/{name}.yaml"
        made[place] = re.sub(r"gpu_ids:.*?(?=^gpus:)", f"gpu_ids: {cards}\n", made[place], flags=re.S | re.M)
    return made


@st.composite
def catalogs(draw: st.DrawFn) -> tuple[str, bytes]:
    """One file of a small catalog, changed."""
    place = draw(st.sampled_from(sorted(data_files())))
    text = data_files()[place]
    if draw(st.booleans()):
        return place, draw(torn(text))
    data = yaml.safe_load(text)
    for _ in range(draw(st.integers(1, 3))):
        inside = data
        while True:
            name = draw(st.sampled_from(sorted(inside)))
            if not (isinstance(inside[name], dict) and inside[name] and draw(st.integers(0, 3))):
                break
            inside = inside[name]
        match draw(st.sampled_from(("any", "without", "misspelt"))):
            case "any":
                inside[name] = draw(VALUES)
            case "without":
                del inside[name]
            case _:
                inside[f"{name}x"] = inside.pop(name)
        if not inside:
            break
    return place, yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")
