"""Requests that offer another protocol, as each of a Java `HttpClient` offers HTTP/2: a server may ignore the offer."""

from __future__ import annotations

from contextlib import suppress

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class UpgradeIgnored(HttpToolsProtocol):
    """One connection: it reads a request with `Upgrade` as one without, unless uvicorn accepts the offer.

    The parser stops after such a head. uvicorn then takes the request for one with an empty body, and its body for the
    next request (Kludex/uvicorn#2722). Here the same head is parsed again, without the offer.
    """

    @property
    def ignores_head(self) -> bool:
        """True from the end of a head that will be parsed again until it is."""
        if not self.parser.should_upgrade() or self.parser.get_method() == b"CONNECT":
            return False
        return not self._should_upgrade()

    def data_received(self, data: bytes) -> None:
        # As in uvicorn, whose handling of the parser's stop does not know where it stopped.
        self._unset_keepalive_if_required()
        rest: bytes | memoryview = data
        try:
            while rest:
                rest = self._parse(rest)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        if not self.ignores_head:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.ignores_head:
            super().on_message_complete()

    def _parse(self, data: bytes | memoryview) -> bytes | memoryview:
        """Parse the data; return what follows a head that was parsed again."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self.ignores_head:
                self._parse_again()
                return memoryview(data)[stop.args[0] :]
            if self._should_upgrade():
                self.handle_websocket_upgrade()
        return b""

    def _parse_again(self) -> None:
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        version = self.parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # httptools before 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(head)
