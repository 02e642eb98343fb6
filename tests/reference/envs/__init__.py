"""Environments written once against public names, built for both libraries, and driven by the same calls."""
