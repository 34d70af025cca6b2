"""Seconds of a training step with our methods, beside what users would take otherwise."""
