"""Measures what the machine itself needs for a group's bytes, in and out: a copy in memory, and loopback TCP."""

from __future__ import annotations

import socket
import threading
import time

BLOCK_BYTES = 1 << 18
TOTAL_BYTES = 1 << 30


def memcpy_ms(size: int) -> float:
    """Return the milliseconds that copying a body in and out takes."""
    source, target = bytes(size), bytearray(size)
    rounds = max(1, TOTAL_BYTES // size)
    began = time.perf_counter()
    for _ in range(rounds):
        target[:] = source
    return 2e3 * (time.perf_counter() - began) / rounds


def loopback_cpu_ms(size: int) -> float:
    """Return the milliseconds of CPU, sender and receiver together, to move a body over loopback TCP in and out."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        reader = threading.Thread(target=_drain, args=(listener,))
        reader.start()
        block = bytes(BLOCK_BYTES)
        with socket.create_connection(listener.getsockname()) as connection:
            before = time.process_time()
            for _ in range(TOTAL_BYTES // BLOCK_BYTES):
                connection.sendall(block)
        reader.join()
        cpu = time.process_time() - before
    return 2e3 * cpu * size / TOTAL_BYTES


def _drain(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    buffer = bytearray(BLOCK_BYTES)
    with connection:
        while connection.recv_into(buffer):
            pass
