"""Options of the contracts: what of yours is to be checked in place of what Legato brings."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", help='an engine of your own to check: "my_engine.py:MyEngine" or a registered name')
