"""Settings shared by all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A loaded machine is slow, not wrong: no test fails for the time an example takes.
settings.register_profile("antiphon", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("antiphon")

# A shell starts what runs in its background deaf to Ctrl-C, and so is what that starts: programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On processors not made by Intel CTranslate2 takes oneDNN, whose int8 products saturate at 16 bits where there is AVX2
# and no VNNI: no reference for anybody. MKL's do not.
os.environ.setdefault("CT2_USE_MKL", "1")
