"""The run-time checker of shapes and types: beartype. An int passes as a float, as in Python itself."""

import random

from beartype import BeartypeConf, beartype
from beartype._check.code import codemain

# It looks at one item of a list, drawn at random. The global generator is the run's: its state is saved and compared.
codemain.getrandbits = random.Random(0).getrandbits  # type: ignore[attr-defined]

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
