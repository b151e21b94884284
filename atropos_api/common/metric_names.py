"""The names of all metrics of a run, as metrics.jsonl, W&B and the page use them.

`monitoring.prometheus` derives Prometheus' names from them; metrics of the broker's process are in `routes.metrics`.

The text under a name is its line in docs/reference/metrics.md, and the comment over a group of names is its heading
there; a name with braces stands for a family. Code that logs a metric adds its name here, at the end of its section.
"""

from __future__ import annotations

from typing import Final

# The step
STEP: Final = "step"
"""Number of the step, which is that of its batch."""
POLICY_VERSION: Final = "policy_version"
"""Version of the weights published last, after this step."""

# Rewards
REWARD_MEAN: Final = "reward/mean"
"""Mean reward of all sequences of the batch, those without a training signal included."""
REWARD_STD: Final = "reward/std"
"""Population standard deviation of the same rewards."""
REWARD_OVERLONG_PENALTY: Final = "reward/overlong_penalty"
"""Mean of what --overlong-penalty added to the rewards, which are logged without it."""

# Advantages of all sequences of the batch, 0 for those without a training signal
ADVANTAGE_MEAN: Final = "advantages/mean"
"""Mean; 0 if every group is whole, since each group's own mean is its baseline."""
ADVANTAGE_STD: Final = "advantages/std"
"""Population standard deviation; about 1 if --advantage-norm divides, and less if groups have no signal."""
ADVANTAGE_MIN: Final = "advantages/min"
"""The smallest."""
ADVANTAGE_MAX: Final = "advantages/max"
"""The largest."""
ADVANTAGE_ZERO_GROUPS: Final = "advantages/zero_group_fraction"
"""Share of groups whose advantages are all 0: their rewards are equal, so nothing is learned from them."""

# Lengths and contents, in tokens sampled by the model
RESPONSE_LENGTH_MEAN: Final = "response/length_mean"
"""Mean over all sequences of the batch."""
RESPONSE_LENGTH_STD: Final = "response/length_std"
"""Population standard deviation over all sequences."""
RESPONSE_LENGTH_MIN: Final = "response/length_min"
"""The shortest."""
RESPONSE_LENGTH_MAX: Final = "response/length_max"
"""The longest."""
TRAINED_LENGTH_MEAN: Final = "response/trained_length_mean"
"""Mean over the sequences that are trained on; if far below `response/length_mean`, long answers are left out."""
RESPONSE_REPETITION: Final = "response/repetition"
"""Share of 4-grams that occurred before in the same answer, over all answers: near 1, the output repeats itself."""

# The batch
SEQUENCES: Final = "data/sequences"
"""Sequences in the batch."""
TRAINED_TOKENS: Final = "data/trained_tokens"
"""Tokens over which the loss is taken."""
TRAINED_FRACTION: Final = "data/trained_fraction"
"""Trained tokens divided by all sampled tokens."""
LEFT_OUT: Final = "data/{cause}"
"""Sequences left out: `overlong`, `truncated`, `no_signal` (rewards all equal), `zeroed`, `no_trained_token`,
`absent` (of closed groups), `unusable` (of groups that --unusable-groups leaves out)."""
NO_SIGNAL_FRACTION: Final = "data/no_signal_fraction"
"""Share of sequences left out because the rewards of their group are all equal."""
SAMPLING_MASK_FRACTION: Final = "data/sampling_mask_fraction"
"""Share of the trained tokens of a truncated distribution (top-p or similar) whose sampling mask is known; others are
only weighted. Raise --env.sampling_mask_limit if it is far below 1."""

# Each environment
ENV_SEQUENCES: Final = "env/{id}/sequences"
"""Sequences of the batch that came from the environment with this id; the broker's status shows its name."""
ENV_REWARD_MEAN: Final = "env/{id}/reward_mean"
"""Their mean reward."""
ENV_REWARD_STD: Final = "env/{id}/reward_std"
"""Population standard deviation of their rewards."""
ENV_LENGTH_MEAN: Final = "env/{id}/length_mean"
"""Their mean number of sampled tokens."""

