"""Environment servers and the SDK they are written with."""
