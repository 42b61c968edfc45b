"""The process that trains runs one after another: Python, torch and CUDA start once for all of them.

It reads a task per line of its standard input, {"words": [...], "log": "file"}, runs the command with its output appended to
the log, and answers with the exit code on a line of its standard output. It ends with its input, or after a signal.
"""

import gc
import json
import os
import signal
import sys


def main() -> None:
    answers = os.dup(1)
    for line in sys.stdin:
        task = json.loads(line)
        code = _run(task["words"], task["log"])
        os.write(answers, f"{code}\n".encode())
        if code >= 128:
            break  # the run was asked to stop, and so are we


def _run(words: list[str], log: str) -> int:
    """The exit code of a command."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    from legato.cli.main import run_command

    sys.argv = ["legato", *words]
    code = 0
    try:
        run_command()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_memory()
    return code


def _release_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
