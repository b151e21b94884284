"""The sections of `TrainingConfig`, a file each: fields, defaults and what each flag means."""
