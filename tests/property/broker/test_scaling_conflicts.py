"""Any interleaving of scalers, launchers, restarts and time: no caller hears that a number is followed if it is not."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from atropos_api.broker.fleets import LEASE_SECONDS, Fleets
from atropos_api.errors import CannotScale, FleetIdInUse, UnknownFleet
from atropos_api.wire import FleetReport

MOST = 5


class Scaling(RuleBasedStateMachine):
    """Two launcher processes of one run directory, whose record both read, and callers that ask for numbers."""

    @initialize()
    def begin(self):
        self.now = 0.0
        self.record = (1, 0)
        self.alive = "launcher-1"
        self.asked = {}
        self.start_broker()

    def start_broker(self):
        self.fleets = Fleets(lambda: self.now)

    @rule()
    def broker_restarts(self):
        self.start_broker()
        self.asked = {}

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(wanted=st.integers(0, MOST + 1))
    def scale(self, wanted):
        try:
            number = self.fleets.scale("run", wanted)
        except (UnknownFleet, CannotScale):
            return
        assert 1 <= wanted <= MOST
        self.asked[number] = wanted

    @rule(name=st.sampled_from(["launcher-1", "launcher-2"]))
    def launcher_reports(self, name):
        wanted, request = self.record
        report = FleetReport(launcher_id=name, wanted=wanted, request=request, running=wanted, least=1, most=MOST)
        try:
            lease = self.fleets.renew("run", report)
        except FleetIdInUse:
            return
        assert lease.request >= request
        if lease.request > request:
            self.record = (lease.wanted, lease.request)

    @rule()
    def server_is_drained(self):
        self.record = (max(0, self.record[0] - 1), self.record[1])

    @invariant()
    def a_followed_number_is_in_the_record(self):
        """Also after a restart of the broker or a lease that has ended."""
        for fleet in self.fleets.select().fleets:
            assert fleet.request >= self.record[1] or not fleet.followed
            if fleet.followed:
                assert self.record[1] >= fleet.request

    @invariant()
    def the_newest_request_decides_unless_the_launcher_has_lowered_it(self):
        wanted, request = self.record
        if request in self.asked:
            assert wanted <= self.asked[request]


TestScaling = Scaling.TestCase
