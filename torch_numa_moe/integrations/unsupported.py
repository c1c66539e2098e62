"""The error for experts that can't be packed."""

from __future__ import annotations


class UnsupportedExpertsError(ValueError):
    """Experts that can't be packed; nothing was changed.

    Attributes:
        reasons: module name to the reason, for each module that was refused. Empty if the model has no
            module that could be packed at all; the message then says what was looked for.
    """

    def __init__(self, message: str, reasons: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = reasons or {}
