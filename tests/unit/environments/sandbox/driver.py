"""A program that runs code in the tool: `python driver.py < request` prints the results, both as JSON.

The request has the `settings` of the tool, the `codes` to run, and in `forbid` what is denied to this process and its
children, as on other machines: "user namespaces" (by a sysctl) or "namespaces" (by a container's filter).
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import platform
import struct
import sys

import anyio
import psutil

from environments.sandbox import system_calls
from environments.sandbox.python_tool import PythonTool, SandboxUnavailable

NEW_USER, NEW_ANY = 0x10000000, 0x7E020000
NUMBERS = {"x86_64": (56, 435, 272, 165), "aarch64": (220, 435, 97, 40)}
PR_SET_CHILD_SUBREAPER = 36


def forbid(what: str) -> None:
    clone, clone3, unshare, mount = NUMBERS[platform.machine()]
    load, mask, give, equal = 0x20, 0x54, 0x06, 0x15
    allow, eperm, enosys = 0x7FFF0000, 0x00050001, 0x00050026
    program = [(load, 0, 0, 0), (equal, 0, 1, clone3), (give, 0, 0, enosys)]
    if what == "namespaces":
        program += [(equal, 0, 1, mount), (give, 0, 0, eperm)]
    flags = NEW_USER if what == "user namespaces" else NEW_ANY
    for number in (clone, unshare):
        program += [(equal, 0, 5, number), (load, 0, 0, 16), (mask, 0, 0, flags), (equal, 0, 1, 0)]
        program += [(give, 0, 0, allow), (give, 0, 0, eperm)]
    program.append((give, 0, 0, allow))
    system_calls.install(b"".join(struct.pack("=HBBI", *each) for each in program))


async def main() -> None:
    request = json.load(sys.stdin)
    # Processes that the tool leaves behind become children of this process, which finds them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if request["forbid"]:
        forbid(request["forbid"])
    tool = PythonTool(**request["settings"])
    try:
        tool.probe()
    except SandboxUnavailable as error:
        sys.stdout.write(json.dumps({"refused": str(error)}))
        return
    results = {}

    async def run(name: str, code: str) -> None:
        results[name] = dataclasses.asdict(await tool.run(code))

    async with anyio.create_task_group() as group:
        for name, code in request["codes"].items():
            group.start_soon(run, name, code)
    tool.close()
    left = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    sys.stdout.write(json.dumps({"way": str(tool.way), "isolated": tool.isolated, "results": results, "left": left}))


if __name__ == "__main__":
    anyio.run(main)
