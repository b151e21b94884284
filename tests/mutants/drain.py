"""One-line faults of the choice how long a publish drains."""

from __future__ import annotations

from .mutant import Mutant

_DRAIN = "example_trainer/serving/drain.py"
_TIMES = "example_trainer/serving/vllm/step_times.py"
_CHOICE = "unit/serving/test_drain.py::test_"

DRAIN: tuple[Mutant, ...] = (
    Mutant(
        "the time that idle places waste is forgotten",
        _DRAIN,
        "losses = lost + prefill",
        "losses = prefill",
        f"{_CHOICE}long_outputs_are_paused_at_once_for_what_it_costs_to_compute_them_again",
    ),
    Mutant(
        "what is computed again is forgotten",
        _DRAIN,
        "losses = lost + prefill * shared *",
        "losses = lost + 0 * shared *",
        f"{_CHOICE}outputs_that_are_about_to_end_are_waited_for",
    ),
    Mutant(
        "an output's limit is forgotten",
        _DRAIN,
        'return np.where(reached >= np.asarray(running["token_limits"])[:, None], 0.0, survival)',
        "return survival",
        f"{_CHOICE}the_limit_of_a_request_is_known_whatever_others_did_before_it",
    ),
    Mutant(
        "a shared prefix counts for each request",
        _DRAIN,
        "prefill * shared * (survival",
        "prefill * (survival",
        f"{_CHOICE}a_prefix_that_requests_share_is_computed_again_once",
    ),
    Mutant(
        "the time of a pause counts as a step's",
        _TIMES,
        "        self._ended = None\n",
        "        pass\n",
        f"{_CHOICE}the_time_after_a_pause_or_an_idle_time_is_not_a_steps_time",
    ),
    Mutant(
        "places that are idle after a part of the wait are forgotten",
        _DRAIN,
        "places = max(places, requests)",
        "places = requests",
        f"{_CHOICE}after_a_part_of_the_wait_the_places_of_ended_requests_still_count",
    ),
    Mutant(
        "a wait that was too short is not made longer",
        "example_trainer/serving/fence.py",
        "while plan.seconds > 0 and not await self._gate.wait_until_empty(plan.seconds):",
        "if plan.seconds > 0 and not await self._gate.wait_until_empty(plan.seconds):",
        "unit/serving/test_fence.py::test_auto_waits_for_a_request_that_is_about_to_end",
    ),
)
