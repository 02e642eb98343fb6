"""Specs: what a tensor, or a tree of tensors, may look like."""
