from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from calc.answers import advice
from calc.answers import words as shown
from calc.base.plan import Lasting
from calc.estimate import report
from calc.estimate.verdict import Verdict
from calc.launch import shell
from calc.memory.run import WIDTHS, Format
from calc.scenario.images import Images
from calc.scenario.scenario import SCHEMA, Lora, Rollout, Scenario
from calc.scenario.words import (
    DEEPSPEED,
    FSDP,
    OWN_SHARDINGS,
    SHARDED,
    SHARDINGS,
    Attention,
    Family,
    Layout,
    Loss,
    Sharding,
)
from calc.site.tables import plots, tables
from calc.site.views.accuracy import odds
from calc.step.instants import LASTING
from calc.step.placement import FORMATS, TAPES
from calc.throughput.training import OVERLAP, PER_LOGIT

NESTED = {"images": Images, "lora": Lora, "rollout": Rollout}


def literals(of: type, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """The words of each field of a class that is a choice of words."""
    hints = get_type_hints(of).items()
    return {prefix + name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def enums(properties: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """The values of each field that the schema chooses from a list."""
    for name, node in properties.items():
        if "enum" in node:
            yield prefix + name, tuple(node["enum"])
        yield from enums(node.get("properties", {}), f"{prefix}{name}.")


TYPED = literals(Scenario) | {p: w for name, of in NESTED.items() for p, w in literals(of, f"{name}.").items()}
LISTED = dict(enums(SCHEMA["properties"]))


@pytest.mark.parametrize("place", TYPED)
def test_a_field_is_typed_with_the_words_of_the_schema(place: str) -> None:
    """A word that the schema gains is one that mypy knows, and asks each branch about."""
    assert LISTED[place] == TYPED[place]


def test_fields_that_choose_among_words_are_typed() -> None:
    assert LISTED.keys() - TYPED.keys() <= {"optimizer", "optimizer_impl"}


def test_every_sharding_has_a_family_and_its_number() -> None:
    """The parts of a sharding are those of its spelling."""
    assert tuple(SHARDED) == get_args(Sharding)
    for word, (family, stage) in SHARDED.items():
        assert word == f"{family}{stage or ''}"
    # those that most trainers have, then those that one trainer alone has
    assert get_args(Sharding)[1:] == (*SHARDINGS, *OWN_SHARDINGS["megatron"])
    assert [w for w in SHARDED if SHARDED[w].family == "zero"] == [*DEEPSPEED]
    assert [w for w in SHARDED if SHARDED[w].family == "fsdp"] == [*FSDP]


def test_what_gathers_weights_has_only_parts_of_them() -> None:
    assert [word for word in SHARDED if SHARDED[word].gathers] == ["zero3", "fsdp1", "fsdp2"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (SHARDED, Sharding),
        (FORMATS, Layout),
        (TAPES, Layout),
        (WIDTHS, Format),
        (LASTING, Lasting),
        (PER_LOGIT, Loss),
        (OVERLAP | {"none": 0}, Sharding),  # which exchanges nothing
        (odds.KINDS, Family),
        (advice.SHORT, Sharding),
        (shown.SHARDINGS, Sharding),
        (shown.ATTENTION, Attention),
        (shell.ATTENTION, Attention),
        (report.VERDICTS, Verdict),
        (tables.WORDS, Verdict),
        (plots.SAID, Verdict),
    ],
)
def test_a_table_of_words_has_every_one(table: Mapping[str, Any], words: Any) -> None:
    """A word without an entry fails here, and not on the day that a job uses it."""
    assert table.keys() == set(get_args(words))
