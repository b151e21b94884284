"""The environment variables of the processes that the checks start; nothing that has to be installed is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tests.gpu.page import ROOT

PATHS = "PYTHONPATH"


def with_repository(environ: Mapping[str, str], **more: str) -> dict[str, str]:
    """Return the variables with which a process imports this repository; packages that were on its path stay there.

    Where nothing can be installed, missing packages are unpacked into a folder that PYTHONPATH names.
    """
    paths = [str(ROOT), *filter(None, [environ.get(PATHS)])]
    return {**environ, **more, PATHS: os.pathsep.join(paths)}
