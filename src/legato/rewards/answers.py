r"""Finds the final answer in a response, and compares it with the answer of the problem as text and as an exact number.

    find_answer(r"... so it is $\boxed{ \dfrac12 }$.")     ->  r"\dfrac12"
    normal_form(r"\dfrac12")                                 ->  r"\frac{1}{2}"
    exact_value(r"\frac{1}{2}")                              ->  Fraction(1, 2)

What stands before the last </think> is no answer. An answer is what the last <answer>...</answer> holds, or the last
\boxed{...}; else what follows the last "####"; else what follows the last "answer is" or
"Answer:"; else the last line, if it is nothing but a number or a formula. `rewards/math.py` asks Math-Verify about answers
that neither text nor number decides.
"""

import re
from decimal import Decimal
from fractions import Fraction

from legato.core.boxed import boxes

_PHRASE = re.compile(
    r"\banswer\b(?:\s+(?:to|of|for)\b[^.:=\n]{0,80}?)?\s*"
    r"(?:(?:is|would be|should be|must be|equals)\b\s*:?|[:=])\s*(\S[^\n]*)",
    re.IGNORECASE,
)
_BARE_LINE = re.compile(r"[-+]?[\d.,/]+%?|\$[^$]+\$|\\\(.+\\\)|\\\[.+\\\]|[A-Za-z]\s*=\s*[-+]?[\d.,/]+")
_JOINED = re.compile(r"[\s$.;]*(?:,|\band\b|\bor\b)[\s$.;]*(?:[A-Za-z](?:_\{?\w+\}?)?\s*=\s*)?")
"""What may stand between two boxes that hold one answer together."""


def final_part(text: str) -> str:
    """A response without the thinking before its answer."""
    return text.rpartition("</think>")[2]


def find_answer(text: str) -> str | None:
    """The final answer that a response states, as it is written; None if it states none."""
    text = final_part(text)
    tagged = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    if tagged and tagged[-1].strip():
        return _last_boxes(tagged[-1]) or tagged[-1].strip()
    boxed = _last_boxes(text)
    if boxed is not None:
        return boxed
    _, marker, after = text.rpartition("####")
    if marker and after.strip():
        return after.strip().splitlines()[0].strip()
    phrases = _PHRASE.findall(text)
    if phrases:
        return _first_sentence(phrases[-1])
    lines = text.strip().splitlines()
    last = lines[-1].strip().strip("*").strip() if lines else ""
    return last if _BARE_LINE.fullmatch(last.rstrip(".")) else None


def last_number(text: str) -> str | None:
    """The last number in a text."""
    numbers = re.findall(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?", final_part(text))
    return numbers[-1] if numbers else None


def _last_boxes(text: str) -> str | None:
    """The contents of the last box, with those of the boxes right before it where a comma, "and" or "or" joins them."""
    listed = boxes(text)
    if not listed:
        return None
    answers, (start, _, content) = [], listed[-1]
    answers.append(content)
    for before in reversed(listed[:-1]):
        if not _JOINED.fullmatch(text[before[1] : start]):
            break
        start, content = before[0], before[2]
        if content not in answers:
            answers.insert(0, content)
    return ", ".join(answers)


def _first_sentence(text: str) -> str:
    """A text up to the full stop that ends its first sentence; the point of a decimal number ends none."""
    sentence = re.split(r"(?<=[^\s.])\.(?:\s|$)|(?<=[^\s.])\.\*\*", text.strip())[0]
    return re.split(r",\s+(?=[A-Za-z]{2,})", sentence)[0].strip()


_SPACES = re.compile(r"\\[,;: ]|\\q?quad\b|~|\\displaystyle\b|\\left\b|\\right\b|\\(?:big|Big|bigg|Bigg)[lr]?\b")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(\{[^{}]*\}|\d|[a-z])\s*(\{[^{}]*\}|\d|[a-z])")
_NAME = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*=\s*(?=[^=])")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_UNIT = re.compile(r"(?<=[\d}])\s*(?:[A-Za-z][A-Za-z ./-]*?(?:\^\{?-?\d\}?|[²³])?|\\[A-Za-z]+\^\{?\d\}?)\s*$")
"""Words after a number: "5 cm", "18 dollars a day", "3 square units"."""


