"""The options by which a program is observed, apart from their defaults: logs, traces and metrics.

Programs declare `log_format: LogForm = "text"` and so on; the launcher passes its own values to all of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atropos_api.common.identity import Address, Host
from atropos_api.common.logs import LogFormat

LogForm = Annotated[
    LogFormat,
    Field(description="Form of log records on stderr: text, or a JSON object a line, with run, step and version."),
]

TracesEndpoint = Annotated[
    Address | None,
    Field(
        description="URL of an OpenTelemetry collector for traces, such as http://localhost:4317; needs the extra "
        "[otel]; unset: no traces."
    ),
]

MetricsPort = Annotated[
    int | None,
    Field(ge=0, le=65535, description="Port that serves metrics to Prometheus at /metrics; unset: none."),
]

MetricsHost = Annotated[Host, Field(description="Address on which the metrics port listens.")]
