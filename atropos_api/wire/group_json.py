"""Groups submitted as JSON: each is checked once and kept as the text that will be delivered.

The text is a JSON object in the order of the contract, all fourteen keys present. Its closing brace is left out, so
that `finish_text` can append `received_version` without touching the rest. No payload becomes Python objects.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Final, TypeVar

import msgspec

from atropos_api.errors import InvalidGroup, InvalidRequest
from atropos_api.wire.columns import pack_record, unpack_record
from atropos_api.wire.groups import MOST_MASK_TOKENS, MOST_TEACHER_TOKENS, WIRE_KEYS, Form, Span
from atropos_api.wire.json_arrays import check_floats, check_ids, check_nested, check_numbers
from atropos_api.wire.messages import Whole

DecodedT = TypeVar("DecodedT")

Fields = dict[str, msgspec.Raw]

_NULL: Final = b"null"
_EMPTY: Final = (b"null", b"[]")
_PREFIXES: Final = tuple(f'{"," if index else "{"}"{key}":'.encode() for index, key in enumerate(WIRE_KEYS))
_NULLS: Final = dict.fromkeys(WIRE_KEYS, _NULL)
_OPEN_KEYS: Final = frozenset({*WIRE_KEYS, "received_version"})
_FREE_KEYS: Final = ("messages", "generation_params", "overrides", "group_overrides", "images")
_CHECKED_KEYS: Final = frozenset({"sampling_masks", "policy_versions"})
"""Keys after those of the contract that have checks of their own."""
_DISTILLED: Final = ("distill_token_ids", "distill_logprobs")
_OBJECTS: Final = frozenset({"generation_params", "group_overrides"})
_NO_OVERRIDES: Final = b"{}"
MOST_LEVELS: Final = 256
"""Most levels of arrays and objects in a group. How many a decoder reads depends on how deep in its program it is
called: a trainer might be unable to read what was taken here, and would be handed it again after each resume."""
_STAMP: Final = b',"received_version":'

_in_order = operator.itemgetter(*WIRE_KEYS)

_spans_decoder = msgspec.json.Decoder(list[list[Span]])

_entries_decoder = msgspec.json.Decoder(list[msgspec.Raw])

_env_id_decoder = msgspec.json.Decoder(int, strict=False)

_policy_decoder: msgspec.json.Decoder[str | None] = msgspec.json.Decoder(
    Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None
)


class SubmissionText(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/groups`: the payload is left as text."""

    environment_id: Whole
    groups: list[Fields]


class CheckedGroup(msgspec.Struct, kw_only=True, gc=False):
    """A checked group: it may be queued. `oldest_version` is that of its oldest token; None if any is unknown."""

    text: bytes
    """The whole text, or the head if the arrays are in `columns`; open at the end, for `finish_text`."""
    size: int
    token_count: int
    env_id: int | None
    oldest_version: int | None
    policy: str | None = None
    columns: memoryview | None = None

    @property
    def form(self) -> Form:
        return "json" if self.columns is None else "columns"

    @property
    def byte_count(self) -> int:
        return len(self.text) + (len(self.columns) if self.columns is not None else 0)


_submission_decoder = msgspec.json.Decoder(SubmissionText, strict=False)

_fields_decoder = msgspec.json.Decoder(Fields)

_list_decoder = msgspec.json.Decoder(list[Fields | None])


def decode_submission(body: bytes) -> SubmissionText:
    return _decode(_submission_decoder, body)


def decode_fields(body: bytes) -> Fields:
    return _decode(_fields_decoder, body)


def decode_list(body: bytes) -> list[Fields]:
    """Decode the groups of a list; a null among them is a group without fields, which is refused alone."""
    return [fields or {} for fields in _decode(_list_decoder, body)]


