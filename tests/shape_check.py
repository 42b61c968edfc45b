"""The run-time checker of shapes and types: beartype. An int passes as a float, as in Python itself."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
