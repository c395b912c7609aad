"""Which model plays which role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from homeostat.models.decoder import Decoder
from homeostat.models.lora import adapters_off
from homeostat.models.transformers_model import TransformersModel
from homeostat.types import Role

Model = Decoder | TransformersModel


@dataclass(frozen=True, slots=True)
class AdapterOff:
    """The reference is the policy without its adapter."""


Reference = Model | AdapterOff


@contextmanager
def acting(role: Role, policy: Model, reference: Reference | None) -> Iterator[Model]:
    """The module that plays a role, for as long as it does."""
    if role is Role.POLICY:
        yield policy
    elif isinstance(reference, AdapterOff):
        with adapters_off(policy):
            yield policy
    else:
        assert reference is not None, "this run has no reference model"
        yield reference


def require_policy(role: Role) -> None:
    assert role is Role.POLICY, f"only the policy is trained, not the {role}"
