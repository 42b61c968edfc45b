"""`legato lab walkthrough`: one response through GRPO and GSPO token by token, from worked examples or from a run."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from legato.api import advantages, algorithm, loss
from legato.diagnostics.equivalence import likelihoods
from legato.diagnostics.statistics.clipping import product_range
from legato.errors import InputError
from legato.lab.examples import OUTLIERS, REWARDS, Rows, group, outliers
from legato.lab.recorder import ObservedUpdate, Say, facts
from legato.lab.replay import ReplayedStep, replay
from legato.lab.strip import Walk, strips, walk_tokens
from legato.pages.experiment import Account, Check, Sheet
from legato.pages.legible import legible
from legato.pages.traces import AMBER, BLUE, GREY, RED, Figure, figure, line
from legato.training.details import pieces

PAIR = ("grpo", "gspo")
LOW, HIGH = 3e-4, 4e-4


def examples() -> Account:
    """Return the report of the worked examples: two outliers, the group of four, the range of products."""
    long, four = outliers(), group()
    walks = {rows.title: [walk for name in PAIR for walk in walk_tokens(rows, name)] for rows in (long, four)}
    token, sequence = walk_tokens(long, "grpo"), walk_tokens(long, "gspo")
    wide = walk_tokens(long, algorithm("grpo", {"objective.trust.clip.high": 0.27}))[0]
    s = math.exp(sequence[0].log_s)
    enough = inside_from(OUTLIERS, LOW, HIGH)
    up, down = (next(t for t in token[0].tokens if t.word == f"w={ratio:g}") for ratio in OUTLIERS)
    sentences = [
        f"Two tokens at {OUTLIERS[0]:g} and {OUTLIERS[1]:g} among 512 give s = {s:.6f}: outside the band"
        f" [{1 - LOW:g}, {1 + HIGH:g}], on its low side. With A = +1 it is not clipped all the same, since the clip binds"
        " where the advantage pushes; with A = -1 the whole response is.",
        f"Only from {enough} tokens on would such a pair leave s inside the band.",
        f"Under GRPO with A = +1 the token at {OUTLIERS[0]:g} has no gradient at all (also at 0.2/0.27: weight"
        f" {next(t for t in wide.tokens if t.word == up.word).weight:g}); the one at {OUTLIERS[1]:g} keeps the weight"
        f" {down.weight:g}. GSPO gives all 512 the weight {sequence[0].tokens[0].weight:.6f}.",
        "The band holds the geometric mean. The product over tokens may go as far as (1 + high)^L.",
        "Advantages of +1 and -1 for rewards 1, 0, 1, 0 are population z-scores; with the sample deviation, as libraries"
        f" take it, they are +-{_with_sample_deviation():.3f}.",
    ]
    body = "".join(
        f"<section><h2>{html.escape(title)}</h2>{strips(walk_list)}</section>" for title, walk_list in walks.items()
    )
    return Account(
        name="walkthrough",
        title="One response through GRPO and GSPO",
        about="The same responses under both, token by token: the ratio of each token, what is clipped, and the coefficient"
        " with which its log-prob is pushed. Weight: the coefficient beside A / (N L), that of a token that has not moved.",
        facts={"examples": "two outliers, a group of four, product ranges", "bands": "grpo 0.2/0.2, gspo 3e-4/4e-4"},
        sentences=sentences,
        checks=_example_checks(s, enough, token, sequence, four),
        sheets=[_group_sheet(four), _strip_sheet(walks[four.title], "group"), _products()],
        figures=[*_figures(long, "two outliers", 0), *_figures(four, "first of the group", 0)],
        extra=body,
    )


def _with_sample_deviation() -> float:
    """The advantage of the first of the four."""
    one = torch.zeros(4, dtype=torch.int64)
    result = advantages(algorithm("gspo", {"advantage.ddof": 1}), rewards=torch.tensor(REWARDS), group=one)
    return float(result.advantages[0])


def inside_from(ratios: Sequence[float], low: float, high: float) -> int:
    """Return the fewest tokens at which a response is inside the band if only these tokens moved."""
    total = math.fsum(map(math.log, ratios))
    bound = math.log1p(-low) if total < 0 else math.log1p(high)
    return math.floor(total / bound) + 1 if total else 1


def _example_checks(s: float, enough: int, token: Sequence[Walk], sequence: Sequence[Walk], four: Rows) -> list[Check]:
    values = likelihoods(four.new, four.old, four.mask)
    printed = (1.000250031253, 0.895834135297, 1.105170918076, 1.268709192825)
    outcome = loss("gspo", logprobs=four.new, old_logprobs=four.old, advantages=four.advantages, mask=four.mask)
    moved = {t.word: t for t in token[0].tokens}
    source = "worked by hand"
    return [
        Check(what="s of the outlier example", expected=0.999464134163, measured=s, tolerance=1e-12, source=source),
        Check(what="outside the band", expected="yes", measured="yes" if sequence[0].tokens[0].outside else "no"),
        Check(what="clipped with A = +1, tokens", expected=0, measured=sequence[0].clipped, tolerance=0),
        Check(what="clipped with A = -1, tokens", expected=512, measured=sequence[1].clipped, tolerance=0),
        Check(what="tokens from which s is inside", expected=915, measured=enough, tolerance=0, source=source),
        Check(what="GRPO weight of the 1.9 token, A = +1", expected=0.0, measured=moved["w=1.9"].weight, tolerance=0),
        Check(what="GRPO weight of the 0.4 token, A = +1", expected=0.4, measured=moved["w=0.4"].weight, tolerance=1e-12),
        *(
            Check(what=f"s of response {row + 1} of four", expected=value, measured=float(values.s[row]), tolerance=1e-11)
            for row, value in enumerate(printed)
        ),
        Check(what="GSPO loss of the group", expected=0.0669397903931, measured=float(outcome.loss), tolerance=1e-12),
        Check(what="GSPO coefficient of response 1", expected=0.0625156269533,
              measured=float(outcome.coefficients[0, 0]), tolerance=1e-12),
        Check(what="GSPO coefficient of response 4", expected=-0.0634354596412,
              measured=float(outcome.coefficients[3, 0]), tolerance=1e-12),
        Check(what="0.8^100, as log10", expected=math.log10(2.0370359763e-10), measured=product_range(0.2, 0.2, 100)[0],
              tolerance=1e-9),
        Check(what="1.2^100, as log10", expected=math.log10(8.2817974522e7), measured=product_range(0.2, 0.2, 100)[1],
              tolerance=1e-9),
    ]  # fmt: skip


def _products() -> Sheet:
    rows = []
    for name, low, high in (("grpo 0.2/0.2", 0.2, 0.2), ("gspo 3e-4/4e-4", LOW, HIGH)):
        for length in (10, 100, 1000, 8192, 32768):
            least, most = product_range(low, high, length)
            rows.append((name, length, _power(least), _power(most)))
    return Sheet(
        name="products",
        title="What a band allows the product over tokens",
        note="Were every token of a response at the edge of its band; for gspo, s at the edge of its own.",
        headings=("band", "tokens", "least product", "largest product"),
        rows=tuple(rows),
    )


def _power(exponent: float) -> str:
    """10^x as a short text, for any x."""
    if abs(exponent) < 4:
        return f"{10**exponent:.4g}"
    whole = math.floor(exponent)
    return f"{10 ** (exponent - whole):.2f}e{whole:+d}"


def _group_sheet(rows: Rows, marked: int | None = None) -> Sheet:
    values = likelihoods(rows.new, rows.old, rows.mask)
    by_name = {name: walk_tokens(rows, name) for name in PAIR}
    table = []
    for row in range(len(rows.new)):
        token, sequence = (by_name[name][row] for name in PAIR)
        table.append((
            f"{row + 1}{' (this one)' if row == marked else ''}", len(token.tokens), float(rows.advantages[row]),
            float(values.s[row]), float(values.entropy_old[row].exp()), float(values.entropy_new[row].exp()),
            float(rows.log_ratios[row].abs().max()), token.clipped, sequence.clipped,
            sequence.tokens[0].outside if sequence.tokens else False,
        ))  # fmt: skip
    return Sheet(
        name="group-responses",
        title="The responses of the group",
        note="Clipped: tokens without a gradient. Outside: s out of the band, whatever the sign of A.",
        headings=("response", "tokens", "A", "s", "PPL old", "PPL new", "max |lw|", "clipped by grpo", "clipped by gspo",
                  "outside"),
        rows=tuple(table),
        digits=7,
    )  # fmt: skip


def _strip_sheet(walks: Sequence[Walk], name: str) -> Sheet:
    rows = tuple(
        (f"{walk.algorithm}, A {walk.advantage:+.3g}", place + 1, token.word, token.ratio, token.used, token.outside,
         token.clipped, token.weight, token.coefficient)
        for walk in walks
        for place, token in enumerate(walk.tokens)
    )  # fmt: skip
    return Sheet(
        name=f"tokens-{name}",
        title="Token by token",
        note="Ratio: of the token. Used: what the algorithm weighs with.",
        headings=("response", "token", "text", "ratio", "used", "outside", "clipped", "weight", "coefficient"),
        rows=rows,
        digits=6,
    )


def _figures(rows: Rows, name: str, row: int) -> list[Figure]:
    token, sequence = (walk_tokens(rows, each)[row] for each in PAIR)
    x = [float(place + 1) for place in range(len(token.tokens))]
    ratios: dict[str, Any] = {
        "type": "scatter", "mode": "markers", "name": "token ratio", "x": x, "y": [t.ratio for t in token.tokens],
        "text": [html.escape(legible(t.word, one_line=True)) for t in token.tokens],
        "marker": {"color": [RED if t.clipped else BLUE for t in token.tokens], "size": 7},
    }  # fmt: skip
    edges = [
        {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y, "line": {"color": GREY, "dash": "dash"}}
        for y in (0.8, 1.2)
    ]
    s = math.exp(sequence.log_s)
    layout = {"xaxis": {"title": {"text": "token"}}, "yaxis": {"title": {"text": "new / old"}}, "shapes": edges,
              "hovermode": "closest"}  # fmt: skip
    ends = [x[0], x[-1]]
    first = figure(
        f"Ratios, {name}",
        f"A point a token; red: GRPO clips it. Dashed: GRPO's band. The line is s = {s:.6f}, which GSPO gives to all.",
        [ratios, line(ends, [s, s], "s of the response", AMBER)],
        layout,
    )
    marked = {"mode": "lines+markers"} if len(x) < 80 else {}
    weights = [
        line(x, [t.weight for t in walk.tokens], walk.algorithm, colour, width=1.8) | marked
        for walk, colour in ((token, BLUE), (sequence, AMBER))
    ]
    second = figure(
        f"Weights, {name}",
        "The coefficient of each token beside that of one that has not moved; 0: clipped.",
        weights,
        {"xaxis": {"title": {"text": "token"}}, "yaxis": {"title": {"text": "weight"}, "rangemode": "tozero"}},
    )
    return [each for each in (first, second) if each is not None]


def walk_run(path: Path, *, step: int | None, rollout: int | None, words: Sequence[str], say: Say) -> Account:
    """Return the report of one rollout of a run, as the run's trainer saw it in its update."""
    again = replay(path, step, words, say)
    row = _choose_row(again, rollout)
    update = next((each for each in again.observed if row in each.rows.tolist()), None)
    if update is None:
        raise InputError(f"rollout {row} of step {again.step} has no token that an update saw; another --rollout has")
    rows, here = _rows(again, update, row)
    record = again.rollouts()[row]
    walks = [walk_tokens(rows, name)[here] for name in PAIR]
    token, sequence = walks
    outcome = (
        "clipped as a whole" if sequence.clipped else "outside the band and not clipped" if sequence.tokens[0].outside
        else "inside the band"
    )  # fmt: skip
    prompt = record.problem.prompt if isinstance(record.problem.prompt, str) else str(record.problem.prompt)
    sentences = [
        f"Rollout {row} of step {again.step}, in update {update.index + 1} of the step: {len(token.tokens)} tokens,"
        f" A = {token.advantage:+.4f}, s = {math.exp(token.log_s):.6f}.",
        f"GSPO: {outcome}. GRPO: {token.clipped} of {len(token.tokens)} tokens clipped; the largest |lw| is"
        f" {float(rows.log_ratios[here].abs().max()):.4g}.",
        f"{again.note}.",
        *(["In the first update of a step every ratio is 1: nothing has moved yet."] if update.index == 0 else []),
    ]
    page = f"<section><h2>The strip</h2><pre>{html.escape(legible(prompt))}</pre>{strips(walks)}</section>"
    return Account(
        name="walkthrough",
        title=f"Rollout {row} of step {again.step} through GRPO and GSPO",
        about="The response and its group as the trainer saw them in their update, under both algorithms as published."
        " Weight: the coefficient beside A / (N L), that of a token that has not moved.",
        facts={"run": path.name, **facts(again.recorder)},
        sentences=sentences,
        sheets=[_group_sheet(rows, here), _strip_sheet(walks, "rollout")],
        figures=_figures(rows, f"rollout {row}", here),
        data={"prompt": prompt, "text": record.text, "step": again.step, "rollout": row, "update": update.index},
        extra=page,
    )


