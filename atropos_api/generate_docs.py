"""The broker's reference page: `python -m atropos_api.generate_docs > docs/reference/broker.md` prints it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from atropos_api.cli import DESCRIPTION
from atropos_api.common.option_flags import list_options
from atropos_api.config import BrokerConfig
from atropos_api.http.problems import TYPE_PREFIX
from atropos_api.http.request import JSON
from atropos_api.routes.docs import SECTIONS, errors_of, known_problems
from atropos_api.routes.metrics import COUNTER_HELP, DROPPED, DROPPED_HELP, GAUGE_HELP, PREFIX, PROCESS_METRICS
from atropos_api.routes.schema import Operation

Summaries = Mapping[tuple[str, str], str]

_WRAPPED: Final = textwrap.fill(DESCRIPTION, 118)

HEAD: Final = f"""# The broker

{_WRAPPED}

Start it with `run-api`. `/docs` shows the routes below on a running broker, from itself alone; `/openapi.json` is the
same for programs. `atropos top URL` watches it.

## Who may call

- The broker listens on loopback unless told otherwise. On any other address it asks for a token, and makes one up and
  prints it if none was given.
- A token comes as `Authorization: Bearer <token>`. Clients that can set nothing but a base URL put it in front of the
  path: `http://host:port/t/<token>`. It is cut off at the door, so no log of the broker holds it; a proxy in between
  sees it.
- Without a token only names of this machine and IP addresses are taken as `Host`, or a page could reach the broker
  under a name that it has rebound. `--allowed-hosts` adds others.
- Whatever changes something, the GETs `/batch`, `/reset_data` and `/v1/batches/{{n}}` included, is refused when a
  browser says that a page of another origin caused it (`Origin`, `Referer`, `Sec-Fetch-Site`) or that it only fetches
  ahead. `--allowed-origins` names the origins that may call; no other gets CORS headers.
- Ids address and authorise nothing. Environment ids are small integers, as the Atropos contract has them; ids of runs
  and holds are random. Who may call at all may use any of them.
- Nothing that a request says becomes a path: names, keys and directories are kept as text.

## What a connection may cost

A request head is whole within `--header-timeout` and 64 KiB; a body brings, and a reader takes, a KiB a second over
each `--stall-timeout`, or the connection is closed. Bodies are bounded as sent and inflated, and one that inflates to
more than a hundred times its size (and 8 MiB) is refused without being kept. Long polls end when their caller leaves.

Server-sent events are read from a ring of the last 2,000. A watcher that comes back with `Last-Event-ID` gets what it
missed, or an event `missed` when the ring no longer holds it; one that does not read is closed like any other
connection.
"""

ERRORS: Final = """\
The v1 routes answer problem+json; its `type` is `PREFIX` and one of these, `detail` says what was wrong and what to do,
and `field` and `value` name the place. 503 carries `Retry-After` and means that nothing was kept. The Atropos contract
answers `{"detail": ...}` with the same statuses, 422 in the form that its clients know.
"""


def render(summaries: Summaries) -> str:
    """Return the whole page; `summaries` are the routes' summaries, by method and path."""
    parts = [HEAD, *_routes(summaries), *_errors(), *_flags(), *_metrics()]
    return "\n".join(parts).rstrip() + "\n"


def _routes(summaries: Summaries) -> Iterator[str]:
    yield "## Routes\n"
    common = _kinds(errors_of(SECTIONS["operations"][-1]))
    yield f"Any route may answer {common}. Beside these:\n"
    for section, operations in SECTIONS.items():
        yield f"### {section}\n"
        for operation in operations:
            yield from _route(operation, summaries[operation.method, operation.path])


def _route(operation: Operation, summary: str) -> Iterator[str]:
    yield f"#### `{operation.method} {operation.path}`\n"
    yield f"{summary}. {operation.help}".strip() + "\n"
    if operation.parameters:
        yield "| parameter | in | meaning |\n|---|---|---|"
        yield from (f"| `{one.name}` | {one.place} | {one.help} |" for one in operation.parameters)
        yield ""
    if operation.example is not None:
        yield f"```json\n{json.dumps(operation.example)}\n```\n"
    for status, answer in operation.answers.items():
        form = f" (`{answer.media_type}`)" if answer.content is not None and answer.media_type != JSON else ""
        yield f"- {status}: {answer.help}{form}"
    common = errors_of(SECTIONS["operations"][-1])
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
    yield "| name | kind | meaning |\n|---|---|---|"
    yield from (f"| `{PREFIX}{name}` | counter | {text} |" for name, text in COUNTER_HELP.items())
    yield f"| `{PREFIX}{DROPPED}` | counter | {DROPPED_HELP} |"
    yield from (f"| `{PREFIX}{name}` | gauge | {text} |" for name, text in GAUGE_HELP.items())
    yield from (f"| `{one.name}` | {one.kind} | {one.meaning} |" for one in PROCESS_METRICS)


def summaries_of(routes: Mapping[str, Any]) -> Summaries:
    """Return the route summaries found in the paths of an OpenAPI document."""
    return {
        (method.upper(), path): described["summary"]
        for path, methods in routes.items()
        for method, described in methods.items()
    }


def main() -> None:
    from atropos_api.testing import make_memory_app

    sys.stdout.write(render(summaries_of(make_memory_app().openapi()["paths"])))


if __name__ == "__main__":
    main()
