"""A publish between its begin and its end: the server stands still, and the trainer shows that it lives."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import ExitStack
from typing import Any, Self

from example_trainer.options.publish import InFlight
from example_trainer.weights.attachment import Attachment
from example_trainer.weights.errors import ServerRefused, ServerUnavailable
from example_trainer.weights.server_client import Fence, ServerClient

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.5
_GIVE_UP_SECONDS = 5.0


class OpenPublish:
    """A fence that a server has put up; its lease is renewed until this is closed, however long the write takes."""

    def __init__(
        self, attachment: Attachment, *, lease_seconds: float, drain_seconds: float, in_flight: InFlight
    ) -> None:
        self.attachment = attachment
        self.began = time.monotonic()
        self.publish_id = uuid.uuid4().hex
        client = attachment.client
        self._lease = ExitStack()
        self._lease.enter_context(client.lease(self.publish_id, lease_seconds))
        try:
            self.fence = begin_after_others(
                client,
                self.publish_id,
                lease_seconds=lease_seconds,
                drain_seconds=drain_seconds,
                in_flight=in_flight,
            )
        except BaseException:
            self.give_up()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def end(self, version: int) -> dict[str, Any]:
        """The weights are whole: have the server go on under this version."""
        return self.attachment.client.end_publish(self.publish_id, version)

    def give_up(self) -> None:
        """Have the server go on with what its weights are now, instead of standing still until the lease lapses."""
        self.close()
        try:
            self.attachment.client.abort_publish(self.publish_id, timeout_seconds=_GIVE_UP_SECONDS)
        except (ServerRefused, ServerUnavailable) as error:
            logger.debug("publish %s is left to its lease: %s", self.publish_id, error)

    def close(self) -> None:
        """Renew the lease no longer; the fence stays up until the publish is ended or the lease lapses."""
        self._lease.close()


def begin_after_others(
    client: ServerClient, publish_id: str, *, lease_seconds: float, drain_seconds: float, in_flight: InFlight
) -> Fence:
    """Begin a publish once no other is under way: that of a trainer that has died lapses by and by.

    Raises `ServerRefused` where another one is renewed for longer than both leases.
    """
    deadline: float | None = None
    while True:
        try:
            return client.begin_publish(
                publish_id, lease_seconds=lease_seconds, drain_seconds=drain_seconds, in_flight=in_flight
            )
        except ServerRefused as error:
            if error.kind != "publish-in-progress":
                raise
            now = time.monotonic()
            if deadline is None:
                deadline = now + lease_seconds + (error.retry_after_seconds or lease_seconds)
                logger.info("waiting for an earlier publish to end or to lapse: %s", error)
            if now >= deadline:
                raise
            time.sleep(_ASK_SECONDS)
