"""The figures of a run's report."""

import html
import re
from collections.abc import Sequence
from typing import Any

from legato.pages.curves import Bins, chunks, curve, points, rebin, round_six
from legato.pages.legible import legible
from legato.pages.summary import Evaluation, Record, evaluations, number
from legato.pages.traces import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    RED,
    UPDATES,
    VIOLET,
    Figure,
    Trace,
    average_line,
    axis,
    band,
    band_edges,
    figure,
    line,
    line_with_band,
    logarithmic,
    shares,
)


def figures(records: Sequence[Record]) -> list[Figure]:
    """Return all figures that the records allow."""
    steps = [record for record in records if record.get("kind") == "step"]
    drawn = (
        _accuracy(steps, evaluations(records)),
        _reward(steps),
        _components(steps),
        _lengths(steps),
        _entropy(steps),
        _clipping(steps),
        _clip_fractions(steps),
        _clip_band(steps),
        _experts(steps),
        _sampler(steps),
        _ratios(steps),
        _gradient(steps),
        _groups(steps),
        _times(steps),
        _speed(steps),
        _rate(steps),
        _warm_up([record for record in records if record.get("kind") == "warm-up"]),
    )
    return [each for each in drawn if each is not None]


def _accuracy(steps: Sequence[Record], held_out: Sequence[Evaluation]) -> Figure | None:
    data: list[Trace] = []
    trained = curve(steps, "accuracy/mean")
    if trained is not None:
        data += line_with_band(trained, "training problems", GREY)
    for name, colour, symbol in (("sampled", BLUE, "circle"), ("greedy", GREEN, "diamond")):
        measured = [(each.step, getattr(each, name)) for each in held_out if getattr(each, name) is not None]
        if measured:
            data.append(_accuracy_trace(measured, f"held-out, {name}", colour, symbol))
    caption = (
        "Held-out problems are never trained on; bars are 95 % intervals. Training accuracy is of the sampled rollouts."
    )
    keys = ("eval/accuracy_sampled", "eval/accuracy_greedy", "accuracy/mean")
    return figure("Accuracy", caption, data, shares("accuracy"), wide=True, keys=keys)


def _accuracy_trace(measured: Sequence[tuple[int, Any]], name: str, colour: str, symbol: str) -> Trace:
    values = [interval.value for _, interval in measured]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(measured) > 1 else "markers",
        "name": name,
        "x": [step for step, _ in measured],
        "y": [round_six(value) for value in values],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [round_six(max(0.0, interval.high - interval.value)) for _, interval in measured],
            "arrayminus": [round_six(max(0.0, interval.value - interval.low)) for _, interval in measured],
            "thickness": 1.2,
            "width": 3,
        },
        "line": {"color": colour, "width": 2.2},
        "marker": {"color": colour, "size": 8, "symbol": symbol},
    }


def _reward(steps: Sequence[Record]) -> Figure | None:
    rewards = curve(steps, "reward/mean")
    data = [] if rewards is None else line_with_band(rewards, "reward", BLUE)
    return figure("Reward", "Mean reward of each step's rollouts.", data, axis("reward"), keys=["reward/mean"])


def _components(steps: Sequence[Record]) -> Figure | None:
    left_out = {"reward/mean", "reward/deviation"}
    keys = sorted({key for record in steps for key in record if key.startswith("reward/") and "@" not in key} - left_out)
    if len(keys) < 2:
        return None  # one component is the reward itself
    data = [
        trace
        for index, key in enumerate(keys)
        for trace in average_line(steps, key, _component_name(key), UPDATES[index % 8])
    ]
    caption = "Mean of each component before its weight; moving averages."
    return figure("Reward by component", caption, data, axis("reward"), keys=["reward/NAME"])


def _lengths(steps: Sequence[Record]) -> Figure | None:
    data: list[Trace] = []
    x, low = points(steps, "length/tokens_p10")
    x_high, high = points(steps, "length/tokens_p95")
    if x and x == x_high:
        data += band(
            x, [round_six(value) for value in low], [round_six(value) for value in high], "p10 to p95 of responses", VIOLET
        )
    means = curve(steps, "length/mean")
    if means is not None:
        data += [line(means.steps, means.average, "mean", VIOLET)] if data else line_with_band(means, "mean", VIOLET)
    longest = curve(steps, "length/maximum") or curve(steps, "length/max")
    if longest is not None:
        data.append(line(longest.steps, longest.values, "longest", AMBER, width=1.2, dash="dot"))
    caption = "Tokens a response. A fall to a few tokens or a climb to the limit is a warning."
    return figure("Length of responses", caption, data, axis("tokens", least=0), keys=["length/mean", "length/max"])


def _entropy(steps: Sequence[Record]) -> Figure | None:
    entropies = curve(steps, "entropy/mean")
    data = [] if entropies is None else line_with_band(entropies, "entropy", GREEN)
    caption = "Mean over tokens. Near 0 exploration is over; rising late the policy dissolves."
    return figure("Entropy", caption, data, axis("nats", least=0), keys=["entropy/mean"])


