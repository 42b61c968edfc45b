"""Helpers of the browser tests: runs to show, and actions on the page."""

from pathlib import Path
from typing import Any

from legato.records.directory import RunDirectory
from tests.dashboard.browser import Browser


def step_record(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": step, "reward/mean": step / 10, "length/mean": 5.0, **more}


def make_run(parent: Path, name: str, steps: int, config: str = "", algorithm: str = "gspo") -> RunDirectory:
    directory = RunDirectory.create(parent, name)
    directory.write_config(config or f'[algorithm]\nname = "{algorithm}"\n\n[training]\nseed = 0\nsteps = 100\n')
    directory.append_metrics({"kind": "start", "name": name, "model": "tiny", "algorithm": algorithm})
    for step in range(1, steps + 1):
        directory.append_metrics(step_record(step))
    return directory


def run_item(name: str) -> str:
    """A JavaScript expression for a run in the list."""
    return f"[...document.querySelectorAll('#runs li')].find(e => e.textContent.startsWith({name!r}))"


def choose(page: Browser, *names: str) -> None:
    for name in names:
        page.run(f"{run_item(name)}.querySelector('input').click()")


def enter(page: Browser, element: str, value: str, event: str = "change") -> None:
    """Put a value into a control, as typing or choosing would."""
    page.run(f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('{event}')) }})({element})")


def curves(page: Browser, key: str = "reward/mean") -> str:
    """A JavaScript expression for the traces of a figure that are curves."""
    return f"""(document.querySelector('figure[data-key="{key}"] .plot')?.data || []).filter(t => t.showlegend !== false)"""


def open_rollouts(page: Browser, name: str = "<img") -> None:
    choose(page, name)
    page.press("3")
    page.wait("document.querySelector('#list')?.dataset.count")


def replace_answers(page: Browser, path: str, change: str) -> None:
    """Replace the answers of one address by the expression `change`, in which `real()` asks the server."""
    page.run("window.asking ||= window.fetch")
    script = f"(where, more) => (real => where.startsWith('/api/{path}') ? {change} : real())(() => asking(where, more))"
    page.run(f"void (window.fetch = {script})")
