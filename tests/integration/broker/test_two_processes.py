"""Processes of one environment program: two at once are two environments; a successor has the name of the first."""

import socket
import time

import pytest

from atropos_api.client import BrokerClient, BrokerRefused
from atropos_api.testing import served_broker
from atropos_api.wire import EnvironmentRequest


class Process:
    """One process of an environment program: its own connection, with a heartbeat open until it is killed."""

    def __init__(self, url, process, **options):
        self.process = process
        self.options = {"name": "env", "group_size": 4, "max_token_length": 64, "process": process} | options
        self.client = BrokerClient(url, retry_seconds=0.0)
        self.register()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def register(self):
        self.info = self.client.register_environment(EnvironmentRequest(**self.options))
        return self.info

    def heartbeat(self):
        return self.client.heartbeat(self.info.environment_id, process=self.process)

    def wait(self, url):
        """Open a heartbeat that stays unanswered, and return its connection."""
        host, port = url.removeprefix("http://").split(":")
        revision = self.heartbeat().revision
        connection = socket.create_connection((host, int(port)))
        path = f"/v1/environments/{self.info.environment_id}/heartbeat"
        query = f"process={self.process}&revision={revision}&wait=60"
        connection.sendall(f"PUT {path}?{query} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        time.sleep(0.2)
        return connection


def test_two_processes_of_one_program_are_two_environments_while_both_run():
    with served_broker() as url, Process(url, "a") as first, first.wait(url), Process(url, "b") as second:
        assert (first.info.display_name, second.info.display_name) == ("env", "env_1")
        assert (first.register().display_name, second.register().display_name) == ("env", "env_1")
        rows = first.client.status()["environments"]
        assert [(row["name"], row["weight"], row["connected"]) for row in rows] == [
            ("env", 1, True),
            ("env_1", 1, True),
        ]


def test_the_successor_of_a_killed_process_gets_its_id_and_a_process_that_lost_its_id_is_told():
    with served_broker() as url, Process(url, "a") as first:
        first.wait(url).close()
        time.sleep(0.2)
        with Process(url, "b") as second:
            assert second.info.environment_id == first.info.environment_id
            with pytest.raises(BrokerRefused, match="another process's; register again") as refused:
                first.heartbeat()
            assert refused.value.kind == "unknown-environment"
            with second.wait(url):
                assert first.register().display_name == "env_1"
                assert first.heartbeat().state == "wait"


def test_a_process_that_leaves_while_its_heartbeat_waits_is_not_there_again():
    """It closes the connection of the heartbeat first; the broker learns of both in the same moment."""
    with served_broker() as url, Process(url, "a") as process:
        for _ in range(5):
            process.register()
            process.wait(url).close()
            process.client.leave(process.info.environment_id)
            time.sleep(0.05)
            assert [row["connected"] for row in process.client.status()["environments"]] == [False]