def check_group(fields: Fields, *, where: str = "", env_id: int | None = None) -> CheckedGroup:
    """Check a group and return it as stored; `env_id` replaces the one in the text. Raises `InvalidGroup`."""
    texts = {key: bytes(raw) for key, raw in fields.items()}
    for required in ("tokens", "masks", "scores"):
        if required not in texts:
            raise InvalidGroup(where + required, None, "the field is required")
    lengths = _check_tokens(texts, where)
    found_env_id, oldest_version = check_fields(texts, lengths, where=where, env_id=env_id)
    return CheckedGroup(
        text=_join(texts),
        size=len(lengths),
        token_count=sum(lengths),
        env_id=found_env_id,
        oldest_version=oldest_version,
        policy=read_policy(texts, where),
    )


def check_fields(
    texts: dict[str, bytes], lengths: list[int], *, where: str, env_id: int | None
) -> tuple[int | None, int | None]:
    """Check the text fields of a group with these row lengths, except tokens; coerced values replace their texts.

    Return the group's environment and the version of its oldest token.
    """
    if "masks" in texts:
        masks, texts["masks"] = check_ids(texts["masks"], f"{where}masks", signed=True)
        if masks != lengths:
            raise _shaped_otherwise(masks, lengths, f"{where}masks")
    scores, texts["scores"] = check_numbers(texts["scores"], f"{where}scores")
    if scores != len(lengths):
        raise InvalidGroup(f"{where}scores", scores, f"one score for each of {len(lengths)} sequences is needed")
    _check_arrays(texts, lengths, where)
    _check_free_fields(texts, len(lengths), where)
    oldest_version = _check_spans(texts.get("policy_versions", _NULL), lengths, f"{where}policy_versions")
    if env_id is None:
        env_id = _read_env_id(texts.get("env_id", _NULL), where)
    texts["env_id"] = _NULL if env_id is None else b"%d" % env_id
    return env_id, oldest_version


def read_policy(texts: Mapping[str, bytes], where: str) -> str | None:
    """Return the name of the policy that sampled a group; None if it names none."""
    text = texts.get("policy", _NULL)
    try:
        return _policy_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = text[:80].decode("utf-8", "replace")
        raise InvalidGroup(f"{where}policy", shown, "a name of 1 to 200 characters is needed") from None


def finish_text(group: CheckedGroup, received_version: int | None) -> bytes:
    """Return the body to store, with the newest policy version at arrival appended."""
    version = _NULL if received_version is None else b"%d" % received_version
    if group.columns is not None:
        return b"".join(pack_record(b"".join((group.text, _STAMP, version, b"}}")), group.columns))
    return b"".join((group.text, _STAMP, version, b"}"))


def restore_text(body: bytes, form: Form) -> tuple[bytes | memoryview, ...]:
    """Return text and columns as they were before `finish_text`: they are equal if the same group is sent twice."""
    if form == "json":
        return (body[: body.rindex(_STAMP)],)
    record = unpack_record(body)
    head = bytes(record.head)
    return head[: head.rindex(_STAMP)], record.data


def _check_tokens(texts: dict[str, bytes], where: str) -> list[int]:
    lengths, texts["tokens"] = check_ids(texts["tokens"], f"{where}tokens")
    if not lengths:
        raise InvalidGroup(f"{where}tokens", "[]", "a group holds at least one sequence")
    if 0 in lengths:
        raise InvalidGroup(f"{where}tokens[{lengths.index(0)}]", "[]", "a sequence holds at least one token")
    return lengths


def _check_arrays(texts: dict[str, bytes], lengths: list[int], where: str) -> None:
    for key in ("advantages", "ref_logprobs", "inference_logprobs"):
        if texts.get(key, _NULL) not in _EMPTY:
            found, texts[key] = check_floats(texts[key], where + key)
            if found != lengths:
                raise _shaped_otherwise(found, lengths, where + key)
    masks = _check_nested(texts, "sampling_masks", lengths, where)
    if masks is not None and (widest := max(map(max, masks))) > MOST_MASK_TOKENS:
        reason = f"a mask has at most {MOST_MASK_TOKENS} tokens; send an empty one where more could be drawn"
        raise InvalidGroup(f"{where}sampling_masks", widest, reason)
    if texts.keys().isdisjoint(_DISTILLED):
        return
    ids = _check_nested(texts, "distill_token_ids", lengths, where)
    logprobs = _check_nested(texts, "distill_logprobs", lengths, where)
    if ids is not None:
        check_teacher_width(max(map(max, ids)), where)
    if ids is not None and logprobs is not None and ids != logprobs:
        raise InvalidGroup(f"{where}distill_logprobs", "another shape", "it must be shaped as distill_token_ids")


