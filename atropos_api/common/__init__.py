"""What all three packages share: command lines from config models, logging, metric names."""
