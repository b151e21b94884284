"""The program compares mathematics in its own process, because sympy can run without end or fill the memory.

It reads one JSON line per question from standard input, `{"gold", "answer", "cpu_seconds"}`, and answers with two
lines: if the gold could be read, then the verdict. A question that takes more CPU time than allowed kills the process
through a timer of the kernel, which also works inside C code. The program imports nothing of this project.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import unicodedata
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

MEMORY_LIMIT_BYTES = 2 << 30
DELIMITERS = ("\\boxed", "$", "\\(", "\\[")
RELATIVE_ERROR = 1e-3
ROUNDING_ERROR = 1e-12
ABOUT = 0.05
_POWER_OF_TEN = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,4})(?![\w.]*\w)")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = rf"(?:{'|'.join(_SCALES)})s?"
_SCALE_WORDS = rf"{_SCALE}(?:[ \t~-]{{1,4}}{_SCALE})?"
_SCALED = re.compile(
    r"(?<![\w./^])(?<!\^\{)(\d{1,20}|\d{1,3}(?:,\d{3}){1,9})(?:\.(\d{1,20}))?(\$?)[ \t~-]{0,4}"
    rf"(?:\\(?:text|mbox|mathrm)\{{\s{{0,4}}({_SCALE_WORDS})\s{{0,4}}\}}|({_SCALE_WORDS})\b)",
    re.IGNORECASE | re.ASCII,
)
_MINUS = re.compile(
    r"(^|\bis|[=:,(]|\\text\{)(\s{0,4})(?:(?:minus|negative)\s{1,4}|[−–—﹣-]\s{0,4}|-(?=\$))(\$?)(?=[\d.\\])",
    re.IGNORECASE | re.ASCII,
)
"""A minus in words, as a dash or before a formula, of which math-verify would read only the formula."""
_BASE = re.compile(r"(?<=[0-9A-Fa-f])_(?:\{\s*(\d+)\s*\}|(\d+))")
_ESCAPED_BRACE = re.compile(r"\\[{}]")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|,\\!\s?|\{,\}|~)(?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,^])\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3}){1,9}(?!\d|\s*/)", re.ASCII)
_FRACTION_SIGNS = {
    ord(sign): " " + unicodedata.normalize("NFKC", sign).replace("\u2044", "/") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_MIXED = re.compile(r"(?<![\w.,/^])(\d{1,20})\s{1,4}(\d{1,20})/(\d{1,20})(?!\w|\.\d)", re.ASCII)
_MIXED_PERCENT = re.compile(
    r"(?<![\w.,/^])(\d{1,20})\s{0,4}\\[dt]?frac\s?(?:\{(\d{1,20})\}\s?\{(\d{1,20})\}|(\d)(\d))(?=\s{0,4}\\?%)", re.ASCII
)
"""A mixed number in percent, of which math-verify would read only the fraction: 33⅓ % and 66⅓ % were the same."""
_SLASH_PERCENT = re.compile(r"(?<![\w.,/^])(\d{1,20})/(\d{1,20})(?=\s{0,4}\\?%)", re.ASCII)
"""A fraction in percent, whose percent sign math-verify would apply to the denominator alone."""
_GROWTH = re.compile(
    r"([\w)}]\s{0,4}[+-]\s{0,4})(\d{1,20}(?:\.\d{1,20})?)\s{0,4}\\?%"
    r"(?=\s{0,4}(?:\\right\s?)?[)\]]\s{0,4}\^\s?\{?\s?(?:[A-Za-z]|\d\d))",
    re.ASCII,
)
"""A rate in brackets with a power that math-verify does not expand, as in `(1+5\\%)^T`: it would transpose the percent
sign, and compares no such power of it. Others stay: decimals would make `x(1-20\\%)^2` unequal to `0.64x`."""
_REPEATING = re.compile(r"(?<![\w.])(\d{0,20})\.(\d{0,20})\\overline\s?\{(\d{1,20})\}", re.ASCII)
_BARE_NAME = re.compile(r"(?<![\\a-zA-Z])(?:(?:sin|cos|tan|ln|log|exp)(?=\s{0,4}\()|pi(?![a-zA-Z]))")
"""A function or π without its backslash, which math-verify would read as a product of variables."""
_UNIT = re.compile(
    r"(?<=\d)\s{0,4}(?:(?:mm|cm|dm|km|in|ft|yd|mi)\^(?:[23]|\{[23]\})"
    r"|(?:km|m|ft|mi)\s?/\s?(?:hr|h|min|sec|s)|(?<=\s)(?:in|mi|oz|yd|mL))\.?$"
)
"""A unit at the end that math-verify does not know: with a power or a slash, or one that it reads as a product."""
_RAISED_UNIT = re.compile(r"(?<=\d)\s{0,4}(?:[a-zA-Z]{1,3}[ ·]){0,2}(?:[cdkm]?m|in|ft|yd|mi|[a-zA-Z]{3,20})[²³]\.?$")
"""A unit whose power is a raised digit, at the end: `5 m²`, `5 kg m²`."""
_RAISED = re.compile(r"(?<=[\w)}\]])[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,20}")
"""A power in raised digits, of which math-verify would read only the base."""
_TOP = re.compile(r"\^\s?(?:\\top(?![a-zA-Z])|\{\s?\\top\s?\})")
_POWER_T = re.compile(
    r"((?<![_\d.^])\d{1,20}(?:\.\d{1,20})?|(?<![\\_])e|\\(?:int|sum|prod)(?:\\limits)?\s?_(?:\{[^{}]{1,40}\}|\w)"
    r"|(?<![_^])\{\d{1,20}(?:\.\d{1,20})?\}"
    r"|[(\[](?![^()]{0,80}\d\s+\d)(?:[-+*/.e\d{}\s]|\\(?:[dt]?frac|sqrt|cdot|times|right)(?![a-zA-Z])){1,80}[)\]])"
    r"\s?\^\s?(?:T|\{\s?T\s?\})",
    re.ASCII,
)
"""A number with the power T, also in braces or brackets, or a lower bound with the upper bound T: math-verify would
read `2^T` as 2, transposed. A row of numbers in brackets is transposed."""
_FACTOR = re.compile(
    r"(?:(?<![\w.^\\])\d{1,20}(?:\.\d{1,20})?|(?<![a-zA-Z_.^\\])\(-?\d{1,20}(?:\.\d{1,20})?\))"
    r"(?=\s{0,4}(?:\\left\s?)?\(\s?[-\d\\])",
    re.ASCII,
)
"""A number before a bracket, which math-verify would read as a mixed number: `2(3)` as 5."""
_WORDS = r"\\(?:text(?:bf|rm|it)?|mbox|math(?:rm|bf|it))\s{0,4}\{"
"""The beginning of a group of upright text."""
_WORDS_PART = re.compile(rf"{_WORDS}(?![\s,]*(?:and|or)\s*\}})[^{{}}]*\}}")
"""Such a group, unless it only joins two answers."""
_JOINT = re.compile(rf"(?<=[\d}}])(\s*{_WORDS}[^{{}}]*\}})(?=\s*(?:\d|\\[dt]?frac|[a-zA-Z]\s?=))")
"""A unit after which another quantity follows, as after `5\\text{ feet }` in feet and inches."""
_AND = re.compile(rf"({_WORDS}[^{{}}]*?)[\s,]+and\s*\}}")
"""The "and" at the end of such a unit, which math-verify would make a comma inside the group."""
_UNITS = re.compile(rf"(?:{_WORDS}[^{{}}]*\}}|\^(?:\d|\{{-?\d\}})|_\d|\\(?:cdot|times)(?![a-zA-Z])|\\[,;:! ]|[\s/*.])+")
"""All that may follow a number as its unit, in any form."""
_PERCENT = re.compile(rf"(?<=\d)\s*{_WORDS}\s*percent\s*\}}")
"""The word percent in upright text, in place of which the sign is written."""
_ROMAN = re.compile(r"(?<![_a-zA-Z])\\mathrm\s?\{([ei])\}|(?<=_\{)\\(?:mathrm|text)\s?\{([a-zA-Z])\}(?=\})")
"""Upright constants and subscripts of one letter, which are letters and no units."""
_IMAGINARY = re.compile(r"(?<=\d)i(?![a-zA-Z_])", re.ASCII)
"""The imaginary unit after a number: math-verify finds only one that stands by itself, and takes all variables for real
ones without it, so that `3+4i` and `3+4 i` were unequal."""
_LAST_UNIT = re.compile(rf"(?<=[\d}}])\s*{_WORDS}[^{{}}\d]*\}}(?:\^\d|\^\{{\d\}})?$")
"""A unit in upright text at the end of an equation."""
_PERIOD = re.compile(r"(?<=[^.\s])\.$")
_SPACING = re.compile(r"\\(?:[,;:!]|q?quad\b|displaystyle\b|hspace\*?\{[^{}]*\})|(?<!\\)~")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]))")
_TEXT = re.compile(rf"{_WORDS}([^{{}}\\]*\d[^{{}}\\]*)\}}")
_WRAPPED = re.compile(r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\(((?:(?!\\\)).)*)\\\)|\\\[((?:(?!\\\]).)*)\\\]", re.DOTALL)
_EMPHASIS = re.compile(r"(\*{1,3}|`)([^*`]+)\1")
"""Markdown around a whole answer."""
_ABOUT = re.compile(r"\\approx(?![a-zA-Z])|≈")
_INTRODUCED = re.compile(r"^(?:=(?!=)|:(?![:=])|\\approx(?![a-zA-Z])|≈|\\therefore(?![a-zA-Z]))\s*")

# One number among words; words that negate it or offer an alternative disqualify it.
_PROSE = re.compile(
    r"(?!.*\b(?:not|or|nor|neither|either|except|than|least|most)\b)(?!.*n't\b)"
    r"[^\W\d]*(?:[^\W\d_]|[\s.,:;!'\"’()*$€£])*-?\d[\d.,]*(?:/\d+)?(?:[^\W\d_]|[\s.,:;!'\"’()*$€£%])*",
    re.DOTALL | re.IGNORECASE,
)

# Words that change the number next to them. Without such a word, the letters of a text are no product of variables.
_MATH_WORDS = re.compile(
    r"arc\w+|sinh?|cosh?|tanh?|cot|sec|csc|log|exp|sqrt|max|min|mod|gcd|lcm|lim|det|choose|over|plus|minus|negative|"
    r"divided|multiplied|squared?|cubed?|power|root|factorial|percent|dozen|hundred|thousand|[mbtr]+illion|hal(?:f|ves)|"
    r"thirds?|fourths?|quarters?|fifths?|tenths?|hundredths?|times|between|and"
)
_NAME = re.compile(rf"(?:{_WORDS})?\s*([^\W\d_]+(?:[ '-]+[^\W\d_]+)*)[\s.]*\}}?[\s.]*")
"""An answer of letters alone: a name, a choice, a word."""
_LABEL = re.compile(rf"^(?:{_WORDS})?\s*(?!(?:Minus|Negative)\b)([A-Z][a-z]{{2,20}})[\s}}.~]+\d")
"""The word that begins an answer with a number, such as a month."""
_HALF_DAY = re.compile(rf"\d[\s}}\\!,;:~]*(?:{_WORDS}\s*)?([ap])\.?\s?m\b", re.IGNORECASE)
"""The a or p of a.m. and p.m."""
_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?([ap]m)?", re.ASCII)
_CLOCK_MARKUP = re.compile(r"\\(?:text|mbox|mathrm)|\\[!,; ]|[\s{}$~]|(?<!\d)\.|\.$")
"""All that may stand in a time of day besides its digits, colon and letters; `3.5 pm` is a length."""
_QUALIFIED = re.compile(
    r"\b(?:not|never|least|most|than|under|below|above|exceed(?:s|ing)?|twice|double|triple|except|divisible by"
    r"|(?:multiples?|factors?|divisors?|powers?|half|squares?|cubes?|roots?) of)[\s}$\\(]{0,9}\d"
    rf"|\d[\s}}$\\)]{{0,9}}(?:{_WORDS}\s*)?(?:or (?:more|less|fewer|greater)|at (?:most|least)|below zero|dozen|"
    r"squared|cubed|factorial|tens\b|(?:third|four?th|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|hundredth|thousandth)s\b)",
    re.IGNORECASE,
)
"""Words next to a number that make it another one, a bound, or a denial."""
_NUMERAL = re.compile(r"\d[\d.,]*")


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    limit_resources()
    # Ctrl-C reaches the whole process group; the parent decides when its children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # The first comparison loads the grammar; without this its time would count for the first question.
        verdict("1", "2")
    except ImportError as error:
        replies.write(json.dumps({"ready": False, "reason": str(error)}) + "\n")
        return
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        question = json.loads(line)
        limit_cpu(question["cpu_seconds"])
        try:
            readable = bool(expressions(question["gold"]))
            replies.write(json.dumps({"gold": readable}) + "\n")
            answer = verdict(question["gold"], question["answer"]) if readable else "gold"
        except (Exception, RecursionError) as error:  # noqa: BLE001 - sympy may raise anything; the reason goes back
            answer = f"failed with {type(error).__name__}"
        limit_cpu(0)
        replies.write(json.dumps({"verdict": answer}) + "\n")


def verdict(gold: str, answer: str) -> str:
    from math_verify import verify

    confirm_equality()
    wanted, parsed = expressions(gold), expressions(answer)
    if not parsed:
        return "no answer"
    named, given = name(gold), name(answer)
    if named and given:
        return "correct" if named == given else "wrong"
    if (equal := same_time(gold, answer)) is not None:
        return "correct" if equal else "wrong"
    same = (
        verify(list(wanted), list(parsed), timeout_seconds=None)
        and sides_agree(parsed)
        and percentage_is_meant(wanted, parsed)
        and words_agree(gold, answer)
        and not (bases(gold) and bases(answer) and bases(gold) != bases(answer))
    )
    return "correct" if same else "wrong"


def confirm_equality() -> None:
    """Have math-verify confirm that numbers are equal: it takes one that is divided by `39!` or `2^{90}` for 0."""
    from math_verify import grader

    equal = grader.sympy_numeric_eq
    if equal.__module__ == grader.__name__:  # it is not replaced yet
        grader.sympy_numeric_eq = lambda gold, answer, *limits: equal(gold, answer, *limits) and close(gold, answer)


def close(gold: Any, answer: Any) -> bool:
    """Return False if two numbers differ: by more than a thousandth if one of them has decimals, else at all."""
    from math_verify.grader import get_pct_val, safe_sympy_doit
    from sympy import Expr, Float, Number

    figures = [get_pct_val(side, side) for side in (gold, answer)]
    if any(isinstance(figure, Float) for figure in figures):
        gold, answer = safe_sympy_doit(gold), safe_sympy_doit(answer)
    elif figures != [gold, answer] or any(isinstance(figure, Number) for figure in figures):
        return True  # math-verify has compared exactly what both come to, without digits, which may take long
    if not (isinstance(gold, Expr) and isinstance(answer, Expr) and (gold - answer).is_number):
        return True
    allowed = RELATIVE_ERROR if gold.has(Float) or answer.has(Float) else ROUNDING_ERROR
    size = abs(gold.subs(dict.fromkeys(gold.free_symbols, 0)).evalf())
    apart = abs((gold - answer).evalf())
    is_certain = size.is_finite and apart.is_finite and getattr(apart, "_prec", 0) != 1  # 1: no digit of it is certain
    return not is_certain or bool(apart <= allowed * size)


def sides_agree(parsed: tuple[Any, ...]) -> bool:
    """Return True if all sides of an equation are equal: math-verify checks only the last, so `6 = 5` would be 5."""
    values = numbers(tuple(sides(parsed[0])))
    return all(abs(value - values[-1]) <= RELATIVE_ERROR * abs(values[-1]) for value in values)


def sides(expression: Any) -> list[Any]:
    """Return the sides of an equation or of a chain of equations; the last is the answer."""
    from latex2sympy2_extended.logic import And
    from sympy import Eq

    # sympy sorts the parts of a conjunction; `_unsorted_args` has the order in which they were written.
    pairs = expression._unsorted_args if isinstance(expression, And) else (expression,)  # noqa: SLF001 - its one place
    return [side for pair in pairs if isinstance(pair, Eq) for side in (pair.lhs, pair.rhs)]


def percentage_is_meant(wanted: tuple[Any, ...], parsed: tuple[Any, ...]) -> bool:
    """Return True if an answer in percent can be the gold's value: math-verify takes 5% and 500% for a gold of 5.

    The question decides which of the two is right, so a gold above 1 accepts a percentage only if it is one itself.
    """
    from math_verify.grader import get_pct_val

    if get_pct_val(parsed[0]) is None or get_pct_val(wanted[0]) is not None:
        return True
    golds, answers = numbers(wanted), numbers((parsed[0].doit(),))
    if not golds or not answers:
        return True
    return abs(golds[0]) <= 1 and abs(golds[0] - answers[0]) <= RELATIVE_ERROR * abs(golds[0])


def words_agree(gold: str, answer: str) -> bool:
    """Return True unless words beside the numbers say otherwise: `July 20` is not June 20, nor is `5 or more` 5."""
    for pattern in (_LABEL, _HALF_DAY):
        found = [words[1].lower() for text in (gold, answer) if (words := pattern.search(text.strip()))]
        if len(set(found)) > 1:
            return False
    # In a sentence with several numbers the word may be beside another one: `the square root of 25 is 5`.
    return len(_NUMERAL.findall(answer)) != 1 or not _QUALIFIED.search(answer) or bool(_QUALIFIED.search(gold))


def name(text: str) -> str:
    """Return a text of letters alone, in lower case; "" for any other, and for letters that are more likely a product.

    math-verify reads all letters as a product, in which their order does not count: `ACB` would be `ABC`.
    """
    found = _NAME.fullmatch(text.strip())
    words = re.split("[ '-]+", found[1]) if found else []
    letters = "".join(words)
    if max(map(len, words), default=0) < 3:  # `ad-bc`
        return ""
    if len(letters) < (4 if letters.islower() else 3) or any(_MATH_WORDS.fullmatch(word.lower()) for word in words):
        return ""
    return " ".join(words).lower()


def same_time(gold: str, answer: str) -> bool | None:
    """Return True if two times of day are the same, where one may leave out its half of the day; None for other texts.

    math-verify takes a time for a ratio, as which 4:30 is 2:15, and the `PM` after it for variables. Without a half of
    the day it is a time only if the minutes begin with a zero.
    """
    wanted, given = time_of_day(gold), time_of_day(answer)
    if wanted is None or given is None:
        return None
    halves = {wanted[2], given[2]} - {""}
    if not halves and min(wanted[1], given[1]) > 9:
        return None
    return wanted[:2] == given[:2] and len(halves) < 2


def time_of_day(text: str) -> tuple[int, int, str] | None:
    """Return hour, minute and `am`, `pm` or "" of a text that has the form of a time and nothing else."""
    found = _CLOCK.fullmatch(_CLOCK_MARKUP.sub("", text).lower())
    if found is None or not (found[2] or found[3]):
        return None
    return int(found[1]), int(found[2] or 0), found[3] or ""


def bases(text: str) -> list[str]:
    """Return the bases of numerals, as 3 and 5 in `12_3 + 4_{5}`; math-verify drops them."""
    return [braced or bare for braced, bare in _BASE.findall(text)]


def numbers(expressions: tuple[Any, ...]) -> list[float]:
    """Return the values of the expressions that are real numbers; the others are text, sets, or hold a variable."""
    return [float(value) for value in expressions if getattr(value, "is_number", False) and value.is_real]


@lru_cache(maxsize=64)
def expressions(text: str) -> tuple[Any, ...]:
    r"""Parse `text` into expressions, in order of preference. Bare mathematics is read as if it stood in a
    `\boxed{}`.

    Where the text is not mathematics, the number in it counts only if the rest is prose: math-verify takes the last
    number of any text that it cannot read, and so read `6 \vee 5`, `\neq 5` and `6 | 5` as 5. In a text of words that
    it does read (`5 people` as 5 times p, e, o, …) the number counts as well.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = plain(text)
    unescaped = _ESCAPED_BRACE.sub("", text)
    if not text or unescaped.count("{") != unescaped.count("}"):
        return ()
    bare = not any(delimiter in text for delimiter in DELIMITERS)
    normalized = LatexExtractionConfig().normalization_config
    if bare and goes_on(text):
        text, normalized = _JOINT.sub(r"\1,", _AND.sub(r"\1}", text)), replace(normalized, units=False)
        text = _LAST_UNIT.sub("", text) if "=" in text else text
    latex = parse(
        f"\\boxed{{{text}}}" if bare else text,
        [LatexExtractionConfig(normalization_config=normalized)],
        parsing_timeout=None,
    )
    if not _PROSE.fullmatch(text):
        return tuple(latex)
    if not all(isinstance(found, str) for found in latex) and (numbers(tuple(latex)) or not is_sentence(text)):
        return tuple(latex)
    return tuple(parse(text, [ExprExtractionConfig()], parsing_timeout=None)) or tuple(latex)