def check_teacher_width(widest: int, where: str) -> None:
    """Refuse a position at which a teacher names more tokens than a trainer takes."""
    if widest > MOST_TEACHER_TOKENS:
        raise InvalidGroup(f"{where}distill_token_ids", widest, f"at most {MOST_TEACHER_TOKENS} tokens a position")


def _check_nested(texts: dict[str, bytes], key: str, lengths: list[int], where: str) -> list[list[int]] | None:
    """Check a list for each token, and return the lists' lengths; None if there are none."""
    if texts.get(key, _NULL) in _EMPTY:
        return None
    found, texts[key] = check_nested(texts[key], where + key, ids=key != "distill_logprobs")
    if list(map(len, found)) != lengths:
        raise _shaped_otherwise(list(map(len, found)), lengths, where + key)
    return found


def _check_free_fields(texts: dict[str, bytes], size: int, where: str) -> None:
    for key in (*_FREE_KEYS, *sorted(texts.keys() - _OPEN_KEYS - _CHECKED_KEYS)):
        text = texts.get(key, _NULL)
        if text in _EMPTY:
            # Some clients send [] for an empty value; a trainer that decodes by type rejects a list here.
            if key in _OBJECTS and key in texts:
                texts[key] = _NULL
            continue
        value = _decode_free(text, where + key)
        if key == "messages":
            check_messages(value, where + key)
        elif key == "overrides":
            check_overrides(value, size, where + key)
            if None in value:
                texts[key] = _without_nulls(text)
        elif key in _OBJECTS and not isinstance(value, dict):
            raise InvalidGroup(where + key, value, "an object or null is needed")


def check_messages(value: Any, field: str) -> None:
    if not isinstance(value, list):
        raise InvalidGroup(field, value, "an array of conversations is needed")
    for index, conversation in enumerate(value):
        if not isinstance(conversation, list):
            raise InvalidGroup(f"{field}[{index}]", conversation, "an array of messages is needed")
        for place, message in enumerate(conversation):
            if not isinstance(message, dict) or "role" not in message or "content" not in message:
                raise InvalidGroup(f"{field}[{index}][{place}]", message, "an object with role and content is needed")


def check_overrides(value: Any, size: int, field: str) -> None:
    if not isinstance(value, list):
        raise InvalidGroup(field, value, "an array of objects is needed")
    if len(value) != size:
        raise InvalidGroup(field, len(value), f"one entry for each of {size} sequences is needed")
    for index, entry in enumerate(value):
        if entry is not None and not isinstance(entry, dict):
            raise InvalidGroup(f"{field}[{index}]", entry, "an object or null is needed")


def _without_nulls(overrides: bytes) -> bytes:
    """Replace null entries with `{}`: Atropos' own trainers crash on a null."""
    entries = _entries_decoder.decode(overrides)
    return b"[%b]" % b",".join(_NO_OVERRIDES if bytes(entry) == _NULL else bytes(entry) for entry in entries)


def _check_spans(text: bytes, lengths: list[int], field: str) -> int | None:
    """Return the oldest version in the spans; None if there are none or one of them is unknown."""
    if text in _EMPTY:
        return None
    try:
        sequences = _spans_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidGroup(
            field, text[:80].decode("utf-8", "replace"), f"spans [start, end, version]: {error}"
        ) from None
    return oldest_version(sequences, lengths, field)


