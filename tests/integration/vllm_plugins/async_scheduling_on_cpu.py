"""A plugin of vLLM for tests: asynchronous scheduling on a CPU, which vLLM's platform switches off there."""

from __future__ import annotations

import sys
from typing import Any


def install() -> None:
    """Switch it on again after the platform has looked at the configuration, once per process."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    if hasattr(CpuPlatform, "is_asynchronous"):
        return
    CpuPlatform.is_asynchronous = True
    check = CpuPlatform.check_and_update_config.__func__

    def checking(platform: Any, vllm_config: Any) -> None:
        check(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checking)
    AsyncScheduler.__init__ = _telling(AsyncScheduler.__init__)


def _telling(make: Any) -> Any:
    def making(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        sys.stderr.write("the engine has the asynchronous scheduler\n")  # a test looks for it in the server's log
        sys.stderr.flush()

    return making
