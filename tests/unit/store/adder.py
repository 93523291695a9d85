"""A process that adds one trial repeatedly: `adder.py URL COUNT`, with the trial as JSON on standard input.

Prints the id of each trial once the store has saved it.
"""

from __future__ import annotations

import json
import sys

from autofit.core.outcome import Trial
from autofit.store import Store

if __name__ == "__main__":
    trial = Trial.from_json(json.load(sys.stdin))
    with Store.open(sys.argv[1]) as store:
        for _ in range(int(sys.argv[2])):
            print(store.add(trial).trial_id, flush=True)
