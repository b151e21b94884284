r"""Reads answers from text: exact numbers, and the final answer of a completion.

Numbers may be written as `1,234`, `1 234`, `$5`, `-3.50`, `−2`, `minus 2`, `3/4`, `\frac{3}{4}`, `2\frac12`, `2 1/2`,
`2½`, `72 apples`, `5 hundred thousand` or `1.5e3`; their values are exact. A percent sign is read as a unit, so `50%`
is 50, as GSM8K's reference answers mean it. Every search takes time linear in the text, for any text that a model
writes.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

MAX_CHARACTERS = 400
"""Longer numerals are not read; no reference answer has them, and an adversarial one could take seconds."""

MAX_EXPONENT = 400
"""Larger powers of ten are not read: the exact value of `1e999999999` would fill the memory."""

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Words after a number that multiply it."""

_MINUS_SIGNS = dict.fromkeys(map(ord, "−–—﹣-"), "-")
_NUMERAL = r"(?:\d{1,3}(?:,\d{3}){1,99}(?!\d)|\d+)(?:\.\d+)?|(?<!\b[Rr]s)\.\d+"  # `Rs.15` is 15
_THIN_SPACE = re.compile(r"(?<=\d)(?:,\\!\s?|\\[,!])(?=\d)")
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?:[ ~\u00a0\u2009\u202f]\d{3}){1,99}(?!\d|\s{0,4}/)")
_FRACTION_SIGNS = {
    ord(sign): " " + unicodedata.normalize("NFKC", sign).replace("\u2044", "/") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}

_SIGN = r"(?P<sign>[-+]\s*|(?<![\w-])(?ai:minus|negative)\s{1,4})?"
_SCALE_WORD = rf"(?ai:(?:{'|'.join(SCALES)})s?)"
_SCALE = (
    r"\$?[ \t~-]{0,4}(?:\\(?:text|mbox|mathrm)\{\s{0,4})?"
    rf"(?P<scale>{_SCALE_WORD}(?:[ \t~-]{{1,4}}{_SCALE_WORD})?)\b"
)

_NUMBER = re.compile(
    rf"{_SIGN}(?:\\?[$£€]\s*)?(?P<inner>[-+])?(?:(?:(?P<whole>\d+)\s*)?\\[dt]?frac\s*"
    rf"(?:\{{(?P<top>-?\d+)\}}|(?P<digit>\d))\s*(?:\{{(?P<bottom>\d+)\}}|(?P<below>\d))"
    rf"|(?P<mixed>\d+)\s+(?P<upper>\d+)/(?P<lower>\d+)(?!\d)"
    rf"|(?P<numeral>{_NUMERAL})(?:[eE](?P<exponent>[-+]?\d+)(?![\w.])|\s*/\s*(?P<divisor>\d+))?)"
    rf"(?:{_SCALE})?"
)


def first_number(text: str) -> Fraction | None:
    """Return the first number in `text`; None when there is none or it is too large."""
    match = _NUMBER.search(_plain_text(text))
    return _value(match) if match else None


def last_number(text: str) -> Fraction | None:
    """Return the last number in `text`; None when there is none or it is too large."""
    found = None
    for match in _NUMBER.finditer(_plain_text(text)):
        found = match
    return _value(found) if found else None


def _plain_text(text: str) -> str:
    r"""Replace all kinds of minus sign by `-`, signs such as `½` by fractions, and LaTeX's thousands (`1{,}000`,
    `1\,000`, `1,\!000`) and those with a space by plain ones.
    """
    text = text.translate(_MINUS_SIGNS).translate(_FRACTION_SIGNS).replace("{,}", ",")
    return _SPACED_THOUSANDS.sub(lambda number: re.sub(r"[\s~]", "", number[0]), _THIN_SPACE.sub("", text))


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_CHARACTERS:
        return None
    magnitude = _plain(match) if match["numeral"] else _mixed(match)
    if magnitude is None:
        return None
    negative = ((match["sign"] or "").strip() not in {"", "+"}) != (match["inner"] == "-")
    for word in re.findall("[a-z]+", (match["scale"] or "").lower()):
        magnitude *= SCALES[word.removesuffix("s")]
    return -magnitude if negative else magnitude


def _plain(match: re.Match[str]) -> Fraction | None:
    numeral = match["numeral"].replace(",", "")
    if match["divisor"]:
        return None if int(match["divisor"]) == 0 else Fraction(Decimal(numeral)) / int(match["divisor"])
    if match["exponent"] and abs(int(match["exponent"])) > MAX_EXPONENT:
        return None
    return Fraction(Decimal(numeral + (f"e{match['exponent']}" if match["exponent"] else "")))


def _mixed(match: re.Match[str]) -> Fraction | None:
    """Return the value of a fraction, with the whole number before it if there is one."""
    top = match["top"] or match["digit"] or match["upper"]
    bottom = match["bottom"] or match["below"] or match["lower"]
    whole = int(match["whole"] or match["mixed"] or 0)
    return None if int(bottom) == 0 else whole + Fraction(int(top), int(bottom))


THINKING_END = "</think>"
_BRACES = re.compile(r"\\(?P<box>f?boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\]+)|\\boxed([0-9])")
HASHES = "####"


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`; the whole text when there is none."""
    return text.rpartition(THINKING_END)[2]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the `\boxed{…}` that closes last, braces balanced; None when none closes.

    Of nested boxes the outer one closes last. `\fbox{…}`, in which some solutions of MATH have their answer, counts
    where there is no `\boxed{…}`, and `\boxed 5` without braces where there is neither.
    """
    open_braces: list[tuple[str, int]] = []
    by_box: dict[str, str] = {}
    for match in _BRACES.finditer(text):
        if match["box"] or match[0] == "{":
            open_braces.append((match["box"] or "", match.end()))
        elif match[0] == "}" and open_braces:
            box, start = open_braces.pop()
            if box:
                by_box[box.removeprefix("f")] = text[start : match.start()]
    found = by_box.get("boxed", by_box.get("box"))
    if found is not None:
        return found.strip()
    bare = _BARE_BOX.findall(text)
    return next(filter(None, bare[-1])) if bare else None


def after_hashes(text: str) -> str | None:
    """Return the line after the last `####`, the form of GSM8K's answers; None when there is none."""
    _, marker, rest = text.rpartition(HASHES)
    if not marker:
        return None
    lines = rest.strip().splitlines()
    return lines[0].strip() if lines else ""


def inside_tag(text: str, tag: str) -> str | None:
    """Return the content of the last `<tag>…</tag>`; without a closing tag, the rest of the text."""
    start = text.rfind(f"<{tag}>")
    if start < 0:
        return None
    return text[start + len(tag) + 2 :].partition(f"</{tag}>")[0].strip()


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a completion: inside `<answer>`, then `\boxed{…}`, then after `####`; else None."""
    text = after_thinking(text)
    answer = inside_tag(text, "answer")
    if answer is not None:
        text = answer
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    marked = after_hashes(text)
    return marked if marked is not None else answer


_PERCENT = re.compile(r"\\?%|\\text\{\s*percent\s*\}|\bpercent\b")


def without_percent(text: str, gold: str) -> str:
    """Return an answer without percent signs if the gold is a number above 1.

    GSM8K asks for a percentage and has it as 50, while math-verify compares 50% as 0.5.
    """
    number = first_number(final_answer(gold) or gold)
    return text if number is None or abs(number) <= 1 else _PERCENT.sub("", text)
