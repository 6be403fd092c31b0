"""Whether an answer that is not the cold one may be another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from skippy.demo.evidence import ColdRuns
from skippy.model import Model

if TYPE_CHECKING:
    from skippy.bench.play import Row, Settings

__all__ = ["judged"]


def judged(rows: list[Row], settings: Settings) -> list[Row]:
    """Of answers that leave the cold one, whether they do so at a near tie.  Only while no arm is running."""
    cold = {row.index: row.answer["tokens"] for row in rows if row.arm == "cold" and row.round == 0}
    known: dict[tuple[int, tuple[int, ...]], bool] = {}
    found = []
    model = None
    try:
        for row in rows:
            if row.same:
                found.append(row)
                continue
            key = (row.index, tuple(row.answer["tokens"]))
            if key not in known:
                model = model or Model(settings.model, n_gpu_layers=settings.n_gpu_layers)
                runs = ColdRuns(
                    model,
                    n_ctx=settings.n_ctx,
                    n_batch=settings.n_batch,
                    n_threads=settings.threads,
                    flash_attn=settings.flash_attn,
                )
                prompt = np.array(row.request.prompt, np.int32)
                parting = runs.parting(prompt, cold[row.index], row.answer["tokens"])
                known[key] = parting is None or parting.near_tie
            found.append(replace(row, near_tie=known[key]))
    finally:
        if model is not None:
            model.close()
    return found
