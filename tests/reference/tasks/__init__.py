"""Tasks that TorchRL's documentation teaches, written anew with its names and envkit imported instead."""
