"""Whether requests should be sent here, and if not why."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What the server is doing."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class Health:
    """Ready means: loaded, its canary has passed, and nothing has gone wrong since. Any thread may ask and tell.

    Attributes:
        phase: what the server is doing.
        canary: whether the loaded model has shown that it computes right; None before it was asked.
    """

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.canary: bool | None = None
        self._faults: dict[str, str] = {}

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why not; nothing when ready."""
        faults = tuple(self._faults.values())
        if self.phase is Phase.SERVING:
            return faults
        return (*faults, f"the server is {self.phase}")

    @property
    def accepting(self) -> bool:
        """Whether a request that comes nevertheless is served."""
        return self.phase is Phase.SERVING and not {"fatal", "hang"} & self._faults.keys()

    def passed(self) -> None:
        """The model is loaded and its canary has passed."""
        self.canary = True
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    def fault(self, kind: str, reason: str) -> None:
        """Something went wrong. "nan" leaves other requests served; after "hang" and "fatal" none is."""
        self._faults = {**self._faults, kind: reason}

    def recovered(self, kind: str) -> None:
        """It is over."""
        self._faults = {key: reason for key, reason in self._faults.items() if key != kind}