_CHOICE = re.compile(
    r"^\$?(?:\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*\(([A-E])\)[\s:.]*\}|\(([A-E])\))[\s:.~]*(?=-?\d|\\[dt]?frac|\\sqrt)"
)
"""The letter of a choice before its value: "(B) 27"."""
_ARGUMENT = re.compile(
    r"\\(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp)\s+([A-Za-z])(?![A-Za-z])"
)


def bracket_arguments(text: str) -> str:
    r"""A formula with \sin t written as \sin(t). Math-Verify takes a last t, m or s for a unit and drops it."""
    return _ARGUMENT.sub(r"\\\1(\2)", text)


def normal_form(answer: str) -> str:
    r"""An answer without what does not change its meaning: spaces, dollars, \left, units, thousands commas, a last dot."""
    text = (
        bracket_arguments(_CHOICE.sub("", answer.strip()))
        .replace("\N{MINUS SIGN}", "-")
        .replace("\N{EN DASH}", "-")
        .replace("\N{MULTIPLICATION SIGN}", "*")
    )
    text = text.replace("**", "").replace(r"\$", "").replace("$", "").replace("€", "").replace("£", "")
    for mark in (r"\(", r"\)", r"\[", r"\]"):
        text = text.replace(mark, "")
    text = text.replace("{,}", ",").replace(r"\!", "")
    text = re.sub(r"(?<=\d)\\,(?=\d{3})", "", text)
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree\b|\bdegrees?\b", "", text)
    text = re.sub(r"\\?%|\bper ?cent\b", "", text)
    for _ in range(3):  # fractions may hold fractions
        text = _FRACTION.sub(lambda match: rf"\frac{{{match[1].strip('{}')}}}{{{match[2].strip('{}')}}}", text)
    words = _WORDS.sub(lambda match: match[1], text)
    # A text after a number is its unit; any other text is the answer itself, or a part of it.
    without_text = re.sub(r"(?:\^\{?\d\}?|[/.]|\s)+$", "", _WORDS.sub(" ", text).strip()) if words != text else text
    text = without_text if re.search(r"[\d}]\s*$", without_text) and not words.strip().startswith("(") else words
    text = text.strip().rstrip(".,;:。 ").strip()
    text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    text = _NAME.sub("", text, count=1) if text.count("=") == 1 else text
    if "\\" not in text.split("}")[-1] and "," not in text:
        text = _UNIT.sub("", text)
    return re.sub(r"\s+", "", text)


_DECIMAL = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"({_DECIMAL})(?:/(\d+(?:\.\d+)?))?")
_SCIENTIFIC = re.compile(rf"({_DECIMAL})(?:e|E|(?:\\times|\\cdot|\*|x)10\^\{{?)([-+]?\d{{1,3}})\}}?")
_POWER_OF_TEN = re.compile(r"([-+]?)10\^\{?([-+]?\d{1,3})\}?")
_TEX_FRACTION = re.compile(rf"([-+]?)\\frac\{{({_DECIMAL})\}}\{{({_DECIMAL})\}}")
_LONGEST = 200
"""In characters. Longer numbers are attacks on the parser."""


def exact_value(text: str) -> Fraction | None:
    """The exact value of a number in normal form: 1234, -0.5, 3/4, \\frac{3}{4}, 1.5\\times10^{3}; None if it is none."""
    if len(text) > _LONGEST:
        return None
    if (number := _NUMBER.fullmatch(text)) is not None:
        bottom = Fraction(number[2] or 1)
        return Fraction(number[1]) / bottom if bottom else None
    if (number := _SCIENTIFIC.fullmatch(text)) is not None:
        return Fraction(Decimal(number[1])) * Fraction(10) ** int(number[2])
    if (number := _POWER_OF_TEN.fullmatch(text)) is not None:
        return (-1 if number[1] == "-" else 1) * Fraction(10) ** int(number[2])
    if (number := _TEX_FRACTION.fullmatch(text)) is not None:
        bottom = Fraction(number[3])
        return None if not bottom else (-1 if number[1] == "-" else 1) * Fraction(number[2]) / bottom
    return None


def items(text: str) -> list[str]:
    """The members of a list in normal form without brackets around it: "1,2", "1and2"; one member if it is no list."""
    members, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            members.append(text[start:place])
            start = place + 1
    members.append(text[start:])
    return [piece for member in members for piece in re.split(r"(?<=[\d)}])(?:and|or)(?=[-\d(\\A-Za-z])", member) if piece]
