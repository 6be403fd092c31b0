"""What is written when the interpreter goes down although nobody closed it."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Any

__all__ = ["close_at_exit"]

log = logging.getLogger("skippy")

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(what: Any) -> None:
    """Close `what` at exit, if it is still there.  It is not kept alive."""
    _open.add(what)


@atexit.register
def _close_all() -> None:
    for each in list(_open):
        try:
            each.close()
        except KeyboardInterrupt:
            log.warning("interrupted: what was not written to disk yet is not kept")
            return
        except Exception:
            log.exception("closing at exit failed")