def _choose_row(again: ReplayedStep, rollout: int | None) -> int:
    """Return the requested row; by default the row with an advantage whose tokens moved the furthest."""
    if rollout is not None:
        count = len(again.rollouts())
        if not 0 <= rollout < count:
            raise InputError(f"expected --rollout from 0 to {count - 1}, got {rollout} (step {again.step})")
        return rollout
    best, at = -1.0, int(again.observed[0].rows[0])
    for update in again.observed:
        size = torch.where(update.advantages != 0, update.log_ratios.abs().amax(1), -1.0)
        if float(size.max()) > best:
            best, at = float(size.max()), int(update.rows[int(size.argmax())])
    return at


def _rows(again: ReplayedStep, update: ObservedUpdate, row: int) -> tuple[Rows, int]:
    """Return the group of a row as its update saw it, and the position of the row in the group."""
    groups, rollouts = again.group_of(), again.rollouts()
    member = (groups[update.rows] == groups[row]).nonzero().squeeze(1)
    words = []
    for each in update.rows[member].tolist():
        texts = pieces(rollouts[each].tokens.tolist(), again.recorder.policy.tokenizer)
        words.append(tuple(text for text, own in zip(texts, rollouts[each].mask.tolist(), strict=True) if own))
    members = Rows(
        title="the group",
        old=update.old[member],
        new=update.new[member],
        mask=update.mask[member],
        advantages=update.advantages[member],
        words=tuple(words),
    )
    return members, update.rows[member].tolist().index(row)
