"""Chat templates as they are rendered in a worker (`workers/pool.py`).

A template is a program that comes with a model. The sandbox of transformers keeps it from files and attributes, but not from
loops without end or texts of many gigabytes. Here both end with this process and not with the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

MEMORY_BYTES = 2**30
LONGEST = 2**22
"""Characters of a rendered text. A longer one is a fault of the template; no context is that long."""


def prepare() -> None:
    """Import the renderer, then lower the memory limit: a template needs far less than other workers do."""
    import resource

    from transformers.utils import chat_template_utils

    chat_template_utils.render_jinja_template([[]], chat_template="")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def render(
    template: Any, messages: list[dict[str, Any]], arguments: dict[str, Any], date: str | None = None, opens: bool = True
) -> str:
    """The text of chat messages up to the first token of the next answer; not `opens`: up to the end of the last message.

    `date`, in ISO format, is what a template that asks for the date gets; None: the date of now.
    """
    from transformers.utils import chat_template_utils

    # Its annotation says that it returns a text; it returns a list of texts and a list of indices.
    apply_template: Any = chat_template_utils.render_jinja_template
    with _today(chat_template_utils, date):
        text: str = apply_template([messages], chat_template=template, add_generation_prompt=opens, **arguments)[0][0]
    if len(text) > LONGEST:
        raise ValueError(f"the rendered text has {len(text)} characters, {LONGEST} are allowed")
    return text


@contextmanager
def _today(module: Any, date: str | None) -> Iterator[None]:
    """Let the module of transformers take `date` for today: it passes no function to a template in place of its own."""
    if date is None:
        yield
        return
    day = datetime.fromisoformat(date)

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return day

    before, module.datetime = module.datetime, Fixed
    try:
        yield
    finally:
        module.datetime = before
