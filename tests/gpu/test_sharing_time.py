"""A training step and a server's forward on one GPU at the same time: the slow-down of each.

Two processes take turns unless CUDA's Multi-Process Service lets them compute at once; both are measured. A captured
graph of a 1.5B model's layers stands for decoding.
"""

from __future__ import annotations

from tests.gpu.sharing import MpsUnavailable, find, multi_process_service


def test_a_step_and_decoding_share_the_gpu(record_claim):
    found = find("step_beside_server")
    record_claim("step-beside-replay", found["step"])
    record_claim("replay-beside-step", found["replay"])


def test_a_step_and_decoding_share_the_gpu_by_the_multi_process_service(record_claim):
    try:
        with multi_process_service() as variables:
            found = find("step_beside_server", **variables)
    except MpsUnavailable as error:
        record_claim("step-beside-replay-mps", None, reason=str(error))
        record_claim("replay-beside-step-mps", None, reason=str(error))
        return
    record_claim("step-beside-replay-mps", found["step"])
    record_claim("replay-beside-step-mps", found["replay"])
