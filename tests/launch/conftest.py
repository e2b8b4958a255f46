"""The released packages that flags are held against."""

from __future__ import annotations

import pytest
from frameworks.released import Unreachable
from packages import VERSIONS, Packages


@pytest.fixture(scope="session")
def packages(pytestconfig: pytest.Config) -> Packages:
    """The released packages; skips where the registry cannot be reached."""
    found = Packages(pytestconfig.cache.mkdir("released"))
    try:
        for package, versions in VERSIONS.items():
            for version in versions:
                found.release(package, version)
        found.deepspeed("deepspeed/launcher/runner.py")
    except Unreachable as reason:
        pytest.skip(f"the registry cannot be reached: {reason}")
    return found
