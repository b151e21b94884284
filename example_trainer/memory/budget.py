"""The bytes that one configuration needs on the trainer's GPU: pure arithmetic, nothing measured, no torch.

With shared tensors the served weights exist once, inside vLLM's share of the GPU, and the trainer adds masters,
gradients, optimizer states and activations. In the other modes the trainer holds weights of its own: a copy in the
served dtype, or with adapters the frozen base. Several ranks share masters, gradients and states of full weights, and
with tensor parallelism also the gathered layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from example_trainer.memory.shapes import ADAPTED_BY_DEFAULT, DTYPE_BYTES, ModelShape
from example_trainer.options.layer_indices import parse_layer_indices
from example_trainer.options.publish import served_rank
from example_trainer.options.training_options import TrainingOptions

OPTIMIZER_STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0, "adafactor": 0.02}
"""Bytes per trained parameter besides its master: two fp32 or 1-byte moments, or a row and a column per matrix."""

RUNTIME_BYTES = 1.5 * 2**30
"""Bytes of a process on the GPU in addition to its tensors: the CUDA context, vLLM's graphs, the allocator's slack."""

SERVER_WORKSPACE_BYTES = 2 * 2**30
"""Bytes to leave vLLM in addition to weights and cache: activations of its longest batch, sampling and graphs.

A share that is chosen here includes them; a share that is given is not refused for lack of them, because a small model
needs less.
"""

WORKING_SET = (15.0, 4.0)
"""Values per token that one layer keeps for its backward, in hidden and in intermediate sizes.

Torch saves 10.6 and 4.0 in a Llama layer, 14.4 and 4.0 in a Qwen 3 layer, which normalises queries and keys too.
"""

LAYER_GRADIENTS = 2.0
"""Values per token, in intermediate sizes, that the backward of a layer adds at its peak: both halves of the MLP's.

On an H100 a step with checkpointing took 1.01 times the sum without this term.
"""

ROUNDED_AT_ONCE = 1 << 24
"""Weights that stochastic rounding holds in fp32 at one time, with their gradients; a larger tensor is held whole."""

LOGIT_COPIES = 3
"""Number of fp32 arrays of the size chunk x vocabulary that the chunked head holds at its peak."""

MOST_CHUNK_LOGITS = 1 << 26
"""Most logits of a chunk on a GPU, however many tokens `--logprob-chunk-tokens` allows."""

FOUR_BIT_BYTES = 0.516
"""Bytes of an nf4 weight with its doubly quantised scales."""

QUANTISED_BYTES = {"fp8": 1.0}
"""Bytes of a served weight under `--vllm-quantization`; half a byte, a lower bound, under a method not named here."""

ADAFACTOR_COPIES = 3
"""Number of fp32 arrays of the largest tensor's size that Adafactor's step makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The bytes that a run needs on the trainer's GPU, by purpose, and those that it needs on the host (`host`)."""

    server: float
    """vLLM's share of this GPU; 0 if it serves from another."""
    weights: float
    """The trainer's own weights in the dtype of the forward; 0 if it reads the server's."""
    masters: float
    gradients: float
    states: float
    copies: float
    """Reference policy and older versions."""
    working: float
    """The most that activations, an optimizer's step or the loading need in addition to all other parts."""
    runtime: float
    teacher: float = 0.0
    """The share that a teacher's server takes of this GPU; 0 if there is none on it."""
    host: float = 0.0

    @property
    def trainer(self) -> float:
        held = self.weights + self.masters + self.gradients + self.states + self.copies
        return held + self.working + self.runtime

    @property
    def total(self) -> float:
        return self.server + self.teacher + self.trainer


