"""A stream that adapts while it serves: monitors without labels, a guard, snapshots."""
