"""How many files this process may have open. A connection is a file too."""

import resource

MOST_FILES = 2**16


def raise_file_limit() -> int:
    """Let this process hold as many connections as the system allows it to; returns how many files it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, MOST_FILES) if hard != resource.RLIM_INFINITY else MOST_FILES
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return soft
