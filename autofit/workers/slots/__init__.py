"""The slots of a pool: workers that come up, run trials and are lost."""