# Training
TRAIN_LOSS: Final = "train/loss"
"""Loss, mean of the step's optimizer steps."""
TRAIN_LR: Final = "train/lr"
"""Learning rate of the last optimizer step."""
TRAIN_GRAD_NORM: Final = "train/grad_norm"
"""Norm of the gradient before it is clipped, mean of the step's optimizer steps (without `train/skipped_steps`)."""
TRAIN_ENTROPY: Final = "train/entropy"
"""Entropy of the distribution at the trained tokens, in nats."""
TRAIN_KL: Final = "train/kl"
"""k3 estimate of the divergence of the policy from the one that sampled, in nats a token."""
TRAIN_SKIPPED: Final = "train/skipped"
"""1 if no group of the batch had a training signal, or each gradient was 0 (all tokens clipped or masked)."""
TRAIN_NONFINITE: Final = "train/nonfinite"
"""Optimizer steps left out because loss or gradient was not finite."""
TRAIN_POS_LOGP: Final = "train/pos_logp"
"""Mean logprob of trained tokens with a positive advantage."""
TRAIN_NEG_LOGP: Final = "train/neg_logp"
"""Mean logprob of trained tokens with a negative advantage."""
TRAIN_LOSS_TERM: Final = "train/loss_{term}"
"""Part of the loss, with its coefficient: `policy`, and `kl`, `entropy` and `distill` if they are on."""
TRAIN_KL_REFERENCE: Final = "train/kl_reference"
"""Estimate of the divergence from the reference policy, in nats a token; only with --kl-coef."""
TRAIN_KL_COEF: Final = "train/kl_coef"
"""Its coefficient in this step; --target-kl adapts it."""
TRAIN_SKIPPED_STEPS: Final = "train/skipped_steps"
"""Optimizer steps left out because the gradient overflowed at the loss scale; only with --dtype float16."""
TRAIN_LOSS_SCALE: Final = "train/loss_scale"
"""Factor of the loss in the backward, after this step: an overflow halves it; only with --dtype float16."""

# Ratios, before any clip or truncation
MEAN_RATIO: Final = "grpo/mean_ratio"
"""Mean probability ratio, policy to sampler, over trained tokens; healthy between 0.8 and 1.2."""
MAX_RATIO: Final = "grpo/max_ratio"
"""The largest."""
CLIPPED_FRACTION: Final = "grpo/clipped_fraction"
"""Share of trained tokens whose ratio (in dppo: probability) the loss clips, masks or caps; healthy below 0.3."""
MISMATCH_MEAN_RATIO: Final = "mismatch/mean_ratio"
"""Mean ratio of the trainer's old logprobs to the sampler's; only with --old-logprobs recomputed."""
MISMATCH_MAX_RATIO: Final = "mismatch/max_ratio"
"""The largest."""
MISMATCH_BOUNDED_FRACTION: Final = "mismatch/bounded_fraction"
"""Share of trained tokens whose ratio --mismatch-correction truncates or masks."""
OFF_POLICY_FRACTION: Final = "grpo/off_policy_fraction"
"""Share of trained tokens that --off-policy-mask masks."""
SECOND_MOMENT: Final = "grpo/second_moment"
"""Mean squared log-ratio, policy to sampler, of the tokens that their advantage pushes away from the sampler; only with
--loss-type m2po."""
SECOND_MOMENT_KEPT: Final = "grpo/second_moment_kept"
"""The same without the tokens that the loss masks: at most --m2-threshold when a batch begins, and with --mini-batches
more by the updates before a token's own."""

# Logprobs
LOGPROBS_TRAINING_MEAN: Final = "logprobs/training_mean"
"""Mean logprob of trained tokens in the trainer's first forward."""
LOGPROBS_TRAINING_STD: Final = "logprobs/training_std"
"""Population standard deviation of the same."""
LOGPROBS_INFERENCE_MEAN: Final = "logprobs/inference_mean"
"""Mean logprob of the same tokens as the sampler gave them."""
LOGPROBS_INFERENCE_STD: Final = "logprobs/inference_std"
"""Population standard deviation of the same."""

# Alignment: logprobs of trainer minus sampler, both under the weights that sampled the token, before these change
ALIGNMENT_DIFF_MEAN: Final = "alignment/diff_mean"
"""Mean difference; close to 0."""
ALIGNMENT_DIFF_ABS_MEAN: Final = "alignment/diff_abs_mean"
"""Mean absolute difference: about 1e-6 in fp32, 1e-3 in float16, below 5e-3 in bf16; above 0.1 the weights differ."""
ALIGNMENT_DIFF_MAX: Final = "alignment/diff_max"
"""Largest absolute difference."""
ALIGNMENT_TOKENS: Final = "alignment/tokens"
"""Tokens compared."""

