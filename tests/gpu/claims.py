"""Every claim of the documentation about a GPU, and the file of checks whose run shows it.

A page marks the sentence that makes a claim with an HTML comment, `<!-- gpu: ID -->`; `docs/explanation/gpu.md` lists
all claims with what was measured. Nothing that has to be installed is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

from example_trainer.options.modes import MODES

Value = float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A statement about a GPU and the bounds of the value that would show it.

    Without a bound it is a figure: it is measured and printed, but nothing is promised about it.
    """

    id: str
    text: str
    run: str
    """File in `tests/gpu` whose run records the value."""
    at_least: float | None = None
    at_most: float | None = None
    is_true: bool = False
    """True if the value is a truth value that must be true."""

    @property
    def promises(self) -> bool:
        return self.is_true or self.at_least is not None or self.at_most is not None

    @property
    def limit(self) -> str:
        """Return the bounds in words."""
        if self.is_true:
            return "yes"
        words = {"at least": self.at_least, "at most": self.at_most}
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None) or "-"

    def holds(self, value: Value) -> bool:
        """Return True if a value, as a table prints it, is within the bounds."""
        value = self.parse(self.show(value))
        if self.is_true:
            return value is True
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def show(self, value: Value) -> str:
        """Return a value as a table prints it."""
        if self.is_true:
            return "yes" if value else "no"
        return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.0f}"

    def parse(self, text: str) -> Value:
        """Return the value that `show` printed."""
        return text == "yes" if self.is_true else float(text)


def _of_each_mode() -> list[Claim]:
    """Return the claims of a run through vLLM, for each weight sync mode."""
    claims = []
    for mode in MODES:
        claims += [
            Claim(
                id=f"vllm-{mode}-publishes",
                text=f"`{mode}`: each publish is served under its version (five; two in `lora_restart`)",
                run="test_vllm_modes.py",
                is_true=True,
            ),
            Claim(
                id=f"vllm-{mode}-proof",
                text=f"`{mode}`: largest logprob difference between trainer and server after a publish, bf16",
                run="test_vllm_modes.py",
                at_most=5e-2,
            ),
            Claim(
                id=f"vllm-{mode}-decoding",
                text=f"`{mode}`: tokens a second between publishes, to `shared_vllm`'s",
                run="test_vllm_modes.py",
            ),
        ]
    return claims


