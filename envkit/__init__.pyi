"""Types of the lazy front door; `tests/test_front_door.py` keeps it equal to `__init__.py`."""

from bridges.brax import BraxEnv as BraxEnv
from bridges.brax import BraxWrapper as BraxWrapper
from bridges.gym_backend import gym_backend as gym_backend
from bridges.gym_backend import set_gym_backend as set_gym_backend
from bridges.gym_info import default_info_dict_reader as default_info_dict_reader
from bridges.gym_like import GymLikeEnv as GymLikeEnv
from bridges.gymnasium import GymEnv as GymEnv
from bridges.gymnasium import GymWrapper as GymWrapper
from bridges.jax_env import JaxEnv as JaxEnv
from bridges.libraries import get_available_libraries as get_available_libraries
from envkit.base import EnvBase as EnvBase
from envkit.batched.creator import EnvCreator as EnvCreator
from envkit.batched.creator import env_creator as env_creator
from envkit.batched.metadata import EnvMetaData as EnvMetaData
from envkit.batched.mixed import MixedEnv as MixedEnv
from envkit.batched.parallel import ParallelEnv as ParallelEnv
from envkit.batched.serial import SerialEnv as SerialEnv
from envkit.checks import check_env_specs as check_env_specs
from envkit.functional import Box as Box
from envkit.functional import Discrete as Discrete
from envkit.functional import StatelessEnv as StatelessEnv
from envkit.functional import TimeLimit as TimeLimit
from envkit.functional import Timestep as Timestep
from envkit.policy import ExplorationType as ExplorationType
from envkit.policy import exploration_type as exploration_type
from envkit.policy import set_exploration_type as set_exploration_type
from envkit.specs import Binary as Binary
from envkit.specs import BinaryBox as BinaryBox
from envkit.specs import Bounded as Bounded
from envkit.specs import BoundedContinuous as BoundedContinuous
from envkit.specs import BoundedDiscrete as BoundedDiscrete
from envkit.specs import BoxList as BoxList
from envkit.specs import Categorical as Categorical
from envkit.specs import CategoricalBox as CategoricalBox
from envkit.specs import Choice as Choice
from envkit.specs import Composite as Composite
from envkit.specs import ContinuousBox as ContinuousBox
from envkit.specs import DiscreteBox as DiscreteBox
from envkit.specs import MultiCategorical as MultiCategorical
from envkit.specs import MultiOneHot as MultiOneHot
from envkit.specs import NonTensor as NonTensor
from envkit.specs import OneHot as OneHot
from envkit.specs import Stacked as Stacked
from envkit.specs import StackedComposite as StackedComposite
from envkit.specs import TensorSpec as TensorSpec
from envkit.specs import Unbounded as Unbounded
from envkit.specs import UnboundedContinuous as UnboundedContinuous
from envkit.specs import UnboundedDiscrete as UnboundedDiscrete
from envkit.specs import check_no_exclusive_keys as check_no_exclusive_keys
from envkit.specs import consolidate_spec as consolidate_spec
from envkit.specs import contains_lazy_spec as contains_lazy_spec
from envkit.specs import make_composite_from_td as make_composite_from_td
from envkit.transforms.autoreset import AutoResetEnv as AutoResetEnv
from envkit.transforms.autoreset import AutoResetTransform as AutoResetTransform
from envkit.transforms.autoreset import VecGymEnvTransform as VecGymEnvTransform
from envkit.transforms.base import Transform as Transform
from envkit.transforms.compose import Compose as Compose
from envkit.transforms.env import TransformedEnv as TransformedEnv
from envkit.transforms.episodes import InitTracker as InitTracker
from envkit.transforms.episodes import StepCounter as StepCounter
from envkit.transforms.episodes import TrajCounter as TrajCounter
from envkit.transforms.flow import ConditionalSkip as ConditionalSkip
from envkit.transforms.flow import FrameSkipTransform as FrameSkipTransform
from envkit.transforms.flow import NoopResetEnv as NoopResetEnv
from envkit.transforms.flow import RemoveEmptySpecs as RemoveEmptySpecs
from envkit.transforms.postprocess import MultiStep as MultiStep
from envkit.transforms.primer import TensorDictPrimer as TensorDictPrimer
from envkit.transforms.recurrent import (
    get_env_transforms_from_module as get_env_transforms_from_module,
)
from envkit.transforms.render import PixelRenderTransform as PixelRenderTransform
from envkit.transforms.returns import RewardSum as RewardSum
from envkit.transforms.returns import TargetReturn as TargetReturn
from envkit.transition import step_mdp as step_mdp
from envkit.transition import terminated_or_truncated as terminated_or_truncated

__version__: str
filter_warnings_subprocess: bool
__all__: list[str]
