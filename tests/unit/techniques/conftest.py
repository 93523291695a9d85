"""Fixtures for all tests that train tiny models."""

from __future__ import annotations

from tests.tiny import forgetful_bitsandbytes, one_thread

__all__ = ["forgetful_bitsandbytes", "one_thread"]
