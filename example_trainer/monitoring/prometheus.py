"""The trainer's metrics for Prometheus (`--metrics-port`): the values of the last step, and counters over all steps.

A name of `metric_names` is spelt with `_` for `/` and in base units: `time/train` is `time_train_seconds`, a name in
`_gb` ends in `_bytes`. The part in braces of a family's name is a label: `data/overlong`, which is of the family
`data/{cause}`, is `data_cause{cause="overlong"}`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

from prometheus_client.metrics_core import Metric as Family

from atropos_api.common import metric_names as names
from atropos_api.common.prometheus import Metric, MetricsEndpoint
from example_trainer.monitoring.health import HealthEvent

PREFIX: Final = "atropos_trainer_"

_GIB: Final = 2**30
_PART: Final = re.compile(r"\{(\w+)\}")
_STEP_TIMES: Final = (names.TIME_STEP, names.TIME_FETCH, names.TIME_TRAIN, names.TIME_SYNC_WAIT)
"""Times that add up over steps; the others are those of the last publish, which several steps may repeat."""

_OF_OTHERS: Final = ("eval/", "sft/")
"""Names that environments and atropos-sft log; this module does not export them."""

STEPS: Final = Metric("steps_total", "counter", "Steps that this process has trained")
TOKENS: Final = Metric("trained_tokens_total", "counter", "Tokens over which it has taken the loss")
SECONDS: Final = Metric(
    "seconds_total",
    "counter",
    "Time of its steps: `step` is the whole, `fetch`, `train` and `sync_wait` are parts of it",
    ("part",),
)
SIGNS: Final = Metric("health_signs_total", "counter", "Signs of trouble that have appeared", ("sign",))

COUNTERS: Final = (STEPS, TOKENS, SECONDS, SIGNS)


class Spelling(NamedTuple):
    """A metric under its name for Prometheus, and the factor that converts values to that name's unit."""

    metric: Metric
    factor: float


def spell(template: str) -> Spelling:
    """Return the spelling of a name, or a family of names, of `metric_names`."""
    name = _PART.sub(r"\1", template).replace("/", "_")
    factor = 1.0
    if template.startswith("time/"):
        name += "_seconds"
    elif name.endswith("_gb"):
        name, factor = name.removesuffix("_gb") + "_bytes", float(_GIB)
    return Spelling(Metric(name, "gauge", f"`{template}` of the last step", tuple(_PART.findall(template))), factor)


def templates() -> tuple[str, ...]:
    """Return the names of `metric_names` that a trainer logs, the plain ones first: a family may match them too."""
    found = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    found = {name for name in found if not name.startswith(_OF_OTHERS)}
    return tuple(sorted(found, key=lambda name: ("{" in name, name)))


@cache
def template_of(name: str) -> tuple[str, str | None] | None:
    """Return the template that `name` is logged under, with the label's value; None for a name that is not ours."""
    for template in templates():
        pattern = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
        match = re.fullmatch(_PART.sub("(.+)", pattern), name)
        if match is not None:
            return template, match[1] if match.groups() else None
    return None


class PrometheusTracker:
    """Serves the metrics of the last step, and counters, for Prometheus to collect."""

    def __init__(self, host: str, port: int) -> None:
        self._last: Mapping[str, float] = {}
        self._steps = 0
        self._tokens = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._signs: Counter[str] = Counter()
        self._endpoint = MetricsEndpoint(self.collect, host=host, port=port)

    @property
    def port(self) -> int:
        return self._endpoint.port

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last = {names.STEP: step, **metrics}
        self._steps += 1
        self._tokens += metrics.get(names.TRAINED_TOKENS, 0.0)
        for name in _STEP_TIMES:
            self._seconds[name.removeprefix("time/")] += metrics.get(name, 0.0)

    def event(self, event: HealthEvent) -> None:
        self._signs[event.sign] += 1

    def close(self) -> None:
        self._endpoint.close()

    def collect(self) -> Iterator[Family]:
        """Yield the counters and the metrics of the last step; called in the thread that serves them."""
        yield STEPS.family(PREFIX, self._steps)
        yield TOKENS.family(PREFIX, self._tokens)
        yield SECONDS.family(PREFIX, *(((part,), value) for part, value in list(self._seconds.items())))
        yield SIGNS.family(PREFIX, *(((sign,), float(count)) for sign, count in list(self._signs.items())))
        samples: defaultdict[str, list[tuple[tuple[str, ...], float]]] = defaultdict(list)
        for name, value in self._last.items():
            found = template_of(name)
            if found is not None:
                template, label = found
                samples[template].append((() if label is None else (label,), value * spell(template).factor))
        for template, values in samples.items():
            yield spell(template).metric.family(PREFIX, *values)
