"""A service over HTTP: streams that adapt while they serve, the Open Inference Protocol, a live page."""
