"""A publish between its begin and its end: the server stands still, and the trainer shows that it lives."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Literal, Self

from example_trainer.weights.attachment import Attachment


class OpenPublish:
    """A fence that a server has put up; its lease is renewed until this is closed, however long the write takes."""

    def __init__(
        self,
        attachment: Attachment,
        *,
        lease_seconds: float,
        drain_seconds: float,
        in_flight: Literal["drain", "recompute", "finish", "keep_kv"],
    ) -> None:
        self.attachment = attachment
        self.began = time.monotonic()
        client = attachment.client
        self.fence = client.begin_publish(lease_seconds=lease_seconds, drain_seconds=drain_seconds, in_flight=in_flight)
        self._lease = ExitStack()
        self._lease.enter_context(client.lease(self.fence.publish_id, lease_seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Renew the lease no longer; the fence stays up until the publish is ended or the lease lapses."""
        self._lease.close()