def oldest_version(sequences: list[list[Span]], lengths: list[int], field: str) -> int | None:
    """Return the oldest version in the spans; None if one of them is unknown. Raises `InvalidGroup`."""
    if len(sequences) != len(lengths):
        raise InvalidGroup(field, len(sequences), f"spans for each of {len(lengths)} sequences are needed")
    versions: set[int | None] = set()
    for index, spans in enumerate(sequences):
        position = 0
        for start, end, version in spans:
            if not position <= start < end <= lengths[index]:
                problem = f"spans rise, do not overlap and end at {lengths[index]} at most"
                raise InvalidGroup(f"{field}[{index}]", [start, end, version], problem)
            if version is not None and not 0 <= version < 2**63:
                raise InvalidGroup(f"{field}[{index}]", str(version), "a version is 0 or more and fits in 63 bits")
            position = end
            versions.add(version)
    known = {version for version in versions if version is not None}
    return min(known) if known and None not in versions else None


def _shaped_otherwise(found: list[int], lengths: list[int], field: str) -> InvalidGroup:
    if len(found) != len(lengths):
        return InvalidGroup(field, len(found), f"{len(lengths)} rows are needed, as in tokens")
    index = next(index for index, wanted in enumerate(lengths) if found[index] != wanted)
    return InvalidGroup(f"{field}[{index}]", found[index], f"{lengths[index]} values are needed, as in tokens[{index}]")


def _read_env_id(text: bytes, where: str) -> int | None:
    if text == _NULL:
        return None
    try:
        number = _env_id_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidGroup(f"{where}env_id", text[:80].decode("utf-8", "replace"), "an integer is needed") from None
    if not -(2**63) <= number < 2**63:
        raise InvalidGroup(f"{where}env_id", str(number), "it does not fit in 64 bits")
    return number


def _decode_free(text: bytes, field: str) -> Any:
    """Decode free-form JSON, only to make sure that every trainer can read it."""
    shown = text[:80].decode("utf-8", "replace")
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGroup(field, shown, str(error) or "too deeply nested") from None
    if may_be_deep(text) and is_deep(value):
        raise InvalidGroup(field, shown, f"at most {MOST_LEVELS} levels of arrays and objects can be read everywhere")
    return value


def may_be_deep(text: bytes) -> bool:
    """Return False if a JSON text has too few arrays and objects to have more than `MOST_LEVELS` levels of them."""
    return text.count(b"[") + text.count(b"{") > MOST_LEVELS


def is_deep(value: Any) -> bool:
    """Return True if a JSON value has more than `MOST_LEVELS` levels of arrays and objects."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for one in chain.from_iterable(inner) if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _join(texts: Mapping[str, bytes]) -> bytes:
    known = chain.from_iterable(zip(_PREFIXES, _in_order({**_NULLS, **texts}), strict=True))
    if texts.keys() <= _OPEN_KEYS:
        return b"".join(known)
    unknown = (b",%b:%b" % (msgspec.json.encode(key), text) for key, text in texts.items() if key not in _OPEN_KEYS)
    return b"".join((*known, *unknown))


def _decode(decoder: msgspec.json.Decoder[DecodedT], body: bytes) -> DecodedT:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body has the wrong shape: {error}", field="body") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explain(body, error) from None


def _explain(body: bytes, error: Exception) -> InvalidRequest | InvalidGroup:
    """Explain a body that is not JSON: if it holds NaN or Infinity, as Python writes, name the first place."""
    try:
        # Decoding the body again is slow, so it is done only if it may hold one of them.
        found = _find_not_finite(json.loads(body), "") if b"NaN" in body or b"Infinity" in body else None
    except (ValueError, RecursionError):
        found = None
    if found is not None:
        return InvalidGroup(found[0], str(found[1]), "a finite number is needed")
    return InvalidRequest(f"the body is not valid JSON: {error}", field="body")


def _find_not_finite(value: Any, path: str) -> tuple[str, float] | None:
    if isinstance(value, float) and not math.isfinite(value):
        return path, value
    if isinstance(value, dict):
        children = [(f"{path}.{key}" if path else str(key), child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
    else:
        return None
    for place, child in children:
        found = _find_not_finite(child, place)
        if found is not None:
            return found
    return None
