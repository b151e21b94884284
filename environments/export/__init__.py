"""What becomes of collected groups beside training: pages to read them, and data sets for SFT and DPO."""
