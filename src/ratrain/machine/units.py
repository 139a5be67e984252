"""Sourced values with their units, read from a TOML table: the grammar of platform files.

A table remembers which of its keys were read, so that what is left over can be refused by name.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ratrain.errors import UserError

# Quantity -> unit at the end of the key -> factor to bytes, seconds, bytes/s, parameters/s, or a bare number.
UNITS: dict[str, dict[str, float]] = {
    "bytes": {"_gb": 1e9, "_gib": 2.0**30, "_mb": 1e6, "_mib": 2.0**20},
    "seconds": {"_us": 1e-6, "_ms": 1e-3},
    "bytes_per_s": {
        "_gb_per_s": 1e9,
        "_gib_per_s": 2.0**30,
        "_mb_per_s": 1e6,
        "_gbit_per_s": 1e9 / 8,
        "_mbit_per_s": 1e6 / 8,
    },
    "parameters_per_s": {"_million_parameters_per_s": 1e6},
    "ratio": {"": 1.0},
}
CONFIDENCE = ("H", "M", "L", "U", "fit")
_ENTRY = ("value", "source", "confidence")

Plain = TypeVar("Plain", int, str)


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` for the known name closest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class Table:
    """One TOML table of `file`, called `name` (dotted; empty for the root).

    `seen` collects (value, source, confidence) of every sourced value by dotted key, over all tables of a
    file. Every method raises UserError in one line that names the file and the key.
    """

    def __init__(
        self,
        file: str,
        name: str,
        content: dict[str, Any],
        seen: dict[str, tuple[float | int | str, str, str]] | None = None,
    ) -> None:
        self.file = file
        self.name = name
        self.seen = {} if seen is None else seen
        self._content = content
        self._asked: set[str] = set()
        self._children: list[Table] = []

    def plain(self, key: str, kind: type[Plain]) -> Plain:
        """A bare value that needs no source: a name, the schema number."""
        value = self._content.get(self._ask(key))
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._error(key, f"expected a {kind.__name__}", missing=key not in self._content)
        return value

    def has(self, key: str) -> bool:
        """Whether the optional `key` is there."""
        return key in self._content

    def table(self, key: str) -> Table:
        """The sub-table `key`."""
        content = self._content.get(self._ask(key))
        if not isinstance(content, dict):
            raise self._error(key, "expected a table", missing=key not in self._content)
        return self._child(key, content)

    def tables(self, key: str) -> Iterator[tuple[str, Table]]:
        """Name and table of every entry of the optional table `key`."""
        if self.has(key):
            outer = self.table(key)
            for name in outer._content:
                yield name, outer.table(name)

    def quantity(self, key: str, quantity: str, minimum: float | None = None) -> float:
        """The value of `key` + unit in the base unit: at least `minimum`, or without one greater than 0."""
        units = UNITS[quantity]
        for unit in units:
            self._ask(key + unit)
        present = [unit for unit in units if key + unit in self._content]
        if len(present) != 1:
            expected = " or ".join(key + unit for unit in units)
            raise self._error(key, f"expected exactly one of {expected}", missing=not present)
        return self._number(key + present[0], minimum) * units[present[0]]

    def optional(self, key: str, quantity: str) -> float:
        """As `quantity`; 0 where no key of the table begins so."""
        present = any(key + unit in self._content for unit in UNITS[quantity])
        return self.quantity(key, quantity) if present else 0.0

    def count(self, key: str) -> int:
        """A whole number of at least 1."""
        value = self._sourced(key)
        if not isinstance(value, int) or value < 1:
            raise self._error(key, f"expected a whole number of at least 1, not {value!r}")
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        """One word out of `allowed`."""
        value = self._sourced(key)
        if value not in allowed:
            raise self._error(key, f"expected one of {', '.join(allowed)}, not {value!r}")
        return str(value)

    def every(self, unit: str = "") -> dict[str, float]:
        """All values; with `unit` "tflop_per_s" the keys lose that ending and the values are FLOP/s."""
        values: dict[str, float] = {}
        for key in self._content:
            if not key.endswith(unit):
                raise self._error(key, f"expected a key ending in _{unit}")
            factor = 1e12 if unit else 1.0
            values[key.removesuffix(f"_{unit}")] = self._number(key, None if unit else -math.inf) * factor
        return values

    def finish(self) -> None:
        """Refuses a key that nothing asked for, here and in every sub-table."""
        for key in self._content:
            if key not in self._asked:
                raise self._error(key, f"unknown key{nearest(key, self._asked)}")
        for child in self._children:
            child.finish()

    def _number(self, key: str, minimum: float | None) -> float:
        value = self._sourced(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._error(key, f"expected a finite number, not {value!r}")
        if value <= 0 if minimum is None else value < minimum:
            bound = "more than 0" if minimum is None else f"at least {minimum:g}"
            raise self._error(key, f"expected {bound}, not {value}")
        return float(value)

    def _sourced(self, key: str) -> float | int | str:
        entry = self._content.get(self._ask(key))
        if not isinstance(entry, dict) or set(entry) != set(_ENTRY):
            shape = "{ value = ..., source = ..., confidence = ... }"
            raise self._error(key, f"expected {shape}", missing=key not in self._content)
        value, source, confidence = (entry[part] for part in _ENTRY)
        if not isinstance(source, str) or not source.strip():
            raise self._error(key, "source is empty; say where the value is from")
        if confidence not in CONFIDENCE:
            raise self._error(key, f"confidence {confidence!r} is not one of {', '.join(CONFIDENCE)}")
        self.seen[self._dotted(key)] = (value, source, confidence)
        return value

    def _ask(self, key: str) -> str:
        self._asked.add(key)
        return key

    def _child(self, key: str, content: dict[str, Any]) -> Table:
        child = Table(self.file, self._dotted(key), content, self.seen)
        self._children.append(child)
        return child

    def _dotted(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def _error(self, key: str, what: str, missing: bool = False) -> UserError:
        if missing:
            # The misspelt key is more useful to the reader than the one that is therefore absent.
            stranger = next((k for k in self._content if nearest(k, [key])), None)
            hint = f" (is {stranger!r} meant for it?)" if stranger else ""
            return UserError(f"{self.file}: {self._dotted(key)} is missing{hint}; {what}")
        return UserError(f"{self.file}: {self._dotted(key)}: {what}")