CLAIMS: tuple[Claim, ...] = (
    # Shared weights between two processes, without vLLM.
    Claim(
        id="graph-reads-published",
        text="a CUDA graph captured before a publish computes with the published weights, bit for bit",
        run="test_cuda_ipc.py",
        is_true=True,
    ),
    Claim(
        id="one-copy",
        text="memory that mapping the server's weights takes, of the weights",
        run="test_cuda_ipc.py",
        at_most=0.1,
    ),
    Claim(
        id="publish-bandwidth",
        text="rate of a publish into another process's memory, to the same cast within one process",
        run="test_cuda_ipc.py",
        at_least=0.5,
    ),
    Claim(
        id="masters-survive",
        text="the trainer's masters survive the death of the server and are published to its successor",
        run="test_cuda_ipc.py",
        is_true=True,
    ),
    Claim(
        id="replay-beside-step",
        text="time of the server's forward while the trainer trains on the same GPU, to its time alone",
        run="test_sharing_time.py",
    ),
    Claim(
        id="step-beside-replay",
        text="time of a training step while the server computes on the same GPU, to its time alone",
        run="test_sharing_time.py",
    ),
    Claim(
        id="replay-beside-step-mps",
        text="the server's forward beside training, to its time alone, with CUDA's Multi-Process Service",
        run="test_sharing_time.py",
    ),
    Claim(
        id="step-beside-replay-mps",
        text="a training step beside the server, to its time alone, with CUDA's Multi-Process Service",
        run="test_sharing_time.py",
    ),
    Claim(
        id="publish-side-stream",
        text="time of a publish on its own stream beside training, to one on the stream that trains",
        run="test_one_card.py",
    ),
    Claim(
        id="publish-milliseconds",
        text="milliseconds of a publish on its own stream beside training (1.5B shape)",
        run="test_one_card.py",
        at_most=60.0,
    ),
    Claim(
        id="host-masters-step",
        text="time of a step's micro-batches with masters in host memory, to masters on the GPU",
        run="test_one_card.py",
    ),
    Claim(
        id="memory-after-server-death",
        text="memory that is taken after a server was killed while the trainer maps its weights, of the weights; "
        "the trainer's CUDA context included",
        run="test_one_card.py",
    ),
    Claim(
        id="successor-beside-mapping",
        text="a second server starts and is published to while the trainer still maps the killed one's memory",
        run="test_one_card.py",
        is_true=True,
    ),
    # The training step.
    Claim(
        id="packed-to-padded",
        text="tokens a second of packed rows, to rows padded in order of arrival (1.5B shape, log-normal lengths)",
        run="test_learner.py",
        at_least=1.35,
    ),
    Claim(
        id="packed-to-sorted",
        text="tokens a second of packed rows, to rows padded among those of like length",
        run="test_learner.py",
    ),
    Claim(id="mfu", text="model FLOP utilisation of the packed step of a 1.5B shape", run="test_learner.py"),
    Claim(
        id="packed-equals-padded",
        text="difference of packed rows from padded ones, of its length: states and gradients; heads of 64, 128, 256, "
        "grouped keys, a window",
        run="test_layouts.py",
        at_most=3e-2,
    ),
    Claim(
        id="layout-packed",
        text="`choose_layout` takes packed rows for heads of 64, 128 and 256, grouped keys and a window",
        run="test_layouts.py",
        is_true=True,
    ),
    Claim(
        id="head-memory",
        text="peak memory of the loss stage at 16,384 tokens, to full logits",
        run="test_learner.py",
        at_most=0.1,
    ),
    Claim(
        id="head-chunk-time",
        text="time of the loss stage at 1,764 tokens a chunk, to 441",
        run="test_kernels.py",
    ),
    Claim(
        id="compiled-layer",
        text="time of a decoder layer's forward and backward compiled, to eager",
        run="test_kernels.py",
    ),
    Claim(
        id="kernels-compile-step",
        text="time of the packed step of a 1.5B shape with `--kernels compile`, to `eager`",
        run="test_kernels.py",
        at_most=1.0,
    ),
    Claim(
        id="kernels-compile-mfu",
        text="model FLOP utilisation of that step",
        run="test_kernels.py",
    ),
    Claim(
        id="kernels-compile-memory",
        text="peak memory of that step, to that with `eager`",
        run="test_kernels.py",
        at_most=1.0,
    ),
    Claim(
        id="kernels-liger-step",
        text="time of the packed step of a 1.5B shape with `--kernels liger`, to `eager`",
        run="test_kernels.py",
    ),
    Claim(
        id="kernels-liger-mfu",
        text="model FLOP utilisation of that step",
        run="test_kernels.py",
    ),
    Claim(
        id="kernels-liger-memory",
        text="peak memory of that step, to that with `eager`",
        run="test_kernels.py",
    ),
    Claim(
        id="memory-kept-activations",
        text="peak memory of a training step, of what is computed before a run",
        run="test_learner.py",
        at_least=0.6,
        at_most=1.0,
    ),
    Claim(
        id="memory-checkpointed",
        text="the same with gradient checkpointing",
        run="test_learner.py",
        at_least=0.6,
        at_most=1.0,
    ),
    Claim(
        id="memory-offloaded",
        text="the same with gradient checkpointing and the layers' inputs in host memory",
        run="test_learner.py",
        at_least=0.6,
        at_most=1.0,
    ),
    # Numerics.
    Claim(
        id="triton-fp32-default",
        text="largest error of Triton's product of fp32 matrices, as vLLM's attention calls it, against fp64, "
        "of the largest value",
        run="test_numerics.py",
    ),
    Claim(
        id="triton-fp32-ieee",
        text="the same with `TRITON_F32_DEFAULT=ieee`",
        run="test_numerics.py",
        at_most=1e-6,
    ),
    Claim(
        id="head-fp32-logprobs",
        text="largest difference of bf16 logprobs from fp64's, of the trainer's head (logits stay in fp32)",
        run="test_numerics.py",
        at_most=1e-3,
    ),
    Claim(
        id="head-bf16-logprobs",
        text="the same of a plain bf16 linear layer, whose logits are rounded",
        run="test_numerics.py",
    ),
    # Several processes.
    Claim(
        id="fsdp-one-rank",
        text="largest difference of logprobs between one FSDP rank over NCCL and a whole policy",
        run="test_learner.py",
        at_most=1e-3,
    ),
    Claim(
        id="fsdp-step",
        text="difference of one fused AdamW step of an FSDP rank over NCCL from a whole policy's, of its length",
        run="test_fsdp_step.py",
        at_most=0.1,
    ),
    Claim(
        id="nccl-abort",
        text="a publish over NCCL whose peer is gone ends within its limit, and the process goes on",
        run="test_nccl_group.py",
        is_true=True,
    ),
    # Through vLLM.
    *_of_each_mode(),
    Claim(
        id="vllm-one-copy",
        text="`shared_vllm`: copies of the weights that server and trainer hold together, `--master-weights none`",
        run="test_vllm_modes.py",
        at_most=1.1,
    ),
    Claim(
        id="vllm-adapter-decoding",
        text="tokens a second of `lora_only`, to `lora_restart`'s",
        run="test_vllm_modes.py",
        at_least=0.9,
    ),
    Claim(
        id="vllm-demo",
        text="`make demo` learns: greedy accuracy of the trained model",
        run="test_vllm_demo.py",
        at_least=0.9,
    ),
)


def claim_of(identifier: str) -> Claim:
    """Return the claim of this id; an id that is not listed is an error."""
    for claim in CLAIMS:
        if claim.id == identifier:
            return claim
    raise KeyError(f"no claim {identifier!r} in tests/gpu/claims.py; add it there, with the file that shows it")
