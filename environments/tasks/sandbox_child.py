"""The program that runs a model's Python in a sandbox: a supervisor that is asked over its standard input, a socket.

`environments.tasks.sandbox.client` starts it with Python's `-I -S`, so that it knows nothing of the packages, the
folder and the variables of the environment that it works for.
"""

from __future__ import annotations

import socket

from environments.tasks.sandbox.supervisor import Supervisor


def main() -> None:
    with socket.socket(fileno=0) as channel:
        Supervisor(channel).serve()


if __name__ == "__main__":
    main()
