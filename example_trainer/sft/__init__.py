"""Supervised fine-tuning (`atropos-sft`): chats or texts are learned with the trainer's own learner and checkpoints.

In reading order: `config` (the options, and the trainer's settings that follow from them), `batches` (rows of a data
set to training batches), `fine_tuning` (the loop), `output` (its folder), `cli`. The loss of a step is the mean
negative logprob of its learned tokens. The output is a model folder for `atropos-grpo --model-name`. It may import
everything of `example_trainer` except `commands` and `testing`.
"""
