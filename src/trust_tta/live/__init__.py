"""Streams that adapt while they serve: label-free health monitoring, a guard, and snapshots."""
