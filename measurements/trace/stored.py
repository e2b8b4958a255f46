"""`python -m measurements.trace.stored`: trace the records of `measurements/traced.jsonl` again, or scenarios to add.

Every result is on the disk before the next begins, so that the same command goes on after a stop.
"""

import fnmatch
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from calc.base.writing import replace
from measurements.commands import Parser

from .case import MODELS, installed
from .reading import CaseError, documents, read_text

ROOT = Path(__file__).parents[2]
STORE = ROOT / "measurements" / "traced.jsonl"
DONE = ROOT / "build" / "trace.jsonl"  # results that are not in the store yet
PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes", "megatron-core", "transformer-engine",
)  # fmt: skip

# The ledger's component for each kind of block at the peak. What a step makes and frees counts as activations, since
# the instant at which the one becomes the other is the tracer's choice.
COMPONENTS = {"params": "weights", "ref_params": "weights", "grads": "gradients", "optim": "optimizer_states"}
PHASES = {"forward": "forward", "backward": "backward", "optim": "step"}

FOUND = ("note", "versions", "observed")  # the fields that a trace adds to a record besides its bytes

Record = dict[str, Any]


def trace(scenario: Record) -> Record:
    """The fields of a scenario's record that its trace gives; runs in a process of its own."""
    from . import fake  # noqa: F401  (before anything imports torch)
    from .case import from_scenario
    from .record import record

    try:
        traced = record(from_scenario(scenario))
    except ValueError as error:  # a CaseError, or what the model's own code refuses
        return {"error": str(error).splitlines()[0]}
    at = f"peak in {traced['peak_phase']} at {traced['peak_op'].removeprefix('aten.')}"
    return {
        "id": f"traced/{traced['id']}",
        "measured_bytes": traced["total_peak_bytes"],
        "note": f"{at}; cuBLAS workspaces left out",
        "versions": traced["versions"],
        "observed": observed(traced),
    }


def observed(traced: Record) -> Record:
    """The peak of each phase, the components of the highest, and for a pipeline the peak of each stage."""
    components = dict.fromkeys((*COMPONENTS.values(), "activations"), 0)
    for kind, count in traced["at_peak"].items():
        components[COMPONENTS.get(kind, "activations")] += count
    peaks = traced["phase_peak_bytes"]
    found: Record = {
        "phases": {PHASES[name]: {"allocated_bytes": count} for name, count in peaks.items() if count},
        "components": components,
    }
    if "stage_peak_bytes" in traced:
        found["stages"] = [max(stage.values()) for stage in traced["stage_peak_bytes"]]
    return found


def new(scenario: Record, found: Record) -> Record:
    """The record of a scenario that was not in the store."""
    code = "Megatron-core's" if scenario.get("sharding") == "megatron" else "Transformers'"
    return {
        "id": found["id"],
        "source": f"One training step of {code} own code on fake CUDA tensors, every allocation followed: "
        "python -m measurements.trace",
        "url": None,
        "group": "measurements/trace",
        "class": "traced",
        "metric": "allocated",
        "measured_bytes": found["measured_bytes"],
        "verdict": None,
        "confidence": "high",
        "scenario": scenario,
        **{field: found[field] for field in FOUND},
    }


def tracer() -> str:
    """A hash of everything that results depend on: this package's files, and the versions of the libraries it runs."""
    sources = sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".py", ".cpp"))
    here = {name: installed(name) for name in PACKAGES}
    if absent := next((name for name, release in here.items() if release is None), None):
        raise CaseError(f"{absent} is not installed here: make trace sets it up")
    releases = "".join(f"{name} {release}\n" for name, release in here.items())
    return hashlib.sha256(b"".join(p.read_bytes() for p in sources) + releases.encode()).hexdigest()


