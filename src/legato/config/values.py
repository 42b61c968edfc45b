"""The kinds of value an option may have. They are strict: a number in quotes is a word, and True is not 1."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AllowInfNan, ConfigDict, Field, Strict

LARGEST = 2**63 - 1
"""TOML and torch count in 64 bits."""

Text = Annotated[str, Strict(), Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
Count = Annotated[int, Strict(), Field(ge=1, le=LARGEST)]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Portion = Annotated[Number, Field(gt=0, le=1)]
Options = Mapping[str, Any]

STRICT = ConfigDict(extra="forbid")
