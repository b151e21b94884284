"""The broker's reference page: `python -m atropos_api.generate_docs > docs/reference/broker.md` prints it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

from atropos_api.cli import DESCRIPTION
from atropos_api.common.option_flags import list_options
from atropos_api.common.prometheus import PROCESS_METRICS, table
from atropos_api.config import BrokerConfig
from atropos_api.http.problems import TYPE_PREFIX
from atropos_api.http.request import JSON
from atropos_api.routes.docs import ANY_ROUTE, by_status, errors_of, known_problems
from atropos_api.routes.metrics import METRICS, PREFIX
from atropos_api.routes.schema import Operation, operations_of

_WRAPPED: Final = textwrap.fill(DESCRIPTION, 118)

HEAD: Final = f"""# The broker

{_WRAPPED}

Start it with `run-api`. `/docs` of a running broker shows the routes below and loads nothing from other hosts;
`/openapi.json` is the same for programs. `atropos top URL` shows the broker's state.

## Who may call

- The broker listens on loopback by default. On any other address it requires a token, and generates and prints one if
  none was given.
- Callers send the token as `Authorization: Bearer <token>`. Clients that can set only a base URL put it in front of the
  path: `http://host:port/t/<token>`. The broker removes it before it handles the path, so its logs do not contain it; a
  proxy in between sees it.
- Without a token, `Host` must be a name of this machine or an IP address; otherwise a page could reach the broker under
  a name that it has rebound. `--allowed-hosts` adds others.
- A request that changes something, the GETs `/batch`, `/reset_data` and `/v1/batches/{{n}}` included, is refused when a
  browser reports that a page of another origin caused it (`Origin`, `Referer`, `Sec-Fetch-Site`) or that it is a
  prefetch. `--allowed-origins` names the origins that may call; no other gets CORS headers.
- Ids identify objects and grant no rights. Environment ids are small integers, as in the Atropos contract; ids of runs
  and holds are random. A caller that has access may use any of them.
- A HEAD request is answered as a GET without its body; for `/batch`, `/reset_data`, `/v1/batches/{{n}}` and
  `/v1/backup` it is refused.
- No part of a request becomes a file path: names, keys and directories are stored as text.

## What a connection may cost

A request head must be complete within `--header-timeout` and 64 KiB; over each `--stall-timeout`, a body must arrive
and an answer must be read at a KiB a second. Otherwise the connection is closed. The size of bodies is limited as sent
and decompressed, and a body of more than 8 MiB and a hundred times its size as sent is refused. A long poll ends when
its caller disconnects.

Server-sent events come from a ring buffer of the last 2,000. A client that reconnects with `Last-Event-ID` gets those
after it, or an event `missed` if they are no longer in the buffer. A connection that is not read is closed like any
other.
"""

ERRORS: Final = """\
The v1 routes answer problem+json; its `type` is `PREFIX` and one of these, `detail` says what was wrong and what to do,
and `field` and `value` name the place. 503 carries `Retry-After` and means that nothing was kept; only after a failed
sync (`--fsync always`) or a lost answer of Redis it may have been. The Atropos contract answers `{"detail": ...}` with
the same statuses, 422 in the form that its clients know.
"""


def render(operations: Iterable[Operation]) -> str:
    """Return the whole page, with these routes."""
    parts = [HEAD, *_routes(operations), *_errors(), *_flags(), *_metrics()]
    return "\n".join(parts).rstrip() + "\n"


def _routes(operations: Iterable[Operation]) -> Iterator[str]:
    yield "## Routes\n"
    common = by_status(ANY_ROUTE)
    yield f"Any route may answer {_kinds(common)}. In addition:\n"
    for section, described in groupby(operations, key=lambda operation: operation.section):
        yield f"### {section}\n"
        for operation in described:
            yield from _route(operation, common)


def _route(operation: Operation, common: Mapping[int, list[str]]) -> Iterator[str]:
    yield f"#### `{operation.route}`\n"
    yield f"{operation.summary}. {operation.help}".strip() + "\n"
    if operation.parameters:
        yield "| parameter | in | meaning |\n|---|---|---|"
        yield from (f"| `{one.name}` | {one.place} | {one.help} |" for one in operation.parameters)
        yield ""
    if operation.example is not None:
        yield f"```json\n{json.dumps(operation.example)}\n```\n"
    for status, answer in operation.answers.items():
        form = f" (`{answer.media_type}`)" if answer.content is not None and answer.media_type != JSON else ""
        yield f"- {status}: {answer.help}{form}"
    own = {
        status: [kind for kind in kinds if kind not in common.get(status, ())]
        for status, kinds in errors_of(operation).items()
    }
    if any(own.values()):
        yield f"- errors: {_kinds(own)}"
    yield ""


def _kinds(errors: Mapping[int, list[str]]) -> str:
    return ", ".join(f"{status} `{kind}`" for status, kinds in errors.items() for kind in kinds)


def _errors() -> Iterator[str]:
    yield "## Errors\n"
    yield ERRORS.replace("PREFIX", TYPE_PREFIX)
    yield "| type | status | meaning |\n|---|---|---|"
    for kind, problem in sorted(known_problems().items()):
        yield f"| `{kind}` | {problem.status} | {problem.meaning} |"
    yield ""


def _flags() -> Iterator[str]:
    yield "## Flags of `run-api`\n"
    yield "Each is also a key of the section `api:` of a run file, with `_` for `-`.\n"
    yield "| flag | meaning |\n|---|---|"
    for option in list_options(BrokerConfig):
        values = f" `{'` `'.join(option.choices)}`" if option.choices else ""
        yield f"| `{option.flags[0]}`{values} | {option.help} |"
    yield ""


def _metrics() -> Iterator[str]:
    yield "## Metrics\n"
    yield "`GET /metrics` of the broker; those of the other programs are on [their page](prometheus.md).\n"
    yield table(METRICS, PREFIX)
    yield "Of the process, in every program:\n"
    yield table(PROCESS_METRICS)


def main() -> None:
    from atropos_api.testing import make_memory_app

    sys.stdout.write(render(operations_of(make_memory_app().routes)))


if __name__ == "__main__":
    main()
