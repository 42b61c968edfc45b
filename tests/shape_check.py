"""The run-time checker of shapes and types: beartype, an int allowed where a float is declared, as in Python itself."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