def budget(shape: ModelShape, config: TrainingOptions, *, server_bytes: float, teacher_bytes: float = 0.0) -> Budget:
    """Compute the bytes of one run whose servers, of policy and teacher, take so many of the trainer's GPU."""
    trained, served = trained_parameters(shape, config), served_bytes(shape, config)
    is_sharded = config.world_size > 1 and not config.trains_adapter
    ranks = config.world_size if is_sharded else 1
    held = trained / ranks
    master_bytes = 0 if config.master_weights == "none" else 4
    gradients = (master_bytes or served) * held
    masters = master_bytes * (shape.parameters / ranks if is_sharded else held)
    if not master_bytes and (is_sharded or config.trains_adapter):
        masters = served * (shape.parameters / ranks if is_sharded else held)  # `weights` does not count these
    states = OPTIMIZER_STATE_BYTES.get(config.optimizer, 8.0) * held
    on_host = config.master_weights == "host"
    weights = _own_weights(shape, config, served, trained)
    loading = 4.0 * shape.parameters if masters and not on_host and not config.trains_adapter else 0.0
    steady = weights + (0.0 if on_host else masters + gradients + states)
    working = max(
        _activations(shape, config, served),
        _step_bytes(shape, config) / ranks,
        loading / ranks - steady,
    )
    return Budget(
        server=server_bytes,
        weights=weights,
        masters=0.0 if on_host else masters,
        gradients=0.0 if on_host else gradients,
        states=0.0 if on_host else states,
        copies=_copies(config) * served * held,
        working=working,
        runtime=RUNTIME_BYTES * (1 + bool(server_bytes) + bool(teacher_bytes)),
        teacher=teacher_bytes,
        # In addition to the gradients in fp32: a pinned copy of each in the dtype in which it arrives.
        host=masters + gradients + states + (0 if is_sharded else served * held) if on_host else 0.0,
    )


def served_bytes(shape: ModelShape, config: TrainingOptions) -> int:
    """Return the bytes of a weight in the dtype of the forward."""
    return DTYPE_BYTES.get(config.dtype, shape.stored_bytes)


def trained_parameters(shape: ModelShape, config: TrainingOptions) -> int:
    """Return the number of trained parameters: of all layers, of those that a filter names, or of the adapter."""
    if config.trains_adapter:
        layers = _layers(shape, config.lora_layer_indices)
        return len(layers) * adapter_parameters(shape, config.lora_r, config.lora_target_modules)
    if config.train_layer_indices is None:
        return shape.parameters
    return len(_layers(shape, config.train_layer_indices)) * shape.layer_parameters


def adapter_parameters(shape: ModelShape, rank: int, targets: list[str] | None) -> int:
    """Return the number of an adapter's parameters in one layer; a module of another name counts as the largest."""
    attention, mlp = list(shape.linear)[:4], list(shape.linear)[4:] if shape.experts == 1 else []
    presets = {"all-linear": attention + mlp, "attention": attention, "mlp": mlp}  # no adapter of joined experts
    largest = max(shape.linear.values(), key=sum)
    names = {name for target in targets or ADAPTED_BY_DEFAULT for name in presets.get(target, [target])}
    return sum(rank * sum(shape.linear.get(name.rpartition(".")[2], largest)) for name in names)


def server_needs(
    shape: ModelShape,
    config: TrainingOptions,
    *,
    cached_tokens: int,
    workspace_bytes: float = SERVER_WORKSPACE_BYTES,
) -> float:
    """Return the bytes that vLLM needs on one GPU for the weights, its adapters and a cache of so many tokens.

    Several servers on this GPU, which divide `--gpu-memory-utilization` among them, count together.
    """
    cache = _cache_bytes(shape, config, cached_tokens)
    servers = max(1, config.local_servers) if config.vllm_gpu is None else 1
    return servers * (_served_tensors(shape, config) + cache + workspace_bytes)


def server_cache(shape: ModelShape, config: TrainingOptions, *, share_bytes: float) -> float | None:
    """Return the bytes of one server's cache that fill its share of each GPU; None if they hold no whole sequence."""
    cache = share_bytes - _served_tensors(shape, config) - SERVER_WORKSPACE_BYTES
    return cache if cache >= _cache_bytes(shape, config, config.max_model_len) else None


def _served_tensors(shape: ModelShape, config: TrainingOptions) -> float:
    """Return the bytes of one server's weights and adapters on each of its GPUs."""
    served = served_bytes(shape, config)
    weight_bytes = served if config.vllm_quantization is None else QUANTISED_BYTES.get(config.vllm_quantization, 0.5)
    adapters = 0
    if config.trains_adapter:
        kept = config.served_adapters
        adapters = kept * shape.layers * adapter_parameters(shape, served_rank(config.lora_r), ["all-linear"])
    return (weight_bytes * shape.parameters + served * adapters) / config.vllm_tensor_parallel_size


