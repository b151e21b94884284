"""HTTP in front of the broker: thin callers of its methods, and the door that decides who comes in."""
