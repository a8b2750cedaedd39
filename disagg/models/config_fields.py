"""Reads the keys of a config.json, and checks their types and ranges. Knows no torch."""

from __future__ import annotations

import json

from disagg.errors import ModelError
from disagg.models.family import Json

MOST = 2**31 - 1


class Fields:
    """The keys of a config.json with the defaults of its family."""

    def __init__(self, raw: Json, place: object) -> None:
        self.raw = raw
        self.place = place

    def wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.place} is wrong: {what}")

    def size(self, key: str, most: int = MOST) -> int:
        """A positive whole number. Raises `ModelError`."""
        if key not in self.raw:
            raise ModelError(f"{self.place} has no {key!r}")
        value = self.raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            limit = "" if most == MOST else f" of at most {most:,}"
            raise self.wrong(f"{key} must be a positive number{limit}, not {value!r}")
        return value

    def optional_size(self, key: str) -> int | None:
        """As `size`, or None for null."""
        return None if self.raw[key] is None else self.size(key)

    def flag(self, key: str) -> bool:
        """True or false. Raises `ModelError`, also for null, which transformers refuses."""
        value = self.raw[key]
        if not isinstance(value, bool):
            raise self.wrong(f"{key} must be true or false, not {json.dumps(value)}")
        return value

    def number(self, key: str) -> float:
        """A number above 0. Raises `ModelError`."""
        value = self.raw[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.wrong(f"{key} must be a number above 0, not {value!r}")
        return float(value)

    def first_of(self, *keys: str) -> str:
        """The first of several names of a key that the file has; if it has none, the first name."""
        return next((key for key in keys if key in self.raw), keys[0])