def goes_on(text: str) -> bool:
    r"""Return True if the first `\text{…}` is no unit at the end: math-verify would take all from there on for one, so
    that `5\text{ feet }6\text{ inches}` would be 5, and `v_{\text{max}}` would be `v_{\text{min}}`.
    """
    words = _WORDS_PART.search(text)
    if words is None:
        return False
    before = _ESCAPED_BRACE.sub("", text[: words.start()]).rstrip()
    in_braces = before.count("{") > before.count("}")
    return in_braces or before.endswith(("_", "^")) or _UNITS.fullmatch(text, words.start()) is None


def is_sentence(text: str) -> bool:
    """Return True if there is a word of three letters or more beside the number, and none that changes the number."""
    words = [word.strip(".,:;!'\"’()*$€£%") for word in text.lower().split()]
    return any(len(word) > 2 and word.isalpha() for word in words) and not any(map(_MATH_WORDS.fullmatch, words))


def plain(text: str) -> str:
    """Return the text without parts that carry no value: delimiters around it, spacing, a sign that introduces it."""
    text = _POWER_T.sub(r"\1^{(T)}", _TOP.sub("^T", rewritten_numbers(text.strip())))
    text = _RAISED.sub(_power, _RAISED_UNIT.sub("", text)).replace("·", "\\cdot ")
    text = _PERCENT.sub(r"\\%", _FACTOR.sub(r"\g<0>\\cdot ", text))
    text = _MINUS.sub(r"\1\2\3-", _SCALED.sub(_multiplied, text))
    # The notation of scientific references: math-verify would read 4.5e33 as 4.5 times e times 33.
    text = _POWER_OF_TEN.sub(r"\1 \\times 10^{\2}", text).replace("°", "^\\circ ").replace("∞", "\\infty ")
    text = _BARE_NAME.sub(r"\\\g<0>", _UNIT.sub("", text.replace("\\$", "").replace("\\varnothing", "\\emptyset")))
    text = _ROMAN.sub(lambda letter: letter[1] or letter[2], _SPACING.sub(" ", text)).strip()
    text = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", text)
    wrapped = _TEXT.fullmatch(text) or _WRAPPED.fullmatch(text) or _EMPHASIS.fullmatch(text)
    if wrapped:
        text = wrapped[wrapped.lastindex or 0].strip()
    return exact_side(_IMAGINARY.sub("{i}", _PERIOD.sub("", _INTRODUCED.sub("", text))))


