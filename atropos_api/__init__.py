"""The trajectory broker: environments push scored groups, trainers pull exact batches."""
