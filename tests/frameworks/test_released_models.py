"""The release of Transformers with which a model type came, read in the packages."""

from __future__ import annotations

import re

import pytest
from released import read_or_skip

from calc.base.versions import at_least
from calc.models.families import ALIKE, FAMILIES, NESTED, SEEING, THINKERS
from calc.models.releases import FIRST, SEVERAL, SHARE_TABLES
from calc.models.sound_config import HEARING

# each type with that of the whole model in whose file it stands
TYPES = {name: name for name in (*FAMILIES, *ALIKE, *NESTED, *SEEING, *HEARING)}
TYPES |= {own: whole for whole, own in THINKERS.items()}
TYPES["mllama_text_model"] = "mllama"  # which has a class of its own in the mapping only since Transformers 5
MAPPED = "transformers/models/auto/configuration_auto.py"
LISTED = "transformers/models/auto/auto_mappings.py"  # since Transformers 5.5


@pytest.mark.parametrize("version", ["4.46.3", "4.51.3", "4.57.1", "5.9.0"])
def test_a_release_maps_the_types_that_came_by_then_and_no_others(pytestconfig: pytest.Config, version: str) -> None:
    """Read in the package: what `AutoConfig` has a class for."""
    release = read_or_skip(pytestconfig, "transformers", version, (version,))
    text = "".join(release.text(path) for path in (MAPPED, LISTED) if path in release.members)
    mapped = {name for name, whole in TYPES.items() if re.search(rf"[\"']{whole}[\"']\s*[:,]", text)}
    # a name that Transformers' mapping dropped again, as it is no type of its own
    assert mapped - {SEVERAL} == {name for name, first in FIRST.items() if at_least(version, first)} - {SEVERAL}


@pytest.mark.parametrize("version", ["4.37.2", "4.44.2", "4.46.3", "4.51.3"])
def test_a_release_has_rotary_tables_in_the_layers_that_are_said_to(pytestconfig: pytest.Config, version: str) -> None:
    """Read in the package: what a family's own rotary embedding registers, whichever of our families has a table."""
    release = read_or_skip(pytestconfig, "transformers", version, (version,))
    for family in SHARE_TABLES:
        path = f"transformers/models/{family}/modeling_{family}.py"
        tabled = path in release.members and 'register_buffer("cos_cached"' in release.text(path)
        known = at_least(version, FIRST.get(family, "0"))
        assert tabled == (known and not at_least(version, SHARE_TABLES[family])), f"{release.name}: {family}"