def _clipping(steps: Sequence[Record]) -> Figure | None:
    key = "clip/sequences" if any(number(record, "clip/sequences") is not None for record in steps) else "clip/tokens"
    data = _by_update(steps, key)
    unit = "responses" if key == "clip/sequences" else "tokens"
    caption = f"Share of {unit} that the trust region left without a gradient, by update within the step; moving averages."
    return figure(f"Clipped {unit}", caption, data, shares(f"share of {unit}", whole=False), keys=[key])


def _clip_fractions(steps: Sequence[Record]) -> Figure | None:
    """Clip fractions of tokens and responses on one logarithmic axis, where 15 % and 0.1 % can both be read."""
    series = (("clip/tokens", "tokens", AMBER), ("clip/sequences", "responses", BLUE))
    data = [
        line(fractions.steps, fractions.average, name, colour)
        for key, name, colour in series
        if (fractions := curve(steps, key)) is not None and any(fractions.average)
    ]
    caption = "Clip fraction over all updates of a step, moving averages; a step that clips nothing has no point."
    keys = [key for key, _, _ in series]
    return figure("Clip fraction, logarithmic axis", caption, data, logarithmic("share"), keys=keys)


def _clip_band(steps: Sequence[Record]) -> Figure | None:
    """The bounds of an adaptive clip band over steps."""
    if not any("clip/beyond_positive" in step for step in steps):  # measured only where a band adapts
        return None
    noise = next((key for step in steps for key in step if key.startswith("state/") and key.endswith(".noise")), "")
    series = (
        ("clip/band_high", "upper bound", BLUE),
        ("clip/band_low", "lower bound", VIOLET),
        (noise, "noise floor", GREY),
    )
    bounds = [(curve(steps, key), name, colour) for key, name, colour in series if key]
    data = [
        line(each.steps, each.values, name, colour)
        for each, name, colour in bounds
        if each is not None and min(each.values) > 0
    ]
    caption = "Distance of the bounds from a ratio of 1, moved so that the target share of responses is clipped."
    return figure("Clip band", caption, data, logarithmic("|ratio - 1|"), keys=[key for key, _, _ in series if key])


def _by_update(steps: Sequence[Record], key: str) -> list[Trace]:
    """Return a line for each update within the step, or one line if updates are not recorded separately."""
    pattern = re.compile(re.escape(key) + r"@(\d+)")
    indices = {int(match.group(1)) for record in steps for name in record if (match := pattern.fullmatch(name))}
    data = [
        trace
        for index in sorted(indices)
        for trace in average_line(steps, f"{key}@{index}", f"update {index + 1}", UPDATES[index % 8])
    ]
    return data or average_line(steps, key, "all updates", BLUE)


def _experts(steps: Sequence[Record]) -> Figure | None:
    """Share of experts that changed, for a mixture of experts."""
    if all(number(record, "router/flip_mean") is None for record in steps):
        return None
    data = _by_update(steps, "router/flip_mean") + average_line(
        steps, "router/mismatch_flip_mean", "engine and trainer", GREY
    )
    caption = "Share of the active experts that differ from those of the old policy, by update within the step."
    return figure("Experts that changed", caption, data, shares("share of experts", whole=False), keys=["router/flip_mean"])


def _sampler(steps: Sequence[Record]) -> Figure | None:
    """How far the sampler is from the policy, and how old its weights were, where responses may be older than the policy."""
    if all(number(record, "lag/mean") is None for record in steps):
        return None
    ages = sorted({key for record in steps for key in record if re.fullmatch(r"mismatch/lag_\d+/k3", key)})
    data = average_line(steps, "mismatch/k3", "all responses", BLUE)
    for place, key in enumerate(ages):
        age = key.removeprefix("mismatch/lag_").removesuffix("/k3")
        data += average_line(steps, key, f"{age} versions old", UPDATES[(place + 1) % 8])
    servers = sorted({key for record in steps for key in record if re.fullmatch(r"mismatch/server/.+/k3", key)})
    for place, key in enumerate(servers):
        name = key.removeprefix("mismatch/server/").removesuffix("/k3")
        data += average_line(steps, key, f"server {name}", UPDATES[(place + 3) % 8])
    lags = [value for record in steps if (value := number(record, "lag/max")) is not None]
    caption = f"KL of sampler against trainer (mismatch/k3); the oldest token was {max(lags):g} versions old (lag/max)."
    return figure("Sampler against trainer", caption, data, logarithmic("KL"), keys=["mismatch/k3", "lag/mean", "lag/max"])


