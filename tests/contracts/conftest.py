"""Contracts that anyone can run on an implementation of their own: `python -m pytest tests/contracts --part my.py:Name`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="FILE.py:NAME", help="run the contract of parts on this one")
    parser.addoption(
        "--detaches", action="store_true", help="the part stops gradients on purpose: its gradient is no derivative"
    )
