"""Code that takes more than its limits: each with the limits that may end it, and words that it must not print."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bomb:
    """Such code; `ended_by` are the limits that stop it, empty if the kernel refuses, which the code then prints."""

    code: str
    ended_by: tuple[str, ...]
    prints: str = ""


FORKS = """
import os, time
children = 0
try:
    for _ in range(400):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        children += 1
except OSError as error:
    print("refused after", children, type(error).__name__, flush=True)
else:
    print("REACHED", children, "children", flush=True)
"""

FORKS_FOR_EVER = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

MEMORY_OF_MANY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(100 << 20)
        for at in range(0, len(held), 4096):
            held[at] = 1
        time.sleep(30)
time.sleep(8)
print("REACHED", flush=True)
"""

MEMORY_OF_FILES = """
import os
held = bytearray(180 << 20)
for at in range(0, len(held), 4096):
    held[at] = 1
with open("fill", "wb") as file:
    for _ in range(100):
        file.write(bytes(1 << 20))
import time
time.sleep(2)
print("REACHED", len(held), flush=True)
"""

SHARED_MEMORY = """
import mmap, os
for _ in range(4):
    if os.fork() == 0:
        held = mmap.mmap(-1, 100 << 20)
        for at in range(0, len(held), 4096):
            held[at] = 1
            if at % (1 << 20) == 0:
                held.madvise(mmap.MADV_DONTNEED)
        import time
        time.sleep(8)
        print("REACHED", flush=True)
        os._exit(0)
while True:
    os.wait()
"""

FILLING = """
try:
    for number in range(200):
        with open(f"file{number}", "wb") as file:
            file.write(bytes(1 << 20))
    print("REACHED")
except OSError as error:
    print("refused at", number, error.strerror)
"""

MANY_FILES = """
import time
try:
    for number in range(20000):
        open(f"file{number}", "w").close()
    time.sleep(2)
    print("REACHED")
except OSError as error:
    print("refused at", number, error.strerror)
"""

LARGE_FILE = """
try:
    with open("large", "wb") as file:
        for _ in range(200):
            file.write(bytes(1 << 20))
            file.flush()
    print("REACHED")
except OSError as error:
    print("refused", error.strerror)
"""

TIME_OF_MANY = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        while True:
            pass
time.sleep(30)
print("REACHED")
"""

THREADS = """
import threading, time
for _ in range(400):
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
print("REACHED")
"""

DESCRIPTORS = """
import os
held = [os.pipe() for _ in range(100)]
print("REACHED")
"""

DEAF = """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
time.sleep(30)
print("REACHED")
"""

LASTING: dict[str, Bomb] = {
    "sleep": Bomb("import time\ntime.sleep(30)\nprint('REACHED')", ("time",)),
    "a loop": Bomb("while True:\n    pass", ("time",)),
    "time of many": Bomb(TIME_OF_MANY, ("time",)),
    "deaf to signals": Bomb(DEAF, ("time",)),
    "stopped": Bomb("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('REACHED')", ("time",)),
    "output": Bomb("import sys\nwhile True:\n    sys.stdout.write('x' * 65536)", ("time",)),
    "forks for ever": Bomb(FORKS_FOR_EVER, ("time", "processes", "memory")),
}
"""Those that run until their time is over."""

GREEDY: dict[str, Bomb] = {
    "forks": Bomb(FORKS, ("", "processes", "memory"), "refused after"),
    "threads": Bomb(THREADS, ("", "processes", "memory"), "can't start new thread"),
    "memory": Bomb("held = bytearray(1 << 30)\nprint('REACHED')", ("",), "MemoryError"),
    "memory of many": Bomb(MEMORY_OF_MANY, ("memory",)),
    "memory of files": Bomb(MEMORY_OF_FILES, ("memory",)),
    "shared memory": Bomb(SHARED_MEMORY, ("memory", ""), "Operation not permitted"),
    "files": Bomb(FILLING, ("",), "No space left"),
    "many files": Bomb(MANY_FILES, ("", "files"), "refused at"),
    "a large file": Bomb(LARGE_FILE, ("",), "refused"),
    "descriptors": Bomb(DESCRIPTORS, ("",), "Too many open files"),
}
