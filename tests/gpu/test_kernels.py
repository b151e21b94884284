"""The learner's kernels on a GPU: the head's chunks and its weight gradient, attention of variable length, a compiled
decoder layer.

Random tensors of a 1.5B model's head; nothing here needs a broker or a server. Each test prints its figures (`-s`).
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from example_trainer.errors import KernelsUnusable
from example_trainer.model import load_policy
from example_trainer.modeling import attention
from example_trainer.modeling import logprobs as head
from example_trainer.modeling.attention import Segment, build_layout, install, packed_attention
from example_trainer.modeling.kernels import install_kernels, refuse_kernels
from example_trainer.modeling.loading import PolicyOptions
from tests.gpu.training import flop_utilisation, make_model, make_rows, peak_bytes, run_step

TOKENS, VOCABULARY, HIDDEN_SIZE = 16_384, 151_936, 1536


def make_head():
    torch.manual_seed(0)
    weight = (torch.randn(VOCABULARY, HIDDEN_SIZE, device="cuda") / HIDDEN_SIZE**0.5).bfloat16().requires_grad_()
    hidden = torch.randn(TOKENS, HIDDEN_SIZE, device="cuda").bfloat16().requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), device="cuda")


def run_head(hidden, weight, labels):
    hidden.grad = weight.grad = None
    index, ones = torch.arange(len(labels), device="cuda"), torch.ones(len(labels), device="cuda")
    logprobs, _ = head.token_logprobs(hidden, weight, index, labels, ones, chunk_tokens=len(labels))
    logprobs.sum().backward()


def add_beside(total, left, right):
    """Compute a chunk's gradient as a product of its own, which is then added."""
    total += head._product(left, right)


def test_time_and_memory_of_the_head_by_chunk(monkeypatch, record_claim, report, seconds_of):
    inputs = make_head()
    chosen = head.most_chunk_tokens("cuda", (VOCABULARY, HIDDEN_SIZE), in_16_bits=True)
    found = {}
    for chunk in (441, chosen, 1764):
        with monkeypatch.context() as patched:
            patched.setattr(head, "most_chunk_tokens", lambda *_, chunk=chunk, **__: chunk)
            found[chunk] = seconds_of(lambda: run_head(*inputs)), peak_bytes(lambda: run_head(*inputs), *inputs[:2])
    with monkeypatch.context() as patched:
        patched.setattr(head, "most_chunk_tokens", lambda *_, **__: 441)
        patched.setattr(head, "_add_product", add_beside)
        seconds, most = seconds_of(lambda: run_head(*inputs)), peak_bytes(lambda: run_head(*inputs), *inputs[:2])
    for chunk, (time, peak) in found.items():
        report(f"head in chunks of {chunk}, of 441 with a product beside: time", f"{time / seconds:.2f}")
        report(f"head in chunks of {chunk}, of 441 with a product beside: peak", f"{peak / most:.2f}")
    record_claim("head-chunk-time", found[1764][0] / found[441][0])
    assert found[chosen][1] <= 1.05 * most  # 1.02 on an H100


def test_time_of_a_compiled_decoder_layer(record_claim, seconds_of):
    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=HIDDEN_SIZE, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    layer = Qwen2DecoderLayer(config, 0).to("cuda", torch.bfloat16)
    states = torch.randn(8, 1024, HIDDEN_SIZE, device="cuda").bfloat16().requires_grad_()
    places = torch.arange(1024, device="cuda")[None]
    angles = Qwen2RotaryEmbedding(config).to("cuda")(states, places)

    def seconds(run):
        return seconds_of(lambda: run(states, position_embeddings=angles).float().sum().backward())

    eager = seconds(layer)
    record_claim("compiled-layer", seconds(torch.compile(layer)) / eager)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), layers=28, vocabulary=VOCABULARY)


@pytest.mark.parametrize("kind", ["compile", "liger"])
def test_time_and_memory_of_a_step_by_other_kernels(kind, request, record_claim, seconds_of):
    """The kernels are compared with plain operations when they are installed, as at the start of a run."""
    try:
        refuse_kernels(kind, torch.device("cuda"))  # before the time that a model takes
        directory = request.getfixturevalue("model")
        policy = load_policy(PolicyOptions(model_name=str(directory), dtype="bfloat16", device="cuda"))
        install(policy.module)
        rows = make_rows()
        plain, most = (
            seconds_of(lambda: run_step(policy, rows, "packed")),
            peak_bytes(lambda: run_step(policy, rows, "packed")),
        )
        passes = install_kernels(policy, kind, "packed")
    except KernelsUnusable as error:
        for figure in ("step", "mfu", "memory"):
            record_claim(f"kernels-{kind}-{figure}", None, reason=str(error))
        return
    seconds = seconds_of(lambda: run_step(policy, rows, "packed", passes))
    record_claim(f"kernels-{kind}-step", seconds / plain)
    record_claim(f"kernels-{kind}-memory", peak_bytes(lambda: run_step(policy, rows, "packed", passes)) / most)
    unknown = f"the peak of {torch.cuda.get_device_name()} is not known here"
    record_claim(f"kernels-{kind}-mfu", flop_utilisation(policy, rows, seconds), reason=unknown)


def test_the_weights_gradient_in_place_is_that_of_fp32_products(report):
    torch.manual_seed(0)
    left, right = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((4096, 700), (700, 1536)))
    total = torch.randn(4096, 1536, device="cuda")
    exact = total.double() + left.double() @ right.double()
    head._add_product(total, left, right)
    apart = float((total - exact).abs().max() / exact.abs().max())
    report("the head's weight gradient, from fp64", f"{apart:.1e} of the largest", "below 1e-5")
    assert apart < 1e-5


@pytest.mark.parametrize("heads", [(12, 2), (8, 8)], ids=["shared key heads", "own key heads"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_variable_length_kernel_attends_like_the_buckets(width, heads):
    torch.manual_seed(0)
    segments = [Segment(0, 100), Segment(100, 37), Segment(137, 163)]
    query, key, value = (torch.randn(1, count, 300, width, device="cuda").bfloat16() for count in (*heads, heads[1]))
    assert attention.uses_varlen(query.device, query.dtype)
    by_kernel, by_bucket = (
        packed_attention(None, query, key, value, None, build_layout(segments, 300, query.device, varlen=varlen))[0]
        for varlen in (True, False)
    )
    torch.testing.assert_close(by_kernel.flatten(2), by_bucket.flatten(2), rtol=2e-2, atol=2e-2)
