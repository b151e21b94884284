"""A fingerprint of a tokenizer's vocabulary, by which an environment and its inference server know that they agree.

Two tokenizers of one size that differ in a few ids train without any error, on tokens that the model never meant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """32 hexadecimal digits that change with every token and every id."""
    ordered = sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
    lines = "".join(f"{index}\t{token!r}\n" for token, index in ordered)
    return hashlib.blake2b(lines.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()