def key(scenario: Record, by: str) -> str:
    """The name of a result: a hash of the tracer, the scenario, and the model's file."""
    model = MODELS / f"{scenario['model']}.yaml"
    text = by + json.dumps(scenario, sort_keys=True) + (model.read_text("utf-8") if model.exists() else "")
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> list[Record]:
    """The records of a file, one a line; none if there is no file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line] if path.exists() else []


def traces(scenarios: Iterable[Record], jobs: int) -> Iterator[tuple[Record, Record]]:
    """(scenario, result) of each, in the order in which they end; results of an interrupted run come first."""
    by = tracer()
    keys = [(key(scenario, by), scenario) for scenario in scenarios]
    before = {line["key"]: line["found"] for line in read(DONE)}
    yield from ((scenario, before[k]) for k, scenario in keys if k in before)
    DONE.parent.mkdir(exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    # PyTorch keeps some of the memory of each trace, so each process ends after a few of them
    pool = multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=25)
    with DONE.open("a", encoding="utf-8") as done, pool:
        for k, scenario, found in pool.imap_unordered(_traced, [pair for pair in keys if pair[0] not in before]):
            if "error" not in found:
                print(json.dumps({"key": k, "found": found}), file=done, flush=True)
            yield scenario, found


def _traced(pair: tuple[str, Record]) -> tuple[str, Record, Record]:
    """A key, its scenario, and the result."""
    return *pair, trace(pair[1])


def store(records: list[Record]) -> None:
    """Rewrite the store, whole or not at all."""
    replace(STORE, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())
    DONE.unlink(missing_ok=True)


def run(records: list[Record], scenarios: list[Record], jobs: int) -> int:
    """Trace the scenarios, update the records with the results, say what changed; 0 if every one could be traced."""
    known = {json.dumps(record["scenario"], sort_keys=True): record for record in records}
    changed, failed, began = 0, 0, time.monotonic()
    for count, (scenario, found) in enumerate(traces(scenarios, jobs), 1):
        left = (time.monotonic() - began) / count * (len(scenarios) - count) / 60
        record = known.get(json.dumps(scenario, sort_keys=True))
        name = record["id"] if record else found.get("id", scenario["model"])
        said = ""
        if "error" in found:
            failed += 1
            said = f"cannot be traced: {found['error']}"
        elif record is None:
            records.append(new(scenario, found))
            said = f"new: {found['measured_bytes']:,} bytes"
        elif record["measured_bytes"] != found["measured_bytes"]:
            changed += 1
            said = f"changed: {record['measured_bytes']:,} bytes before, {found['measured_bytes']:,} after"
        if record and "error" not in found:
            record.update({field: found[field] for field in ("measured_bytes", *FOUND)})
        if said or sys.stderr.isatty():
            print(f"[{count}/{len(scenarios)}] {name} {said or '… the same'}")
        print(f"{count}/{len(scenarios)}, {left:.0f} min left", end="\r", file=sys.stderr, flush=True)
    store(records)
    print(f"{len(scenarios)} traced in {(time.monotonic() - began) / 60:.1f} min: {changed} changed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    """Run the command line; 0 if everything was traced, 2 for input that cannot be used."""
    parser = Parser(prog="python -m measurements.trace.stored", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="records whose id has this in it (* and ? too)")
    parser.add_argument("--add", metavar="FILE", help="scenarios to trace and append, as YAML documents or JSON lines")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2; 2 to 6 GiB each)")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs: given {options.jobs}, allowed: 1 or more")
    try:
        records = read(STORE)
        if options.add:
            scenarios = documents(_documents(read_text(Path(options.add))), options.add)
            if not all(isinstance(scenario, dict) and "model" in scenario for scenario in scenarios):
                raise CaseError(f"{options.add}: given what is no scenario, allowed: mappings with a model")
            stored = [record["scenario"] for record in records]
            scenarios = [scenario for scenario in scenarios if scenario not in stored]
        else:
            names = f"*{options.only}*"
            scenarios = [record["scenario"] for record in records if fnmatch.fnmatchcase(record["id"], names)]
        if not scenarios:
            raise CaseError("nothing to trace: no record is meant, or all scenarios are stored")
        return run(records, scenarios, options.jobs)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {DONE.relative_to(ROOT)}", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:  # ValueError: a CaseError, or a file that is no text
        print(str(error).partition("\n")[0], file=sys.stderr)
        return 2


def _documents(text: str) -> str:
    """JSON lines turned into YAML documents."""
    return "\n---\n".join(text.splitlines()) if text.startswith("{") else text


if __name__ == "__main__":
    sys.exit(main())
