"""Imported by any Python that finds it: the wall clock leaps to and fro by days at every look."""

from __future__ import annotations

import random
import time

_DAYS = 86_400.0
_real = time.time


def _leaping() -> float:
    return _real() + random.uniform(-30, 30) * _DAYS


time.time = _leaping
