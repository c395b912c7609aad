"""An engine: the native one, which also logs the number of its requests.

To write an engine from scratch, implement homeostat.rollout.engine.Engine. If you derive it from
homeostat.rollout.stepping.SteppingEngine, you only write the sampling itself. Every engine must
pass the suite in tests/contract.
"""

import logging
from dataclasses import replace
from functools import partial

from homeostat import plugins
from homeostat.config.native import NativeEngineConfig
from homeostat.rollout.backend import EngineBackend
from homeostat.rollout.engine import Request
from homeostat.rollout.native.backend import NATIVE, open_here
from homeostat.rollout.native.engine import NativeEngine

log = logging.getLogger(__name__)


class Counted(plugins.Engine, NativeEngineConfig):
    """The native engine, which logs the number of its requests."""

    log_every: int = plugins.key(100, ge=1, resume="free", help="Requests between two log lines.")

    @classmethod
    def backend(cls) -> EngineBackend:
        return replace(NATIVE, open_here=partial(open_here, engine=CountingEngine))


class CountingEngine(NativeEngine):
    """Counts what is submitted."""

    num_asked = 0

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.num_asked += 1
        if self.num_asked % self.config.log_every == 0:
            log.warning("%d completions were requested", self.num_asked)
