"""A callback for trainers that are built on transformers: Trainer, TRL, axolotl, LLaMA-Factory.

    from homeostat.integrations.transformers import HealthCallback

    trainer = GRPOTrainer(..., callbacks=[HealthCallback(stop_on="error")])

It reads what the trainer logs (`logging_steps=1` gives it the most), prints each finding when it
appears, and appends it to `homeostat_findings.jsonl` in the trainer's `output_dir`. Only the first
process of a run does so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homeostat.errors import MissingDependencyError
from homeostat.health.frameworks import ALL, Framework
from homeostat.integrations.live import (
    FINDINGS_FILE,
    Guard,
    LiveDoctor,
    as_level,
    rules_without,
    say,
)
from homeostat.integrations.outlets import Webhook

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
else:
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        TrainerCallback = None

# Package of the class of a trainer's arguments -> the framework; the first in the class's ancestry.
_PACKAGES = {
    "axolotl": "axolotl",
    "llamafactory": "llama_factory",
    "swift": "ms_swift",
    "UnslothGRPOTrainer": "unsloth",
    "UnslothSFTTrainer": "unsloth",
    "UnslothDPOTrainer": "unsloth",
    "unsloth": "unsloth",
    "open_r1": "open_r1",
    "trl": "trl",
    "transformers": "transformers",
}


def framework_of(args: object) -> Framework:
    """Return the framework that a trainer's arguments belong to."""
    packages = [one.__module__.partition(".")[0] for one in type(args).__mro__]
    found = next((_PACKAGES[name] for name in packages if name in _PACKAGES), "transformers")
    return ALL[found]


# pyrefly: ignore[invalid-inheritance]
class HealthCallback(TrainerCallback or object):
    """Watch a training run, and report each illness once, when it appears.

    level      lowest level to report: "info", "warn" or "error"
    stop_on    ask the trainer to stop, as early stopping does, at the first finding of this level
               or above; None never does
    ignore     codes or names of rules to skip
    webhook    address to which every finding is posted as JSON
    """

    def __init__(
        self,
        *,
        level: str = "warn",
        stop_on: str | None = None,
        ignore: Sequence[str] = (),
        webhook: str | None = None,
    ) -> None:
        if TrainerCallback is None:
            raise MissingDependencyError(
                "HealthCallback needs the package transformers, which is not installed: "
                "pip install transformers."
            )
        # Mistakes in these are reported now, not in the middle of a run.
        self._level = as_level(level, name="level")
        self._stop_on = as_level(stop_on, name="stop_on")
        rules_without(ignore)
        if webhook is not None:
            Webhook(webhook)
        self._ignore = tuple(ignore)
        self._webhook = webhook
        self._guard = Guard()
        self.doctor: LiveDoctor | None = None

    @property
    def failure(self) -> str:
        """Return the error that switched the doctor off; "" if it works."""
        return self._guard.failure

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.is_world_process_zero:
            self._guard.call(self._begin, args, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        doctor = self.doctor
        if doctor is None or logs is None:
            return
        self._guard.call(doctor.record, state.global_step, logs)
        if doctor.stop_finding is not None and args.world_size == 1:
            self._stop(control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Agree with the other processes on whether to stop: if one stops alone, the rest hang.

        All processes log at the same steps, so they also ask at the same steps.
        """
        if self._stop_on is None or args.world_size == 1:
            return
        if state.global_step % max(1, round(args.logging_steps)) == 0:
            mine = self.doctor is not None and self.doctor.stop_finding is not None
            if _said_by_first(mine, args):
                self._stop(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.doctor is not None:
            self._guard.call(self.doctor.close)

    def _begin(self, args: TrainingArguments, state: TrainerState) -> None:
        settings = args.to_dict()
        assert self._level is not None
        self.doctor = LiveDoctor(
            run=str(args.output_dir),
            framework=framework_of(args),
            settings=settings,
            total_steps=state.max_steps if state.max_steps > 0 else None,
            level=self._level,
            stop_on=self._stop_on,
            ignore=self._ignore,
            file=Path(args.output_dir) / FINDINGS_FILE if args.output_dir else None,
            webhook=self._webhook,
            facts={"nan_prints_as_zero": bool(settings.get("logging_nan_inf_filter", True))},
        )
        self.doctor.restore(state.log_history)

    def _stop(self, control: TrainerControl) -> None:
        if control.should_training_stop:
            return
        control.should_training_stop = True
        finding = self.doctor.stop_finding if self.doctor is not None else None
        if finding is not None:
            say(f"homeostat: asking the trainer to stop because of {finding.code} {finding.name}.")


def _said_by_first(mine: bool, args: TrainingArguments) -> bool:
    """Broadcast the answer of the first process to all processes."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([int(mine)], device=args.device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())