def rewritten_numbers(text: str) -> str:
    r"""Return the text with numbers in the form that math-verify reads: `10,\!000` as 10000, `3 1/2` and `3½` as 7/2,
    `0.\overline{3}` as a fraction, the rate of `(1+5\%)^T` as 0.05.
    """
    text = _GROWTH.sub(_hundredths, text)
    text = _SPACED_THOUSANDS.sub(lambda number: re.sub(r"\s", "", number[0]), _THOUSANDS.sub("", text))
    text = _MIXED_PERCENT.sub(_improper, _MIXED.sub(_improper, text.translate(_FRACTION_SIGNS).strip()))
    return _REPEATING.sub(_repeated, _SLASH_PERCENT.sub(r"\\frac{\1}{\2}", text))


def _improper(mixed: re.Match[str]) -> str:
    whole, top, bottom = map(int, filter(None, mixed.groups()))
    return f"{whole * bottom + top}/{bottom}"


def _hundredths(rate: re.Match[str]) -> str:
    before, number = rate.groups()
    return f"{before}{Decimal(number).scaleb(-2):f}"


def _power(raised: re.Match[str]) -> str:
    return f"^{{{unicodedata.normalize('NFKC', raised[0]).replace('−', '-')}}}"


def _repeated(decimal: re.Match[str]) -> str:
    whole, once, again = decimal.groups()
    before = int(f"{whole}{once}" or "0")
    top = int(f"{whole}{once}{again}") - before
    return f"\\frac{{{top}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


