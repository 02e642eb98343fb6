"""The main job, end to end: Brax trains a policy, Gymnasium checks it, one code for both."""

from envkit.demo.job import Curve, GoalMissedError, run

__all__ = ["Curve", "GoalMissedError", "run"]
