"""Shows the progress of a run: a live panel on a terminal, a plain line now and then elsewhere.

Text of a model or a run is printed as plain text: never as markup, never with control characters.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from legato.pages.legible import legible
from legato.pages.report import duration
from legato.run.watcher import DisplaySettings, Watcher, lost_output

Metrics = Mapping[str, float]

SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("accuracy/mean", "accuracy", ".1%"),
    ("clip/sequences", "clipped", ".1%"),
    ("entropy/mean", "entropy", ".3f"),
    ("length/mean", "length", ".1f"),
    ("tokens/per_second", "tokens/s", ",.0f"),
)
"""(metric key, label, format) of the numbers that both displays show, in order."""

HELD_OUT_REWARD = "eval/reward_sampled"
HELD_OUT = (("eval/accuracy_sampled", "held-out sampled"), ("eval/accuracy_greedy", "held-out greedy"))


@runtime_checkable
class Stream(Protocol):
    """A text stream."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


def for_terminal(console: Console | None = None) -> Watcher:
    """A live display on an interactive terminal; plain lines for files, pipes and dumb terminals."""
    console = console or Console(highlight=False)
    live = console.is_interactive and not console.is_dumb_terminal and not console.is_jupyter
    return LiveDisplay(console) if live else PlainDisplay(console.file)


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Values between 0 and 1 as at most `width` bars; neighbours are averaged if there are more."""
    bars = ".:-=+*#%" if ascii_only else "▁▂▃▄▅▆▇█"
    known = [value for value in values if math.isfinite(value)]
    if width < 1 or not known:
        return ""
    size = math.ceil(len(known) / width)
    means = [math.fsum(known[at : at + size]) / len(known[at : at + size]) for at in range(0, len(known), size)]
    return "".join(bars[min(len(bars) - 1, max(0, int(mean * len(bars))))] for mean in means)


def plain(text: str) -> str:
    """One line without control characters."""
    return legible(text, one_line=True)


def _check(stream: object) -> None:
    """Raise the error after which a stream of the command line takes no more text."""
    error = lost_output(stream)
    if error is not None:
        raise error


def _number(metrics: Metrics, key: str, form: str) -> str | None:
    value = metrics.get(key)
    if value is None:
        return None
    return format(value, form) if math.isfinite(value) else "-"


def _pairs(metrics: Metrics, evaluation: Metrics | None) -> list[tuple[str, str]]:
    pairs = [(word, _number(metrics, key, form)) for key, word, form in SHOWN]
    pairs[2:2] = [(word, _number(evaluation or {}, key, ".1%")) for key, word in (*HELD_OUT, *_sets(evaluation or {}))]
    if not 0 <= (evaluation or {}).get(HELD_OUT_REWARD, 0.0) <= 1:  # else accuracy says as much
        pairs.insert(2, ("held-out reward", _number(evaluation or {}, HELD_OUT_REWARD, ".3f")))
    return [(word, text) for word, text in pairs if text is not None]


def _sets(evaluation: Metrics) -> list[tuple[str, str]]:
    """(key, label) of avg@n of each evaluation set."""
    keys = [key.split("/") for key in evaluation if key.count("/") == 2 and not key.endswith(("_low", "_high"))]
    return [("/".join(words), f"{words[1]} {words[2]}") for words in keys if words[2].startswith("avg@")]


_EVERY_STEP = DisplaySettings(log_every_steps=1, log_every_seconds=0.0)
"""Until a run tells its own settings."""


def _time_left(seconds: float | None, settings: DisplaySettings) -> str:
    """The time left in words, empty without an estimate. It is an upper bound if a run may end before its last step."""
    if not seconds:
        return ""
    return f"{'at most' if settings.may_end_early else 'about'} {duration(seconds)} left"


class PlainDisplay:
    """Lines for logs: of the first and the last step, of evaluations, and one every few seconds or steps between them."""

    def __init__(self, stream: Stream | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._settings = _EVERY_STEP
        self._now = clock
        self._printed_at = -math.inf
        self._evaluation: Metrics | None = None
        self._waiting: str | None = None
        """The line of the last step, if it was not printed."""

    def configure(self, settings: DisplaySettings) -> None:
        self._settings = settings

    def start(self, title: str, notes: Sequence[str]) -> None:
        self._print(plain(title))
        for note in notes:
            self._print(f"  {plain(note)}")

    def warm_up(self, step: int, steps: int, loss: float) -> None:
        # Ten lines in all: the stage is short and has many steps.
        if step == steps or step % max(1, steps // 10) == 0:
            self._print(f"warm-up {step}/{steps}  loss {loss:.3f}")

    def step(self, step: int, steps: int, metrics: Metrics, evaluation: Metrics | None, seconds_left: float | None) -> None:
        words = [f"step {step:>{len(str(steps))}}/{steps}"]
        words += [f"{word} {text}" for word, text in _pairs(metrics, evaluation)]
        self._waiting = "  ".join(filter(None, [*words, _time_left(seconds_left, self._settings)]))
        evaluated, self._evaluation = evaluation != self._evaluation, evaluation
        if step == steps or evaluated or self._is_due(step):
            self._print_waiting()

    def _is_due(self, step: int) -> bool:
        every_steps, every_seconds = self._settings.log_every_steps, self._settings.log_every_seconds
        first = math.isinf(self._printed_at)
        in_time = every_seconds > 0 and self._now() - self._printed_at >= every_seconds
        return first or in_time or (every_steps > 0 and step % every_steps == 0)

    def _print_waiting(self) -> None:
        if self._waiting is not None:
            self._print(self._waiting)
            self._waiting, self._printed_at = None, self._now()

    def message(self, text: str) -> None:
        self._print(plain(text))

    def close(self) -> None:
        self._print_waiting()  # a run that ends early shows its last step too
        self._stream.flush()

    def _print(self, line: str) -> None:
        # A stream in ASCII must not end a run because of a curly quote.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()
        _check(self._stream)


class LiveDisplay:
    """A panel that stays at the bottom of the terminal; messages scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._settings = _EVERY_STEP
        self._phase, self._step, self._steps = "starting", 0, 0
        self._pairs: list[tuple[str, str]] = []
        self._held_out: dict[str, float] = {}
        self._accuracy: list[float] = []
        self._end: float | None = None
        self._closed = False
        # Two frames a second keep the clock moving at no measurable cost.
        self._live = Live(get_renderable=lambda: self, console=self._console, refresh_per_second=2, transient=True)

    def configure(self, settings: DisplaySettings) -> None:
        self._settings = settings

    def start(self, title: str, notes: Sequence[str]) -> None:
        self._console.print(Text(plain(title), style="bold"))
        for note in notes:
            self._console.print(Text(f"  {plain(note)}", style="dim"))
        self._live.start()

    def warm_up(self, step: int, steps: int, loss: float) -> None:
        self._phase, self._step, self._steps = "warm-up", step, steps
        self._pairs = [("loss", f"{loss:.3f}")]

    def step(self, step: int, steps: int, metrics: Metrics, evaluation: Metrics | None, seconds_left: float | None) -> None:
        self._phase, self._step, self._steps = "training", step, steps
        self._held_out |= dict(evaluation or {})  # the latest evaluation stays on the panel
        self._pairs = _pairs(metrics, self._held_out)
        self._accuracy.append(metrics.get("accuracy/mean", math.nan))
        self._end = None if seconds_left is None else time.monotonic() + seconds_left
        _check(self._console.file)  # the thread that draws the panel may have lost it

    def message(self, text: str) -> None:
        self._console.print(Text(plain(text)))
        _check(self._console.file)

    def close(self) -> None:
        self._live.stop()
        if self._steps and not self._closed:
            self._console.print(self)  # the last state stays on the screen
        self._closed = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        width = options.max_width
        yield from self._head(width)
        columns = max(1, min(4, width // 24))
        table = Table.grid(padding=(0, 2), expand=False)
        for _ in range(columns):
            table.add_column(no_wrap=True, overflow="ellipsis")
        cells = [Text.assemble((f"{word} ", "dim"), (text, "bold")) for word, text in self._pairs]
        for at in range(0, len(cells), columns):
            table.add_row(*cells[at : at + columns])
        yield table
        if any(math.isfinite(value) for value in self._accuracy) and width >= 30:
            bars = sparkline(self._accuracy, min(60, width - 12), ascii_only=options.ascii_only)
            yield Text.assemble(("accuracy ", "dim"), (bars, "green"), no_wrap=True, overflow="crop")

    def _head(self, width: int) -> Iterator[Table | Text]:
        left = None if self._end is None else max(0.0, self._end - time.monotonic())
        words = Text.assemble((f"{self._phase} ", "bold"), f"{self._step}/{self._steps}" if self._steps else "")
        clock = Text(_time_left(left, self._settings), style="cyan")
        room = width - words.cell_len - clock.cell_len - 4
        if room < 8 or not self._steps:
            for line in (words, clock):
                line.truncate(width)
                yield line
            return
        row = Table.grid(padding=(0, 2))
        for _ in range(3):
            row.add_column(no_wrap=True)
        row.add_row(words, ProgressBar(total=self._steps, completed=self._step, width=min(40, room)), clock)
        yield row
