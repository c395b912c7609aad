"""The settings of a running run: the recipe, and the edits that remedies have made to it.

Whoever needs a setting that can change while the run is going asks `LiveConfig.now` for it when it
needs it, or is called on a change. Nothing else may change settings of a running run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from homeostat.config.algorithm import PolicyGradientConfig
from homeostat.config.loading.edits import edited, value_at
from homeostat.config.run import RunConfig
from homeostat.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Edit:
    """A value that replaces the recipe's, and the first step that it was used for."""

    value: Any
    step: int


class LiveConfig:
    """The recipe with the edits that are in force. `now` is the result."""

    def __init__(self, recipe: RunConfig) -> None:
        self.recipe = recipe
        self.now = recipe
        self.edits: dict[str, Edit] = {}
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `now` has changed."""
        self._listeners.append(listener)

    def adopt(self, edits: dict[str, Edit]) -> None:
        """Put the edits of a resumed run in force. The dict itself is kept: checkpoints save it."""
        self.edits = edits
        if edits:
            self._apply()

    def can_edit(self, path: str) -> bool:
        """Return whether this run can use another value of a key from the next step on."""
        return path in editable_keys(self.recipe)

    def edit(self, path: str, value: Any, *, step: int) -> None:
        """Replace a value. Raises ConfigError, and changes nothing, if the key cannot have it."""
        edited(self.now, path, value)
        self.edits[path] = Edit(value, step)
        self._apply()

    def revert(self, *paths: str) -> None:
        """Return to the recipe's values."""
        for path in paths:
            del self.edits[path]
        self._apply()

    def recipe_value(self, path: str) -> Any:
        """Return the value that the recipe has, whatever is in force."""
        return value_at(self.recipe, path)

    def origin(self, of_recipe: str) -> str:
        """Extend what names the origin of rollouts by the edits in force, if there are any.

        Rollouts that were sampled under other settings must not be taken for current ones.
        """
        if not self.edits:
            return of_recipe
        edits = {path: asdict(edit) for path, edit in sorted(self.edits.items())}
        return hashlib.sha256(json.dumps([of_recipe, edits]).encode()).hexdigest()

    def _apply(self) -> None:
        config = self.recipe
        for path, edit in self.edits.items():
            config = edited(config, path, edit.value)
        self.now = config
        for listener in self._listeners:
            listener()


def with_saved_edits(recipe: RunConfig, state: Mapping[str, Any], *, place: str) -> RunConfig:
    """Return the recipe with the edits that were in force when a checkpoint was saved.

    `state` is the checkpoint's, and `place` its file. Raises CheckpointError if it cannot be read,
    and ConfigError if the recipe cannot have its values.
    """
    try:
        saved = state.get("health", {}).get("healing", {}).get("overlay", {})
        edits = {str(path): Edit(**edit) for path, edit in saved.items()}
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{place}: health.healing cannot be read: {error}.") from None
    live = LiveConfig(recipe)
    live.adopt(edits)
    return live.now


def editable_keys(config: RunConfig) -> frozenset[str]:
    """Return the keys that a run of this recipe can change between two steps."""
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        return frozenset({"trainer.lr", *_precision_keys(config)})
    kl = algorithm.kl
    # Rollouts of another run keep their own temperature, age and policy.
    samples = config.debug is None
    # Groups that were admitted under the old value are trained on later, and every version is
    # published anyway.
    is_async = config.rollout.max_staleness is not None
    is_editable = {
        "trainer.lr": True,
        "trainer.updates_per_step": True,
        "algorithm.clip_high": True,
        # A coefficient with a target adapts by itself.
        "algorithm.kl.coefficient": kl is not None and kl.target is None,
        "algorithm.correction.off_policy_mask": algorithm.correction is not None,
        "rollout.temperature": samples and not config.samples_ahead,
        "sync.interval": samples and not is_async and not config.engine.shares_weights,
    }
    return frozenset(path for path, can_change in is_editable.items() if can_change)


def _precision_keys(config: RunConfig) -> list[str]:
    """Return the keys of low precision. An engine would not follow them, so RL has none.

    Log-probs of a reference that were computed before the first step would not follow them, either.
    """
    keys = []
    if config.precomputes_reference and config.used_reference is not None:
        return keys
    if config.trainer.fp8 is not None:
        keys += [f"trainer.fp8.{name}" for name in ("start_step", "skip_first", "skip_last")]
    if config.trainer.int4 is not None:
        keys.append("trainer.int4.start_step")
    return keys
