"""One response under an algorithm, token by token: ratios, clipping, coefficients; and the HTML strip that shows them."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from legato.algorithms.algorithm import Algorithm
from legato.api import algorithm, loss
from legato.lab.examples import Rows
from legato.pages.legible import piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token under one algorithm."""

    word: str
    ratio: float
    """new / old of the token itself."""
    used: float
    """The ratio the algorithm weighs with: the token's own, or that of the response."""
    outside: bool
    """Out of the band, whatever the sign of A."""
    clipped: bool
    """Without a gradient."""
    coefficient: float
    """Minus dLoss / dlogprob."""
    weight: float
    """The coefficient relative to that of an unmoved token, A / (N L): the effect of the ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One response under one algorithm."""

    algorithm: str
    advantage: float
    log_s: float
    tokens: tuple[Token, ...]

    @property
    def clipped(self) -> int:
        return sum(token.clipped for token in self.tokens)


def walk_tokens(rows: Rows, name: str | Algorithm) -> list[Walk]:
    """Compute ratios, clipping and coefficients of each token of each response under a clipping algorithm."""
    value = algorithm(name)
    outcome = loss(
        value,
        logprobs=rows.new,
        old_logprobs=rows.old,
        advantages=rows.advantages,
        mask=rows.mask,
        group=torch.zeros(len(rows.new), dtype=torch.int64),
    )
    used = outcome.trace.log_ratio.expand(rows.new.shape)
    low, high = (torch.as_tensor(b).expand(rows.new.shape) for b in outcome.trace.band or (-math.inf, math.inf))
    ratios, count = rows.log_ratios.exp(), len(rows.new)
    walks = []
    for row, advantage in enumerate(rows.advantages.tolist()):
        places = rows.mask[row].nonzero().squeeze(1).tolist()
        plain = advantage / (count * len(places)) if places else 0.0
        tokens = tuple(
            Token(
                word=rows.words[row][number],
                ratio=float(ratios[row, place]),
                used=float(used[row, place].exp()),
                outside=not float(low[row, place]) <= float(used[row, place]) <= float(high[row, place]),
                clipped=advantage != 0 and float(outcome.coefficients[row, place]) == 0,
                coefficient=float(outcome.coefficients[row, place]),
                weight=float(outcome.coefficients[row, place]) / plain if plain else 0.0,
            )
            for number, place in enumerate(places)
        )
        log_s = float(rows.log_ratios[row].sum() / max(1, len(places)))
        walks.append(Walk(algorithm=value.name, advantage=advantage, log_s=log_s, tokens=tokens))
    return walks


def strips(walks: Sequence[Walk]) -> str:
    """Return token strips as HTML: green pushed up, red pushed down, stronger with the weight; struck through: clipped."""
    lines = []
    for walk in walks:
        cells = []
        for (_, *_), run in groupby(walk.tokens, key=lambda t: (t.word, t.ratio, t.weight)):
            alike = list(run)
            cells.append(_cell(alike[0], len(alike), walk.advantage))
        head = f"{walk.algorithm}, A = {walk.advantage:+.3g}, s = {math.exp(walk.log_s):.6f}"
        lines.append(f'<p class="dim">{html.escape(head)}</p><p style="line-height: 2.1">{"".join(cells)}</p>')
    legend = "Green: made likelier, red: made less likely, stronger with the weight; struck through: clipped; grey: A = 0."
    return f'<div class="card">{"".join(lines)}<p class="dim">{legend} Hover for the numbers.</p></div>'


def _cell(token: Token, count: int, advantage: float) -> str:
    hue = "16,185,129" if advantage > 0 else "239,68,68"
    strength = min(0.85, 0.12 + 0.3 * abs(token.weight)) if token.weight else 0.0
    style = f"background: rgba({hue},{strength:.2f})" if strength else "background: var(--well)"
    style += "; text-decoration: line-through" if token.clipped else ""
    hover = f"ratio {token.ratio:.4g}, weight {token.weight:.4g}, coefficient {token.coefficient:.3g}"
    hover += ", clipped" if token.clipped else ", outside the band" if token.outside else ""
    word = piece(token.word)
    shown = html.escape(word if count == 1 else f"{word} x {count}").replace(" ", "&nbsp;")
    style += "; border-radius: 5px; padding: 3px 6px; margin: 2px"
    return f'<span title="{html.escape(hover)}" style="{style}">{shown}</span> '
