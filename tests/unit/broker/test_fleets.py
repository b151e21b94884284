"""Fleets: callers ask for a number of servers here, the launcher follows it, and no restart loses it."""

import pytest

from atropos_api.broker.fleets import LEASE_SECONDS, MOST_FLEETS
from atropos_api.errors import CannotScale, FleetIdInUse, InvalidRequest, UnknownFleet
from atropos_api.wire import FleetReport


class Launcher:
    """One launcher process: it aims at the number of the last answer, which it keeps over its restarts."""

    def __init__(self, broker, launcher_id="launcher-1", *, wanted=1, request=0, **fields):
        self.broker, self.launcher_id, self.fields = broker, launcher_id, {"least": 1, "most": 4} | fields
        self.wanted, self.request, self.running = wanted, request, wanted

    @property
    def fleets(self):
        return self.broker.inner.state.fleets

    def report(self):
        lease = self.fleets.renew(
            "run",
            FleetReport(
                launcher_id=self.launcher_id,
                wanted=self.wanted,
                request=self.request,
                running=self.running,
                **self.fields,
            ),
        )
        if lease.request > self.request:
            self.wanted, self.request = lease.wanted, lease.request
        return lease

    def restarted(self, launcher_id="launcher-2"):
        return Launcher(self.broker, launcher_id, wanted=self.wanted, request=self.request, **self.fields)


@pytest.fixture
def fleets(broker):
    return broker.inner.state.fleets


@pytest.fixture
def launcher(broker):
    launcher = Launcher(broker)
    launcher.report()
    return launcher


def events(broker):
    return [event.data for event in broker.inner.state.events.after(0) if event.type == "fleet-changed"]


def test_a_request_is_followed_once_the_launcher_s_report_names_it(fleets, launcher, broker):
    number = fleets.scale("run", 3)
    assert (fleets.is_followed("run", number), fleets.describe("run").followed) == (False, False)
    assert launcher.report().wanted == 3
    assert not fleets.is_followed("run", number), "it has read the number, and not yet reported it"
    launcher.report()
    assert fleets.is_followed("run", number)
    assert (fleets.describe("run").wanted, fleets.describe("run").followed) == (3, True)
    assert [(data["wanted"], data["followed"]) for data in events(broker)] == [(1, True), (3, False), (3, True)]


def test_of_two_requests_the_newer_one_counts_and_both_are_answered(fleets, launcher):
    older, newer = fleets.scale("run", 3), fleets.scale("run", 2)
    launcher.report()
    launcher.report()
    assert launcher.wanted == 2
    assert fleets.is_followed("run", older)
    assert fleets.is_followed("run", newer)
    assert fleets.describe("run").wanted == 2, "so the caller who asked for three sees that it is two"


def test_a_launcher_that_cannot_have_so_many_or_whose_server_was_drained_lowers_the_number(fleets, launcher):
    fleets.scale("run", 3)
    launcher.report()
    launcher.wanted = 2
    launcher.report()
    assert fleets.describe("run").wanted == 2
    launcher.wanted = 1
    fleets.scale("run", 4)
    assert launcher.report().wanted == 4, "the request is newer than what the launcher had found"


def test_what_a_launcher_cannot_run_is_refused_with_its_reason(fleets, broker):
    with pytest.raises(UnknownFleet, match="no launcher reports on a fleet 'run' \\(known: none\\)"):
        fleets.scale("run", 2)
    Launcher(broker, limit="there are four GPUs").report()
    for wanted, reason in ((0, "runs 1 to 4 servers, not 0$"), (5, "1 to 4 servers, not 5: there are four GPUs")):
        with pytest.raises(CannotScale, match=reason):
            fleets.scale("run", wanted)
    Launcher(broker, fixed="mode lora_restart replaces its one server").report()
    with pytest.raises(CannotScale, match="is fixed: mode lora_restart"):
        fleets.scale("run", 2)
    assert fleets.describe("run").wanted == 1


def test_a_second_launcher_of_the_fleet_is_refused_until_the_first_one_s_lease_is_over(fleets, launcher, broker):
    successor = launcher.restarted()
    with pytest.raises(FleetIdInUse, match="belongs to another launcher for another 15 s"):
        successor.report()
    broker.now += LEASE_SECONDS
    assert fleets.select().fleets == [], "no launcher would carry a request out"
    successor.report()
    with pytest.raises(FleetIdInUse):
        launcher.report()  # it was stopped for a long time, and resumes
    fleets.remove("run", launcher.launcher_id)
    assert len(fleets.select().fleets) == 1, "it removes only its own lease"
    fleets.remove("run", successor.launcher_id)
    assert fleets.select().fleets == []
    with pytest.raises(UnknownFleet):
        fleets.remove("run", successor.launcher_id)


def test_the_number_survives_a_restart_of_the_broker_and_one_of_the_launcher(launcher, broker):
    launcher.fleets.scale("run", 3)
    launcher.report()
    launcher.report()
    broker.restart()
    assert not launcher.fleets.select().complete
    launcher.report()
    assert (launcher.fleets.describe("run").wanted, launcher.fleets.describe("run").request) == (3, 1)
    broker.now += LEASE_SECONDS
    assert launcher.fleets.select().complete
    successor = launcher.restarted()
    successor.report()
    assert launcher.fleets.describe("run").wanted == 3
    assert launcher.fleets.scale("run", 2) == 2, "the count of requests continues"


def test_a_request_that_no_launcher_followed_ends_with_the_lease(fleets, launcher, broker):
    number = fleets.scale("run", 3)
    broker.now += LEASE_SECONDS
    with pytest.raises(UnknownFleet):
        fleets.is_followed("run", number)
    launcher.report()
    assert (fleets.describe("run").wanted, fleets.is_followed("run", number)) == (1, False)


def test_the_number_of_fleets_is_limited(fleets, broker):
    for number in range(MOST_FLEETS):
        fleets.renew(f"f{number}", FleetReport(launcher_id="launcher-1", wanted=1, running=1, least=1, most=1))
    with pytest.raises(InvalidRequest, match="no more are kept"):
        Launcher(broker).report()
