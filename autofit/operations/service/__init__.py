"""Searches in the background: asked for by anyone, driven by a runner, resumed by the next one."""
