"""Settings of all tests: examples of a property may take as long as a busy machine needs."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "gem", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("gem")
