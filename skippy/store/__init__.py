"""The disk tier: saved state that outlives the process, in one folder that several processes may use."""

from skippy.store.tier import DiskTier

__all__ = ["DiskTier"]
