"""Signals that ask a broker to stop."""

import signal

from atropos_api.config import BrokerConfig
from atropos_api.server.serve import BrokerServer


def test_a_signal_in_the_middle_of_a_stop_does_not_stop_again():
    """On Redis a stop takes a lock, so that a second signal within it waited for ever."""
    stops = []

    def stop():
        stops.append(server.should_exit)
        server.handle_exit(signal.SIGTERM, None)

    server = BrokerServer(_answer_nothing, BrokerConfig(), stop)
    server.handle_exit(signal.SIGTERM, None)
    assert (stops, server.force_exit) == ([True], False)
    server.handle_exit(signal.SIGINT, None)
    assert (len(stops), server.force_exit) == (1, True)


async def _answer_nothing(*_):
    pass