def _ratios(steps: Sequence[Record]) -> Figure | None:
    measured = []
    for record in steps:
        histograms = record.get("histograms")
        bins = Bins.read(histograms.get("ratio/sequence_log")) if isinstance(histograms, dict) else None
        if bins is not None:
            measured.append((record, bins))
    if not measured:
        return None
    ends = [measured[0], measured[-1]] if len(measured) > 1 else measured
    edges, filled = rebin([bins for _, bins in ends], 48)
    width = edges[1] - edges[0]
    data: list[Trace] = [
        {
            "type": "bar",
            "name": f"step {record.get('step')}",
            "x": [round_six(edge + width / 2) for edge in edges[:-1]],
            "y": share,
            "width": width,
            "marker": {"color": colour, "opacity": 0.6, "line": {"width": 0}},
            "hovertemplate": "%{x:.2e}: %{y:.1%}<extra>%{fullData.name}</extra>",
        }
        for (record, _), share, colour in zip(ends, filled, (GREY, BLUE), strict=False)
    ]
    layout = shares("share of responses", whole=False)
    layout |= {"barmode": "overlay", "hovermode": "closest", "shapes": band_edges(ends[-1][0], "x")}
    layout["xaxis"] = {"title": {"text": "log s (mean log-ratio of a response)"}, "tickformat": ".3~g", "nticks": 7}
    if len(data) == 1:
        data[0]["marker"]["color"] = BLUE
    caption = "How far responses moved within a step, first and last measured. Dashed: the clip band."
    return figure("Ratios of responses", caption, data, layout, keys=["ratio/sequence_log"])


def _gradient(steps: Sequence[Record]) -> Figure | None:
    norms = curve(steps, "gradient/norm")
    data = [] if norms is None else line_with_band(norms, "gradient norm", AMBER)
    layout = axis("norm", least=0)
    if norms is not None and min(norms.values) > 0 and max(norms.values) > 30 * min(norms.values):
        layout = logarithmic("norm")
    caption = "Before clipping. Spikes that grow come before a collapse."
    return figure("Gradient norm", caption, data, layout, keys=["gradient/norm"])


def _groups(steps: Sequence[Record]) -> Figure | None:
    series = (
        ("groups/zero_variance", "all rewards equal", GREY),
        ("groups/all_right", "all right", BLUE),
        ("groups/all_wrong", "all wrong", AMBER),
        ("length/truncated", "responses cut at the limit", VIOLET),
        ("rollouts/unscorable", "rollouts not scored", RED),
    )
    data = [trace for key, name, colour in series for trace in average_line(steps, key, name, colour)]
    caption = "A group whose rewards are equal teaches nothing: the problems are too easy or too hard. Moving averages."
    return figure("Groups that teach nothing", caption, data, shares("share"), keys=["groups/zero_variance"])


def _times(steps: Sequence[Record]) -> Figure | None:
    phases = (("rollouts", BLUE), ("anchor", VIOLET), ("update", AMBER))
    whole = [record for record in steps if number(record, "time/step_seconds") is not None]
    at, total = points(whole, "time/step_seconds")
    data: list[Trace] = []
    rest = list(total)
    for name, colour in phases:
        seconds = [number(record, f"time/{name}_seconds") or 0.0 for record in whole]
        if any(seconds):
            rest = [left - spent for left, spent in zip(rest, seconds, strict=True)]
            data.append(_bars(at, seconds, name, colour))
    if any(left > 0 for left in rest):
        data.append(_bars(at, [max(0.0, left) for left in rest], "other", GREY))
    layout = axis("seconds", least=0) | {"barmode": "stack", "bargap": 0}
    caption = "Where the time goes. Other: evaluation, checkpoints, bookkeeping."
    return figure("Time of a step", caption, data, layout, keys=["time/step_seconds"])


def _bars(at: list[float], seconds: list[float], name: str, colour: str) -> Trace:
    x, y = chunks(at, seconds, 120)
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour, "line": {"width": 0}}}


def _speed(steps: Sequence[Record]) -> Figure | None:
    speeds = curve(steps, "tokens/per_second")
    data = [] if speeds is None else line_with_band(speeds, "tokens/s", BLUE)
    caption = "Response tokens a second, over the whole step."
    return figure("Speed", caption, data, axis("tokens/s", least=0), keys=["tokens/per_second"])


def _rate(steps: Sequence[Record]) -> Figure | None:
    rates = curve(steps, "optimizer/lr")
    if rates is None or len(set(rates.values)) < 2:
        return None  # a constant is in the config
    layout = {"yaxis": {"title": {"text": "learning rate"}, "tickformat": ".2~e", "rangemode": "tozero"}}
    data = [line(rates.steps, rates.values, "lr", GREY)]
    return figure("Learning rate", "As the schedule set it.", data, layout, keys=["optimizer/lr"])


def _warm_up(records: Sequence[Record]) -> Figure | None:
    losses = curve(records, "loss")
    data = [] if losses is None else line_with_band(losses, "loss", GREY)
    return figure("Warm-up", "Loss of the supervised stage before training.", data, axis("loss"), keys=["loss"])


def _component_name(key: str) -> str:
    """Return the part of a key after its topic, escaped: Plotly reads tags in names."""
    return html.escape(legible(key.partition("/")[2], one_line=True))
