from __future__ import annotations

import pytest

from headrace.volume import heartbeat


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes over heartbeats: whoever held the volume is dead, and no second taker comes."""
    monkeypatch.setattr(heartbeat, "SETTLE_S", 0.0)
    monkeypatch.setattr(heartbeat, "wait_for_silence", lambda block, seen, missed: True)
