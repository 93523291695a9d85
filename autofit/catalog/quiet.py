"""Models are built here for their shapes alone: what transformers warns of then is no concern of the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_only() -> Iterator[None]:
    """Has transformers say errors alone within; also a decorator."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
