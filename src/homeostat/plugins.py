"""Base classes of plug-ins: algorithms, rewards, sources, engines, transports and health rules.

docs/guide/plugins.md explains them with an example of each. `key` declares a key of a plug-in, as
the built-in config classes do: its default, help text and limits.
"""

from homeostat.config.base import key
from homeostat.config.data import CompletionPlugin as Completions
from homeostat.config.data import MessagesPlugin as Messages
from homeostat.config.data import PreferencePlugin as Preferences
from homeostat.config.data import PromptPlugin as Prompts
from homeostat.config.data import TextPlugin as Texts
from homeostat.config.engine import EnginePlugin as Engine
from homeostat.config.policy_gradient import AlgorithmPlugin as Algorithm
from homeostat.config.preference import PreferencePluginAlgorithm as PreferenceAlgorithm
from homeostat.config.reward_base import RewardPlugin as Reward
from homeostat.config.sync import TransportPlugin as Transport
from homeostat.health.finding import Confidence, Family, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView

__all__ = [
    "Algorithm",
    "Completions",
    "Confidence",
    "Engine",
    "Family",
    "Level",
    "Messages",
    "PreferenceAlgorithm",
    "Preferences",
    "Prompts",
    "Reward",
    "Rule",
    "RuleOptions",
    "RunView",
    "Sighting",
    "Texts",
    "Transport",
    "key",
    "option",
]
