"""The program that compares mathematics, run apart because sympy can take for ever or fill the memory.

It reads one JSON line a question from its standard input, `{"gold", "answer", "cpu_seconds"}`, and answers two lines:
whether the gold could be read, then the verdict. A question that takes more CPU time than allowed kills it, by a
timer of the kernel, which works inside C code too. It imports nothing of this project.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_LIMIT_BYTES = 2 << 30
DELIMITERS = ("\\boxed", "$", "\\(", "\\[", "\\begin{")
SMALL = 1e-2
RELATIVE_ERROR = 1e-3

_POWER_OF_TEN = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,4})(?![\w.]*\w)")


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    limit_resources()
    # Ctrl-C reaches the whole group; the parent decides when its children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # The first comparison loads the grammar, which would be charged to the first question.
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

    wanted, parsed = expressions(gold), expressions(answer)
    if not parsed:
        return "no answer"
    same = verify(list(wanted), list(parsed), timeout_seconds=None) and same_size(wanted, parsed)
    return "correct" if same else "wrong"


def same_size(wanted: tuple[Any, ...], parsed: tuple[Any, ...]) -> bool:
    """Whether a gold near zero is met in its own size: to six decimals, as math-verify compares, all such are 0."""
    golds, answers = numbers(wanted), numbers(parsed)
    if not golds or not answers or abs(golds[0]) >= SMALL:
        return True
    return any(abs(golds[0] - value) <= RELATIVE_ERROR * abs(golds[0]) for value in answers)


def numbers(expressions: tuple[Any, ...]) -> list[float]:
    """The values of those expressions that are real numbers; the others are text, sets, or hold a variable."""
    return [float(value) for value in expressions if getattr(value, "is_number", False) and value.is_real]


@lru_cache(maxsize=64)
def expressions(text: str) -> tuple[Any, ...]:
    r"""What `text` means, in order of preference. Bare mathematics is read as if it stood in a `\boxed{}`."""
    from math_verify import parse

    if not text.strip():
        return ()
    # As references of the sciences are written: math-verify would read 4.5e33 as 4.5 times e times 33.
    text = _POWER_OF_TEN.sub(r"\1 \\times 10^{\2}", text)
    if any(delimiter in text for delimiter in DELIMITERS):
        return tuple(parse(text, parsing_timeout=None))
    boxed = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return tuple(boxed) or tuple(parse(text, parsing_timeout=None))


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
    """Die by SIGPROF after so much more CPU time; 0 takes the limit away."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
