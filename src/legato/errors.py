"""The errors a person can do something about. Whatever else is raised is a fault of ours: a report file and exit code 1."""


class InputError(ValueError):
    """Something that was handed in cannot be used: an option, a file, a tensor, a model folder.

    The message says what was expected, what came, where it came from, and what to do. It stands alone: the command line
    prints it without a traceback and exits with 2. A `ValueError` of Python's own (`zip(strict=True)`, `int("x")`) is none.
    """
