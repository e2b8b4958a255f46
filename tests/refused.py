"""The line with which a call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from calc.base.schema import InputError


def line(call: Callable[[], Any]) -> str:
    """The one line that a call is refused with."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.isprintable()
    return text