# Age of trained tokens, in trainer steps
STALENESS_MEAN: Final = "staleness/mean"
"""Mean age."""
STALENESS_MAX: Final = "staleness/max"
"""Age of the oldest token."""
STALENESS_AGE: Final = "staleness/age_{steps}"
"""Histogram: share of trained tokens of this age: `age_0` to `age_3`, `age_4_to_7`, `age_8_or_more`."""
STALENESS_UNKNOWN: Final = "staleness/age_unknown"
"""Share of trained tokens whose policy version is unknown."""
STALENESS_WEIGHT: Final = "staleness/weight_mean"
"""Mean weight of trained tokens by --staleness-mask and --staleness-decay; only with one of them."""

# Throughput and memory
TOKENS_PER_SECOND: Final = "perf/tokens_per_second"
"""Sampled tokens of the batch over the time of the step."""
TRAINED_TOKENS_PER_SECOND: Final = "perf/trained_tokens_per_second"
"""Trained tokens over the time of training alone."""
FORWARD_TOKENS: Final = "perf/forward_tokens"
"""Tokens that went through the model, padding included, over all passes."""
PADDED_FRACTION: Final = "perf/padded_fraction"
"""Share of them that are padding."""
ZERO_GRADIENT_FRACTION: Final = "perf/zero_gradient_fraction"
"""Share of trained tokens without a gradient of the policy loss: clipped, masked by --staleness-mask, --off-policy-mask
or --mismatch-correction, or with an advantage of 0. Other terms of the loss may give them one."""
GPU_MEMORY: Final = "perf/gpu_memory_gb"
"""Largest memory held by tensors since the step before, GiB; on a GPU only."""
GPU_MEMORY_RESERVED: Final = "perf/gpu_memory_reserved_gb"
"""Memory reserved from the device, GiB; on a GPU only."""
HOST_MEMORY: Final = "perf/host_memory_gb"
"""Resident memory of the trainer process, GiB."""

# Publishing weights
RECOMPUTED_FRACTION: Final = "sync/recomputed_fraction"
"""Tokens whose KV entries the last publish had recomputed, divided by those generated since the publish before."""

# Time, in seconds
TIME_STEP: Final = "time/step"
"""The whole step."""
TIME_FETCH: Final = "time/fetch"
"""Waiting for the batch."""
TIME_TRAIN: Final = "time/train"
"""Forward, backward and optimizer."""
TIME_SYNC: Final = "time/sync"
"""The last publish, from its call to the server serving the new version."""
TIME_SYNC_FENCE: Final = "time/sync_fence"
"""Time for which that publish held back new requests."""
TIME_SYNC_LOSS: Final = "time/sync_loss"
"""Generation time lost by draining and recomputing running requests, if the server chose (`--in-flight auto`)."""
TIME_SYNC_EXPECTED_LOSS: Final = "time/sync_expected_loss"
"""The same time, as the server expected it when it chose."""
TIME_SYNC_WAIT: Final = "time/sync_wait"
"""Time for which the step waited for publish, checkpoint and commit."""

# Supervised fine-tuning, logged by atropos-sft beside those of training, throughput and time
SFT_EPOCH: Final = "sft/epoch"
"""Passes over the data up to this step, a fraction within one."""
SFT_EVAL_LOSS: Final = "sft/eval_loss"
"""Mean negative logprob of the learned tokens of the evaluation data, in nats; in steps that evaluate."""

# Evaluation, logged by environments
EVAL_ACCURACY: Final = "eval/accuracy"
"""Share of held-out problems answered right."""
EVAL_PERCENT_CORRECT: Final = "eval/percent_correct"
"""The same share, from 0 to 1, under Atropos' name."""
EVAL_ACCURACY_OF_SET: Final = "eval/accuracy_{set}"
"""Accuracy on one evaluation set of `math_server_zero`."""
EVAL_FORMAT_REWARD: Final = "eval/format_reward"
"""Mean reward of the form alone."""
EVAL_ANSWER_REWARD: Final = "eval/answer_reward"
"""Mean reward of the answer alone."""
EVAL_LENGTH_MEAN: Final = "eval/length_mean"
"""Mean number of tokens sampled for an answer."""
EVAL_REWARD: Final = "eval/reward"
"""Mean reward on held-out records; of `dataset_server` and `verifiers_server`."""
EVAL_REWARD_PART: Final = "eval/reward/{name}"
"""Mean score by one of several rewards; of `dataset_server`."""
EVAL_JUDGED: Final = "eval/judged"
"""Mean score that the judge gives; of `judge_server`."""
EVAL_OTHER: Final = "eval/{name}"
"""Mean of a metric of the wrapped environment; of `verifiers_server`."""