def _multiplied(scaled: re.Match[str]) -> str:
    """Return `2.5 million` as 2500000: math-verify would read the word as a product of variables, or leave it out."""
    whole, fraction, dollar, in_text, bare = scaled.groups(default="")
    zeros = sum(_SCALES[word.removesuffix("s")] for word in re.findall("[a-z]+", (in_text or bare).lower()))
    digits, rest = whole.replace(",", "") + fraction[:zeros].ljust(zeros, "0"), fraction[zeros:]
    return (digits.lstrip("0") or "0") + (f".{rest}" if rest else "") + dollar


def exact_side(text: str) -> str:
    r"""Return the text before `\approx`, or "" where the values of the two sides are not close to each other."""
    first, *rest = (side.strip() for side in _ABOUT.split(text, maxsplit=1))
    if not rest:
        return text
    near = [value for side in (first, *rest) for value in numbers(expressions(side))]
    return first if len(near) < 2 or abs(near[0] - near[1]) <= ABOUT * abs(near[0]) else ""


def limit_resources() -> None:
    logging.disable(logging.CRITICAL)
    try:
        import resource
    except ImportError:  # Windows has neither these limits nor the timer; the parent's own limit holds there.
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(seconds: float) -> None:
    """Have the kernel kill this process by SIGPROF after that much more CPU time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
