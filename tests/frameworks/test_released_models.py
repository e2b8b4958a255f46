"""The release of Transformers with which a model type came, read in the packages."""

from __future__ import annotations

import re

import pytest
from released import Unreachable, read

from calc.base.versions import at_least
from calc.models.families import ALIKE, FAMILIES, NESTED, SEEING
from calc.models.releases import FIRST

TYPES = {*FAMILIES, *ALIKE, *NESTED, *SEEING}
MAPPED = "transformers/models/auto/configuration_auto.py"
LISTED = "transformers/models/auto/auto_mappings.py"  # since Transformers 5.5


@pytest.mark.parametrize("version", ["4.46.3", "4.51.3", "4.57.1", "5.9.0"])
def test_a_release_maps_the_types_that_came_by_then_and_no_others(pytestconfig: pytest.Config, version: str) -> None:
    """Read in the package: what `AutoConfig` has a class for."""
    try:
        release = read(pytestconfig.cache.mkdir("released"), "transformers", version, (version,))
    except Unreachable as reason:
        pytest.skip(f"the registry cannot be reached: {reason}")
    text = "".join(release.text(path) for path in (MAPPED, LISTED) if path in release.members)
    mapped = {name for name in TYPES if re.search(rf"[\"']{name}[\"']\s*[:,]", text)}
    assert mapped == {name for name, first in FIRST.items() if at_least(version, first)}