def _cache_bytes(shape: ModelShape, config: TrainingOptions, tokens: int) -> float:
    per_token = shape.cache_bytes_per_token(served_bytes(shape, config))
    return per_token * tokens / config.vllm_tensor_parallel_size


def _own_weights(shape: ModelShape, config: TrainingOptions, served: int, trained: int) -> float:
    """Return the bytes of the weights that the forward reads, as far as they are neither masters nor the server's."""
    if config.trains_adapter:
        copies = served * trained if config.master_weights != "none" and served != 4 else 0
        if not config.load_in_4bit:
            return served * shape.parameters + copies
        packed = shape.layers * shape.packed_parameters
        return FOUR_BIT_BYTES * packed + served * (shape.parameters - packed) + copies
    if config.world_size > 1:
        size = config.trainer_tensor_parallel_size
        layer, ends = shape.layer_parameters / size, shape.end_parameters / size
        whole_head = shape.vocabulary * shape.hidden if size > 1 else 0  # for its product, in addition to its rows
        gathered = shape.layers if not config.reshard_after_forward else min(2, shape.layers)
        summed = 4 * (layer + ends)  # gradients of a layer before they are scattered
        return served * (gathered * layer + ends + whole_head) + summed
    forward_has_own = config.master_weights != "fp32" or served != 4
    if config.shares_memory:
        return served * trained if config.forwards_from_masters and forward_has_own else 0.0
    return served * (shape.parameters if forward_has_own else shape.parameters - trained)


def _activations(shape: ModelShape, config: TrainingOptions, served: int) -> float:
    """Return the bytes that the backward of the largest micro-batch needs, the head's included."""
    tokens = max(config.micro_batch_tokens, config.seq_len)
    indices = config.lora_layer_indices if config.trains_adapter else config.train_layer_indices
    passed = shape.layers - min(_layers(shape, indices))  # a layer below the first trained one keeps nothing
    in_hidden, in_intermediate = WORKING_SET
    intermediate = shape.intermediate * shape.active_experts / config.trainer_tensor_parallel_size
    layer = in_hidden * shape.hidden + in_intermediate * intermediate
    kept = passed * layer
    passing = LAYER_GRADIENTS * intermediate
    if config.gradient_checkpointing:
        # Offloaded inputs: the one that is copied away and the one that is copied back.
        kept = shape.hidden * (min(2, passed) if config.activation_offloading else passed)
        passing += layer
    dequantised = served * shape.hidden * shape.intermediate if config.load_in_4bit else 0
    head = LOGIT_COPIES * 4 * min(config.logprob_chunk_tokens * shape.vocabulary, MOST_CHUNK_LOGITS)
    if not config.trains_adapter and config.train_layer_indices is None:
        head += 2 * 4 * shape.vocabulary * shape.hidden  # its gradient in fp32, and what a chunk adds to it
    return served * tokens * kept + max(served * tokens * passing + dequantised, head)


def _step_bytes(shape: ModelShape, config: TrainingOptions) -> float:
    """Return the bytes that the optimizer's step allocates besides its states, once the activations are freed."""
    if config.trains_adapter or config.master_weights == "host":
        return 0.0
    ends = shape.vocabulary * shape.hidden if config.train_layer_indices is None else 0
    largest = max(ends, shape.hidden * shape.intermediate)
    rounded = 2.0 * 4 * max(ROUNDED_AT_ONCE, largest) if config.master_weights == "none" else 0.0
    return rounded + (ADAFACTOR_COPIES * 4 * largest if config.optimizer == "adafactor" else 0)


def _copies(config: TrainingOptions) -> int:
    """Return the number of copies of the trained weights that a reference policy and older versions take."""
    has_reference = bool(config.kl_coef) and (not config.trains_adapter or config.ref_update_interval > 0)
    return config.keep_versions + (1 if has_reference else 0)


def _layers(shape: ModelShape, indices: str | None) -> frozenset[int]:
    return frozenset(range(shape.layers)) if indices is None else parse_layer_indices(indices, shape.layers)
