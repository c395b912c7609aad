"""Settings of property tests whose single example takes long.

The number of examples comes from the profile (tests/conftest.py), so that one variable makes all
property tests thorough.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Fixtures of these tests hold a model that no example changes.
COSTLY = settings(
    max_examples=max(3, settings.default.max_examples // 6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
