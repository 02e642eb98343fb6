"""The main job, end to end: Brax trains a policy, Gymnasium checks it, one code for both."""

from envkit.demo.job import run

__all__ = ["run"]
