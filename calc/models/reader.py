"""Typed access to the fields of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calc.models.architecture import ConfigError

# no real model has more; lists of layers are built one by one
MOST = {"num_hidden_layers": 10_000, "ffn_mult": 1000}


class Reader:
    """Typed access to a config under its family's defaults; every refusal is a ConfigError in the family's spelling."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], spelled: Mapping[str, str]) -> None:
        self.config, self.defaults, self.spelled = config, defaults, spelled

    def value(self, name: str) -> Any:
        """The field as the config has it, or by default."""
        name = self.spelled.get(name, name)
        return self.config[name] if name in self.config else self.defaults.get(name)

    def known(self, name: str) -> bool:
        """True if the family's config class has the field."""
        return self.spelled.get(name, name) in self.defaults

    def error(self, name: str, given: object, allowed: str) -> ConfigError:
        """The refusal of a value."""
        return ConfigError(self.spelled.get(name, name), given, allowed)

    def integer(self, name: str, least: int = 1) -> int:
        """An integer from `least` on."""
        value = self.value(name)
        most = MOST.get(name, 10**9)
        if type(value) is not int or value < least:  # a bool is an int to isinstance
            raise self.error(name, value, "a positive integer" if least else "an integer, 0 or more")
        if value > most:
            raise self.error(name, value, f"at most {most}")
        return value

    def same(self, name: str, least: int = 1) -> int:
        """An integer, or the one that a list has for every layer (Hunyuan)."""
        value = self.value(name)
        if isinstance(value, Sequence) and not isinstance(value, str) and len(set(map(repr, value))) == 1:
            value = value[0]
            if type(value) is int and value >= least:
                return value
        return self.integer(name, least)

    def optional(self, name: str) -> int | None:
        """An integer from 1 on, or null."""
        return None if self.value(name) is None else self.integer(name)

    def boolean(self, name: str) -> bool:
        """True or false; false for null."""
        value = self.value(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def positive(self, name: str) -> bool:
        """True if a number that may be null (a soft cap) is above 0."""
        value = self.value(name)
        if value is None:
            return False
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self.error(name, value, "a number, 0 or more, or null")
        return value > 0

    def on(self, name: str) -> bool:
        """True if a switch is true, or is a number above 0."""
        return self.positive(name) if type(self.value(name)) in (int, float) else self.boolean(name)
