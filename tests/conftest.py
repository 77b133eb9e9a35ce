"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A loaded machine is slow, not wrong: no test fails for the time an example takes.
settings.register_profile("antiphon", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("antiphon")
