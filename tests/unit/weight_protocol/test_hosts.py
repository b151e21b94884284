"""A host name that does not exist is refused at once; a name server that does not answer is waited for."""

from __future__ import annotations

import socket

import pytest

from example_trainer.errors import ServerUnavailable
from example_trainer.weight_protocol.client import check_host


@pytest.fixture
def look_ups_fail(monkeypatch):
    """A function that makes look-ups of names fail with an error number of `getaddrinfo`."""

    def fail(number, reason):
        def look_up(*_, **__):
            raise socket.gaierror(number, reason)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return fail


def test_a_name_that_does_not_exist_is_called_mistyped(look_ups_fail):
    look_ups_fail(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(ServerUnavailable, match=r"--vllm-host gpu-3: there is no such host .* check the spelling"):
        check_host("http://gpu-3:9001", "--vllm-host")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (socket.EAI_AGAIN, "Temporary failure in name resolution"),
        (socket.EAI_FAIL, "Non-recoverable failure in name resolution"),  # it refused to answer
    ],
)
def test_a_name_server_that_does_not_answer_is_no_spelling_mistake(look_ups_fail, number, reason):
    look_ups_fail(number, reason)
    check_host("http://gpu-3:9001", "--vllm-host")
