"""The same public calls on envkit and on the reference library (TorchRL), compared."""
